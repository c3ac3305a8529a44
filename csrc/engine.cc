#include "engine.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "float_mode.h"
#include "pool.h"
#include "workspaces.h"

namespace pyrlstats {
namespace {

using layout::kLog2E;

// A pure function of the number of tokens, so that sums do not depend on threads. Small enough that
// two threads have something to share at 256K tokens; large enough that a chunk's combination costs
// nothing.
int64_t chunk_tokens(int64_t count) { return count < (1 << 20) ? 16 * 1024 : 64 * 1024; }

constexpr int64_t kTokensPerThread =
    128 * 1024;  // below, waking a thread costs more than it brings

double scale_exponent(double max_x) {
  return std::floor(std::isfinite(max_x) ? max_x * kLog2E : 0.0);
}

// v * 2^exponent for an integer exponent of any size.
double scaled(double v, double exponent) {
  return v == 0 ? 0 : std::ldexp(v, (int)std::min(std::max(exponent, -5000.0), 5000.0));
}

// Sums over all chunks so far, with what rounding took away (Neumaier).
struct Total {
  Moments moments;
  double lost[layout::kSumSize];

  Total() {
    std::memset(this, 0, sizeof *this);
    moments.maxima[0] = moments.maxima[1] = moments.far_scale = -HUGE_VAL;
  }

  void add(const Moments& m) {
    const double scale = std::max(moments.far_scale, m.far_scale);
    for (int i = 0; i < layout::kCountSize; ++i) moments.counts[i] += m.counts[i];
    for (int i = 0; i < layout::kMaxSize; ++i) {
      moments.maxima[i] = std::max(moments.maxima[i], m.maxima[i]);
    }
    for (int i = 0; i < layout::kSumSize; ++i) {
      double value = m.sums[i];
      if (i == layout::kSumFarW || i == layout::kSumFarW2) {
        const double power = i == layout::kSumFarW ? 1 : 2;
        moments.sums[i] = scaled(moments.sums[i], power * (moments.far_scale - scale));
        lost[i] = scaled(lost[i], power * (moments.far_scale - scale));
        value = scaled(value, power * (m.far_scale - scale));
      }
      const double old = moments.sums[i], sum = old + value;
      if (std::isfinite(sum)) {
        lost[i] += std::fabs(old) >= std::fabs(value) ? (old - sum) + value : (value - sum) + old;
      }
      moments.sums[i] = sum;
    }
    moments.far_scale = scale;
  }

  // Pools with one slice's rows of the state.
  void add_to(int64_t* counts, double* sums, double* maxima) const {
    using namespace layout;
    const double old_scale = scale_exponent(maxima[kMaxMaxX]);
    for (int i = 0; i < kMaxSize; ++i) maxima[i] = std::max(maxima[i], moments.maxima[i]);
    const double scale = scale_exponent(maxima[kMaxMaxX]);
    for (int i = 0; i < kSumSize; ++i) {
      double mine = sums[i], theirs = moments.sums[i] + lost[i];
      if (i == kSumFarW || i == kSumFarW2) {
        const double power = i == kSumFarW ? 1 : 2;
        mine = scaled(mine, power * (old_scale - scale));
        theirs = scaled(theirs, power * (moments.far_scale - scale));
      }
      sums[i] = mine + theirs;
    }
    for (int i = 0; i < kCountSize; ++i) counts[i] += moments.counts[i];
  }
};

// Takes the moments of chunks as they are ready and adds them up in the order of the tokens. Holds
// a bounded number of chunks: a thread that is far ahead waits.
class Combiner {
 public:
  Combiner(int64_t slices, int slots)
      : slots_(slots), moments_(slots * slices), ready_(slots, false), totals_(slices) {}

  int slots() const { return slots_; }
  const std::vector<Total>& totals() const { return totals_; }

  // The place for a chunk's moments, once the chunk that had it before is added.
  Moments* place(int64_t chunk) {
    if (slots_ > 1) {
      std::unique_lock<std::mutex> lock(mutex_);
      moved_.wait(lock, [&] { return chunk < next_ + slots_; });
    }
    return &moments_[chunk % slots_ * totals_.size()];
  }

  void commit(int64_t chunk) {
    std::lock_guard<std::mutex> lock(mutex_);
    ready_[chunk % slots_] = true;
    const int64_t before = next_;
    for (; ready_[next_ % slots_]; ++next_) {
      ready_[next_ % slots_] = false;
      const Moments* m = &moments_[next_ % slots_ * totals_.size()];
      for (size_t s = 0; s < totals_.size(); ++s) totals_[s].add(m[s]);
    }
    if (next_ != before) moved_.notify_all();
  }

