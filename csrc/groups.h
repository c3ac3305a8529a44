// The groups of rows beside the core (layout.py, TABLES), and the sums of sequences, in float64:
// one token's exponential serves all of them, its scaled weight is a product with a power of two.
#pragma once
#include "far.h"
#include "stage.h"

namespace pyrlstats {
namespace {

struct GroupStage {
  SmallStage stage;
  double x[kSmallBlock], logp[kSmallBlock], old_logp[kSmallBlock], advantage[kSmallBlock];
  double mantissa[kSmallBlock];  // exp(x) = mantissa 2^exponent
  double exponent[kSmallBlock];
  double p[kSmallBlock], q[kSmallBlock];
  int64_t sequence[kSmallBlock];
  int32_t members[kSmallBlock], finite[kSmallBlock];
  alignas(64) uint8_t bytes[kSmallBlock + 64], base[kSmallBlock + 64];
};

// Elements [begin, begin + count) of any float type in float64.
inline void read_doubles(const Operand& op, int64_t begin, int64_t count, SmallStage& stage,
                         double* to) {
  const char* p = read_block(op, begin, count, (char*)stage.raw_a);
  const double* v = as_doubles(p, op.dtype, count, to);
  if (v != to) __builtin_memcpy(to, v, count * sizeof *to);
}

inline double scaled_weight(const GroupStage& work, int i, double scale) {
  return work.mantissa[i] * power_of_two(work.exponent[i] - scale);
}

// Raises the scale of `sums` to that of max_x; none has been added below the least of doubles.
inline double raised(double scale, double max_x, double* w, int power_w, double* v, int power_v) {
  const double wanted = __builtin_floor(max_x * layout::kLog2E);
  if (wanted <= scale) return scale;
  if (scale > -__builtin_inf()) {
    *w *= power_of_two(power_w * (scale - wanted));
    *v *= power_of_two(power_v * (scale - wanted));
  }
  return wanted;
}

inline void add_entropy(const GroupStage& work, int count, GroupRows& rows) {
  using namespace layout;
  double* sums = rows.entropy;
  for (int j = 0; j < count; ++j) {
    const double x = work.x[work.finite[j]];
    if (x > rows.entropy_max_x) rows.entropy_max_x = x;
  }
  if (count == 0) return;
  rows.entropy_scale = raised(rows.entropy_scale, rows.entropy_max_x, sums + kEntropySumFarW, 1,
                              sums + kEntropySumFarWx, 1);
  for (int j = 0; j < count; ++j) {
    const int i = work.finite[j];
    const double x = work.x[i];
    if (x > -0.5 && x < 0.5) {
      const double w = scaled_weight(work, i, 0);
      sums[kEntropySumNearW] += w;
      sums[kEntropySumNearWx] += w * x;
    } else {
      const double w = scaled_weight(work, i, rows.entropy_scale);
      sums[kEntropySumFarW] += w;
      sums[kEntropySumFarWx] += w * x;
    }
  }
}

inline void add_probabilities(const GroupStage& work, int count, GroupRows& rows) {
  using namespace layout;
  double* sums = rows.probabilities;
  double* most = rows.probability_maxima;
  for (int j = 0; j < count; ++j) {
    const int i = work.finite[j];
    const double p = work.p[i], q = work.q[i], d = __builtin_fabs(p - q);
    sums[kProbabilitiesSumP] += p;
    sums[kProbabilitiesSumQ] += q;
    sums[kProbabilitiesSumP2] += p * p;
    sums[kProbabilitiesSumQ2] += q * q;
    sums[kProbabilitiesSumPq] += p * q;
    sums[kProbabilitiesSumD] += d;
    sums[kProbabilitiesSumD2] += d * d;
    if (p > most[kProbabilitiesMaxMaxP]) most[kProbabilitiesMaxMaxP] = p;
    if (-p > most[kProbabilitiesMaxNegMinP]) most[kProbabilitiesMaxNegMinP] = -p;
    if (q > most[kProbabilitiesMaxMaxQ]) most[kProbabilitiesMaxMaxQ] = q;
    if (-q > most[kProbabilitiesMaxNegMinQ]) most[kProbabilitiesMaxNegMinQ] = -q;
    if (d > most[kProbabilitiesMaxMaxD]) most[kProbabilitiesMaxMaxD] = d;
  }
}

inline void add_truncation(const GroupPlan& groups, const GroupStage& work, int count,
                           GroupRows& rows) {
  using namespace layout;
  double* sums = rows.truncation;
  const double low = groups.truncate_low, high = groups.truncate_high;
  for (int j = 0; j < count; ++j) {
    const double x = work.x[work.finite[j]];
    rows.truncation_counts[kTruncationCountBelow] += x < low;
    rows.truncation_counts[kTruncationCountAbove] += x > high;
    if (x >= low && x <= high && x > rows.truncation_max_x) rows.truncation_max_x = x;
  }
  if (!(rows.truncation_max_x > -__builtin_inf())) return;
  rows.truncation_scale = raised(rows.truncation_scale, rows.truncation_max_x,
                                 sums + kTruncationSumInsideW, 1, sums + kTruncationSumInsideW2, 2);
  for (int j = 0; j < count; ++j) {
    const int i = work.finite[j];
    if (!(work.x[i] >= low && work.x[i] <= high)) continue;
    const double w = scaled_weight(work, i, rows.truncation_scale);
    sums[kTruncationSumInsideW] += w;
    sums[kTruncationSumInsideW2] += w * w;
  }
}

inline void add_policy_clip(const GroupPlan& groups, const GroupStage& work, int count,
                            GroupRows& rows) {
  using namespace layout;
  int64_t* counts = rows.policy_clip_counts;
  for (int j = 0; j < count; ++j) {
    const int i = work.finite[j];
    const double x = work.x[i], a = work.advantage[i];
    const bool finite = a - a == 0;
    counts[kPolicyClipCountNAdvantage] += finite;
    counts[kPolicyClipCountNNotFinite] += !finite;
    counts[kPolicyClipCountLow] += finite && a < 0 && x < groups.clip_low;
    counts[kPolicyClipCountHigh] += finite && a > 0 && x > groups.clip_high;
    counts[kPolicyClipCountDual] += finite && a < 0 && x > groups.clip_dual;
  }
}

// Sums over the sequence of each member: where it begins in this chunk, straight into the result,
// which no other chunk touches; else into the chunk's head.
inline void add_sequences(const GroupPlan& groups, const GroupStage& work, int64_t slice,
                          int64_t slices, int64_t begun_before, int count, double* head) {
  const int64_t plane = slices * groups.sequences;
  for (int j = 0; j < count;) {
    const int64_t sequence = work.sequence[work.members[j]];
    double n = 0, x = 0, logp = 0, old_logp = 0;
    for (; j < count && work.sequence[work.members[j]] == sequence; ++j) {
      const int i = work.members[j];
      n += 1;
      x += work.x[i];
      logp += work.logp[i];
      old_logp += work.old_logp[i];
    }
    if (sequence < 0) continue;
    double* to =
        sequence == begun_before ? head + slice : groups.sums + slice * groups.sequences + sequence;
    const int64_t step = sequence == begun_before ? slices : plane;
    to[0] += n;
    to[step] += x;
    to[2 * step] += logp;
    to[3 * step] += old_logp;
  }
}

// The first sequence that ends after `token`.
inline int64_t first_sequence(const GroupPlan& groups, int64_t token) {
  int64_t low = 0, high = groups.sequences;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (groups.boundaries[middle + 1] > token) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Tokens [begin, begin + count) into rows[slices], which it adds to, and into head[4][slices]: the
// sums of the sequence that began before this chunk.
void add_groups(const Plan& plan, const GroupPlan& groups, void* memory, int64_t begin,
                int64_t count, GroupRows* rows, double* head) {
  GroupStage& work = *(GroupStage*)memory;
  const bool weights = groups.entropy || groups.truncation;
  const bool logps = groups.probabilities || groups.sequences > 0;
  int64_t at = first_sequence(groups, begin);
  const int64_t begun_before = at < groups.sequences && groups.boundaries[at] < begin ? at : -1;
  for (const int64_t end = begin + count; begin < end; begin += kSmallBlock) {
    const int n = end - begin < kSmallBlock ? (int)(end - begin) : kSmallBlock;
    stage_x(plan, begin, n, work.stage);
    for (int i = 0; i < n; ++i) work.x[i] = work.stage.x[i];
    if (logps) {
      read_doubles(plan.logp, begin, n, work.stage, work.logp);
      read_doubles(plan.old_logp, begin, n, work.stage, work.old_logp);
    }
    if (groups.advantages) {
      read_doubles(*groups.advantages, begin, n, work.stage, work.advantage);
    }
    if (weights) {
      for (int i = 0; i < n; ++i) {
        const double x = work.x[i], t = x - x == 0 ? x * layout::kLog2E : 0;
        const double whole = __builtin_floor(t);
        work.exponent[i] = whole;
        work.mantissa[i] = __builtin_exp2(t - whole);
      }
    }
    if (groups.updates) {
      for (int i = 0; i < n; ++i) {
        const double x = work.x[i];  // exp(-inf) is 0, which would count as an update of 0
        const double w = x - x == 0 ? __builtin_exp(x) : __builtin_nan("");
        groups.updates[begin + i] = (float)(w * work.advantage[i]);
      }
    }
    if (groups.probabilities) {
      for (int i = 0; i < n; ++i) {
        work.p[i] = __builtin_exp(work.logp[i]);
        work.q[i] = __builtin_exp(work.old_logp[i]);
      }
    }
    if (groups.sequences > 0) {
      for (int i = 0; i < n; ++i) {
        while (at < groups.sequences && groups.boundaries[at + 1] <= begin + i) ++at;
        const bool inside = at < groups.sequences && groups.boundaries[at] <= begin + i;
        work.sequence[i] = inside ? at : -1;
      }
    }
    const uint8_t* base = nullptr;
    if (plan.base) {
      base = mask_bytes(*plan.base, begin, n, work.stage, work.base);
    }
    if (plan.ids) stage_ids(*plan.ids, plan.slices, begin, n, work.stage);
    for (int64_t s = 0; s < plan.slices; ++s) {
      const uint8_t* mask = nullptr;
      if (plan.masks) mask = mask_bytes(plan.masks[s], begin, n, work.stage, work.bytes);
      int members = 0, finite = 0;
      for (int i = 0; i < n; ++i) {
        const bool member = (!base || base[i]) && (!mask || mask[i]) &&
                            (!plan.ids || work.stage.ids[i] == (int32_t)s);
        work.members[members] = i;
        members += member;
        work.finite[finite] = i;
        finite += member && work.x[i] - work.x[i] == 0;
      }
      if (members == 0) continue;
      if (groups.entropy) add_entropy(work, finite, rows[s]);
      if (groups.probabilities) add_probabilities(work, finite, rows[s]);
      if (groups.truncation) add_truncation(groups, work, finite, rows[s]);
      if (groups.policy_clip) add_policy_clip(groups, work, finite, rows[s]);
      if (groups.sequences > 0) {
        add_sequences(groups, work, s, plan.slices, begun_before, members, head);
      }
    }
  }
}

}  // namespace
}  // namespace pyrlstats