 private:
  const int slots_;
  std::mutex mutex_;
  std::condition_variable moved_;
  std::vector<Moments> moments_;
  std::vector<char> ready_;
  std::vector<Total> totals_;
  int64_t next_ = 0;
};

// One pass over all tokens for the slices of `plan`, whose rows start at these addresses.
void accumulate_pass(const Isa& isa, const Plan& plan, int64_t count, int threads, int64_t* counts,
                     int64_t* histogram, double* sums, double* maxima) {
  const int64_t tokens = chunk_tokens(count);
  const int64_t chunks = (count + tokens - 1) / tokens;
  threads =
      (int)std::min<int64_t>({threads, chunks, std::max<int64_t>(count / kTokensPerThread, 1)});
  Combiner combiner(plan.slices, threads > 1 ? 4 * threads : 1);
  std::atomic<int64_t> next{0};
  std::mutex finishing;
  std::vector<std::unique_ptr<const WorkspaceLease>>
      workspaces;  // here, where running out of memory may throw
  for (int t = 0; t < threads; ++t)
    workspaces.push_back(std::make_unique<WorkspaceLease>(isa, plan));
  run_on_threads(threads, [&](int thread) {
    const FloatMode ieee;
    int64_t chunk = next.fetch_add(1);
    if (chunk >= chunks) return;
    void* const workspace = workspaces[thread]->memory();
    for (; chunk < chunks; chunk = next.fetch_add(1)) {
      const int64_t begin = chunk * tokens;
      Moments* moments = combiner.place(chunk);
      isa.kernels->chunk(plan, workspace, begin, std::min(tokens, count - begin), moments);
      combiner.commit(chunk);
    }
    std::lock_guard<std::mutex> lock(finishing);
    isa.kernels->finish(plan, workspace, histogram, counts + layout::kCountNZero,
                        layout::kCountSize);
  });
  for (int64_t s = 0; s < plan.slices; ++s) {
    combiner.totals()[s].add_to(counts + s * layout::kCountSize, sums + s * layout::kSumSize,
                                maxima + s * layout::kMaxSize);
  }
}

}  // namespace

void accumulate(const Isa& isa, const Plan& plan, int64_t count, int threads, int64_t* state) {
  const int64_t bins = 2 * ((int64_t)(plan.max_exp - plan.min_exp) << plan.mantissa_bits);
  int64_t* counts = state;
  int64_t* histogram = counts + plan.slices * layout::kCountSize;
  double* sums = (double*)(histogram + plan.slices * bins);
  double* maxima = sums + plan.slices * layout::kSumSize;
  const int64_t group = plan.masks ? kMaxMasks : plan.slices;
  for (int64_t first = 0; first < plan.slices && count > 0; first += group) {
    Plan part = plan;
    if (plan.masks) part.masks = plan.masks + first;
    part.slices = std::min(group, plan.slices - first);
    accumulate_pass(isa, part, count, threads, counts + first * layout::kCountSize,
                    histogram + first * bins, sums + first * layout::kSumSize,
                    maxima + first * layout::kMaxSize);
  }
}

void count_digits(const Isa& isa, const Plan& plan, const Digits& digits, int64_t count,
                  int threads, int64_t* counts) {
  const int64_t tokens = 64 * 1024, chunks = (count + tokens - 1) / tokens;
  threads =
      (int)std::min<int64_t>({threads, chunks, std::max<int64_t>(count / kTokensPerThread, 1)});
  const int64_t words = digits.count * kDigits;
  std::vector<int64_t> memory(threads > 1 ? threads * words : 0);
  std::atomic<int64_t> next{0};
  run_on_threads(threads, [&](int thread) {
    const FloatMode ieee;
    int64_t* const mine = threads > 1 ? &memory[thread * words] : counts;
    for (int64_t chunk; (chunk = next.fetch_add(1)) < chunks;) {
      const int64_t begin = chunk * tokens;
      isa.kernels->count_digits(plan, digits, begin, std::min(tokens, count - begin), mine);
    }
  });
  for (size_t i = 0; i < memory.size(); ++i) counts[i % words] += memory[i];
}

namespace {

GroupRows empty_rows() {
  GroupRows rows;
  std::memset(&rows, 0, sizeof rows);
  rows.entropy_max_x = rows.entropy_scale = -HUGE_VAL;
  rows.truncation_max_x = rows.truncation_scale = -HUGE_VAL;
  for (double& most : rows.probability_maxima) most = -HUGE_VAL;
  return rows;
}

// Pools sums of which sums[i] is kept as 2^-(power[i] scale) of itself.
template <int kSize>
void add_scaled(double (&to)[kSize], double& to_scale, const double (&from)[kSize],
                double from_scale, const int (&power)[kSize]) {
  const double scale = std::max(to_scale, from_scale);
  for (int i = 0; i < kSize; ++i) {
    to[i] = power[i] == 0 ? to[i] + from[i]
                          : scaled(to[i], power[i] * (to_scale - scale)) +
                                scaled(from[i], power[i] * (from_scale - scale));
  }
  to_scale = scale;
}

void add(GroupRows& to, const GroupRows& from) {
  static_assert(layout::kEntropySumNearW == 0 && layout::kEntropySumFarWx == 3, "powers below");
  static_assert(layout::kTruncationSumInsideW == 0, "powers below");
  add_scaled(to.entropy, to.entropy_scale, from.entropy, from.entropy_scale, {0, 0, 1, 1});
  to.entropy_max_x = std::max(to.entropy_max_x, from.entropy_max_x);
  for (int i = 0; i < layout::kProbabilitiesSumSize; ++i) {
    to.probabilities[i] += from.probabilities[i];
  }
  for (int i = 0; i < layout::kProbabilitiesMaxSize; ++i) {
    to.probability_maxima[i] = std::max(to.probability_maxima[i], from.probability_maxima[i]);
  }
  for (int i = 0; i < layout::kTruncationCountSize; ++i) {
    to.truncation_counts[i] += from.truncation_counts[i];
  }
  add_scaled(to.truncation, to.truncation_scale, from.truncation, from.truncation_scale, {1, 2});
  to.truncation_max_x = std::max(to.truncation_max_x, from.truncation_max_x);
  for (int i = 0; i < layout::kPolicyClipCountSize; ++i) {
    to.policy_clip_counts[i] += from.policy_clip_counts[i];
  }
}

// One slice's part of a section: counts, sums and maxima lie in this order, each for all slices.
void store(int64_t* section, int64_t slices, int64_t slice, const int64_t* counts, int n_counts,
           const double* sums, int n_sums, const double* maxima, int n_maxima) {
  if (!section) return;
  if (n_counts) std::memcpy(section + slice * n_counts, counts, n_counts * sizeof *counts);
  section += slices * n_counts;
  if (n_sums) std::memcpy(section + slice * n_sums, sums, n_sums * sizeof *sums);
  section += slices * n_sums;
  if (n_maxima) std::memcpy(section + slice * n_maxima, maxima, n_maxima * sizeof *maxima);
}

}  // namespace

void accumulate_groups(const Isa& isa, const Plan& plan, const GroupPlan& groups,
                       const GroupSections& sections, int64_t count, int threads) {
  using namespace layout;
  // a pure function of the number of tokens; at most about a thousand chunks, so that what they
  // leave until all are done stays small
  const int64_t tokens = std::max<int64_t>(16 * 1024, (count / 1024 + 4095) / 4096 * 4096);
  const int64_t chunks = (count + tokens - 1) / tokens, slices = plan.slices;
  threads = (int)std::min<int64_t>(threads, chunks);
  std::vector<GroupRows> rows(chunks * slices, empty_rows());
  std::vector<double> heads(chunks * 4 * slices, 0.0);
  const size_t bytes = (isa.kernels->group_bytes + 63) / 64 * 64;
  std::vector<char> scratch(std::max(threads, 1) * bytes + 64);
  char* const aligned = (char*)(((uintptr_t)scratch.data() + 63) / 64 * 64);
  std::atomic<int64_t> next{0};
  run_on_threads(threads, [&](int thread) {
    const FloatMode ieee;
    for (int64_t chunk; (chunk = next.fetch_add(1)) < chunks;) {
      const int64_t begin = chunk * tokens;
      isa.kernels->add_groups(plan, groups, aligned + thread * bytes, begin,
                              std::min(tokens, count - begin), &rows[chunk * slices],
                              &heads[chunk * 4 * slices]);
    }
  });
  for (int64_t chunk = 1; chunk < chunks; ++chunk) {
    for (int64_t s = 0; s < slices; ++s) add(rows[s], rows[chunk * slices + s]);
    if (groups.sequences == 0) continue;
    // the first sequence that ends after the chunk's first token: the one that the head is of
    const int64_t* ends = groups.boundaries + 1;
    const int64_t at = std::upper_bound(ends, ends + groups.sequences, chunk * tokens) - ends;
    if (at >= groups.sequences) continue;
    for (int64_t row = 0; row < 4 * slices; ++row) {
      groups.sums[row * groups.sequences + at] += heads[chunk * 4 * slices + row];
    }
  }
  for (int64_t s = 0; s < slices && chunks > 0; ++s) {
    const GroupRows& r = rows[s];
    store(sections.entropy, slices, s, nullptr, 0, r.entropy, kEntropySumSize, &r.entropy_max_x, 1);
    store(sections.probabilities, slices, s, nullptr, 0, r.probabilities, kProbabilitiesSumSize,
          r.probability_maxima, kProbabilitiesMaxSize);
    store(sections.truncation, slices, s, r.truncation_counts, kTruncationCountSize, r.truncation,
          kTruncationSumSize, &r.truncation_max_x, 1);
    store(sections.policy_clip, slices, s, r.policy_clip_counts, kPolicyClipCountSize, nullptr, 0,
          nullptr, 0);
  }
}

}  // namespace pyrlstats
