// Groups of 64 tokens of one set: the histogram, and every sum over near tokens; far ones are put
// aside.
#pragma once
#include <type_traits>

#include "far.h"

namespace pyrlstats {
namespace {

// (exp(x) - 1 - x) / x^2 in float64, which makes k3 and (w - 1)^2 agree to all their digits: within
// 3e-8 for |x| < 0.5. 0.5 itself, not its best fit: small x get their k3 to the last digit.
inline D k3_over_square(D x) {
  D p = splat(0.00019863352651858316);
  p = fma(p, x, splat(0.0013975332017990103));
  p = fma(p, x, splat(0.008333480078318835));
  p = fma(p, x, splat(0.0416659993359512));
  p = fma(p, x, splat(0.16666665432117547));
  return fma(p, x, splat(0.5));
}

// The sums over near tokens, in registers.
struct NearSums {
  D x, x2, k3, excess, size;

  explicit NearSums(const Set& set)
      : x(load(set.near_x)),
        x2(load(set.near_x2)),
        k3(load(set.near_k3)),
        excess(load(set.near_excess)),
        size(load(set.abs_x)) {}
  void store_to(Set& set) const {
    store(set.near_x, x);
    store(set.near_x2, x2);
    store(set.near_k3, k3);
    store(set.near_excess, excess);
    store(set.abs_x, size);
  }

  void add(D low, D high) {
    const D square_low = low * low, square_high = high * high;
    const D k3_low = square_low * k3_over_square(low);
    const D k3_high = square_high * k3_over_square(high);
    x = x + (low + high);
    x2 = x2 + (square_low + square_high);
    size = size + (abs(low) + abs(high));
    k3 = k3 + (k3_low + k3_high);
    excess = fma(k3_low, fma(splat(2.0), low, k3_low), excess);
    excess = fma(k3_high, fma(splat(2.0), high, k3_high), excess);
  }
  void add(F a, F b) {
    add(low_half(a), high_half(a));
    add(low_half(b), high_half(b));
  }
  void end_group(Set&) {}
};

// The same of tokens below kCalmLimit, by S(n), the sum of x^n: k3 sums up to S(2)/2! + S(3)/3! +
// .., the excess (exp(x) - 1)^2 - x^2 to S(3) + 14/4! S(4) + .. + (2^n - 2)/n! S(n); up to n = 7
// that is within 2e-8. From n = 3 on they weigh so little that float32 holds them for a few groups:
// 99 vector operations a group instead of 136.
struct CalmSums {
  static constexpr int kSettle = kLanes / 2;  // groups, so 16 additions: equal terms within 4e-7
  D x, x2;
  F s3, s4, s5, s6, s7, size;
  int groups;

  explicit CalmSums(const Set& set)
      : x(load(set.near_x)),
        x2(load(set.calm_x2)),
        s3(load(set.calm[0])),
        s4(load(set.calm[1])),
        s5(load(set.calm[2])),
        s6(load(set.calm[3])),
        s7(load(set.calm[4])),
        size(load(set.calm[5])),
        groups(set.calm_groups) {}
  // As they are: where a call ends must not be seen in the sums.
  void store_to(Set& set) const {
    store(set.near_x, x);
    store(set.calm_x2, x2);
    const F powers[] = {s3, s4, s5, s6, s7, size};
    for (int i = 0; i < 6; ++i) store(set.calm[i], powers[i]);
    set.calm_groups = groups;
  }

  void add(F a, F b) {
    add_exactly(a);
    add_exactly(b);
    size = size + (abs(a) + abs(b));
    const F a2 = a * a, a3 = a2 * a, a4 = a2 * a2;
    const F b2 = b * b, b3 = b2 * b, b4 = b2 * b2;
    s3 = s3 + (a3 + b3);
    s4 = s4 + (a4 + b4);
    s5 = fma(b3, b2, fma(a3, a2, s5));
    s6 = fma(b3, b3, fma(a3, a3, s6));
    s7 = fma(b4, b3, fma(a4, a3, s7));
  }
  void add_exactly(F v) {
    const D low = low_half(v), high = high_half(v);
    x = x + (low + high);
    x2 = fma(high, high, fma(low, low, x2));
  }
  void end_group(Set& set) {
    if (++groups == kSettle) settle(set);
  }
  void settle(Set& set) {
    const D p3 = widened(s3), p4 = widened(s4), p5 = widened(s5);
    const D p6 = widened(s6), p7 = widened(s7);
    D k3 = p3 * splat(1.0 / 6);
    k3 = fma(p4, splat(1.0 / 24), k3);
    k3 = fma(p5, splat(1.0 / 120), k3);
    k3 = fma(p6, splat(1.0 / 720), k3);
    k3 = fma(p7, splat(1.0 / 5040), k3);
    D excess = fma(p4, splat(14.0 / 24), p3);
    excess = fma(p5, splat(30.0 / 120), excess);
    excess = fma(p6, splat(62.0 / 720), excess);
    excess = fma(p7, splat(126.0 / 5040), excess);
    store(set.near_k3, load(set.near_k3) + k3);
    store(set.near_excess, load(set.near_excess) + excess);
    store(set.abs_x, load(set.abs_x) + widened(size));
    groups = 0;
    s3 = s4 = size = splat(0.0f);
    s5 = s6 = s7 = splat(kCalmStart);
  }
};

// What the set's calm sums hold, into the sums over near tokens.
inline void finish_calm(Set& set) {
  CalmSums sums(set);
  if (sums.groups > 0) sums.settle(set);
  store(set.near_x2, load(set.near_x2) + sums.x2);
  store(set.near_k3, fma(sums.x2, splat(0.5), load(set.near_k3)));
}

// Works on the full groups of near tokens that wait in the set.
template <bool kNarrow>
__attribute__((noinline)) void drain_near(Set& set, uint16_t* histogram) {
  const int count = set.near_waiting / kGroup * kGroup;
  NearSums sums(set);
  for (int g = 0; g < count; g += kGroup) {
    const float* const x = set.near + g;
#pragma GCC unroll 16
    for (int i = 0; i < kGroup; i += kLanes) {
      sums.add(widen(x + i), widen(x + i + kHalf));
      if (kNarrow) drain<kLanes>(set.queue + g + i, histogram);
    }
  }
  sums.store_to(set);
  set.near_waiting -= count;
  for (int i = 0; i < set.near_waiting; ++i) set.near[i] = set.near[count + i];
  if (kNarrow) dequeue(set, count);
}

// The same of all that waits, the last groups filled up; zeros add to no sum.
template <bool kNarrow>
void finish_parted(Workspace& work, Set& set) {
  if (kNarrow) {
    for (int i = 0; i < set.queued; i += kGroup) drain<kGroup>(set.queue + i, set.histogram);
    set.queued = 0;
  }
  for (; set.near_waiting % kGroup != 0; ++set.near_waiting) set.near[set.near_waiting] = 0;
  if (set.near_waiting > 0) drain_near<kNarrow>(set, work.trash);
  finish_far<kNarrow>(set, work.trash);
}

// The group's tokens in the slices' own histograms, where 16 bits do not hold a bin.
__attribute__((noinline)) void count_wide(Workspace& work, const Group& group, const Set& set) {
  alignas(64) float x[kGroup];
  group.store_to(x);
  for (int i = 0; i < kGroup; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, x + i, sizeof bits);
    if ((bits & layout::kAbsBits) == 0) {
      each_slice(work, set, [&](int64_t slice) { ++work.slice_zeros[slice]; });
    } else {
      const int64_t bin = work.bins.of(bits);
      work.dirty = true;
      each_slice(work, set,
                 [&](int64_t slice) { ++work.slice_histogram[slice * work.bins.count() + bin]; });
    }
  }
}

inline float lowest(const Set& set) {
  float v = set.min_x[0];
  for (float lane : set.min_x) v = lane < v ? lane : v;
  return v;
}
inline float highest(const Set& set) {
  float v = set.max_x[0];
  for (float lane : set.max_x) v = lane > v ? lane : v;
  return v;
}

// From which upper half of |x| a group may hold a new minimum or maximum: groups below both
// extrema's |x| have none. Zeros alone have none once 0 is inside.
inline void set_record(Set& set) {
  const float low = -lowest(set), high = highest(set), record = low < high ? low : high;
  const uint16_t half = upper_half(record) & 0x7fff;  // of a zero of either sign: 0
  set.record = record < 0 ? 0 : half > 0 ? half : 1;
}

inline bool any_subnormal(const Group& group) {
  uint32_t some = mask_bits(subnormal(group.x[0]));
  for (int i = 1; i < kGroup / kLanes; ++i) some |= mask_bits(subnormal(group.x[i]));
  return some != 0;
}

inline bool any_odd(const Group& group) {
  uint32_t some = 0;
  for (const F& v : group.x) some |= mask_bits(odd(v));
  return some != 0;
}

// Indices of the group in work, and of the group before.
struct Indices {
  Pending& pending;
  uint16_t* histogram;
  const uint16_t* last;
  uint16_t* next;

  explicit Indices(Pending& pending)
      : pending(pending),
        histogram(pending.histogram),
        last(pending.index[0]),
        next(pending.index[1]) {}
  void turn(uint16_t* counted) {
    histogram = counted;
    last = next;
    next = pending.index[next == pending.index[0]];
  }
  void store_back() const {
    if (last != pending.index[0]) __builtin_memcpy(pending.index[0], last, sizeof pending.index[0]);
    pending.histogram = histogram;
  }
};

// A closer look at up to kPrepared groups with large, tiny or record values: indices clamped,
// extrema updated, clips counted, near and far tokens packed. Stops before a group with an odd
// token; returns the number of groups taken. Calm groups in between are taken along: leaving costs
// more than they do here.
template <bool kNarrow, typename Source>
__attribute__((noinline)) int prepare(const Plan& plan, Workspace& work, const Source& source,
                                      int begin, int groups, Set& set) {
  constexpr int kPairs = kGroup / kLanes / 2, kCalmGroups = 3;
  const H restless = splat(work.restless), far_from = splat(uint16_t(layout::kNearBits >> 16));
  const H not_calm = splat(limit_of(work, set));
  const H beyond = splat(work.beyond), record = splat(set.record);
  const H low = splat(work.low), abs_bits = splat(uint16_t(0x7fff));
  const F clip_low = splat(plan.clip_low), clip_high = splat(plan.clip_high);
  const F limit = splat(kNearLimit);
  constexpr uint32_t kAll = (1u << kLanes) - 1;
  const int shift = work.narrow.shift;
  uint16_t* index = set.queue + set.queued;
  F most = load(set.max_x), least = load(set.min_x);
  // in registers: stores of vectors may alias the set
  float* near = set.near + set.near_waiting;
  float* far = set.far + set.far_waiting;
  bool new_extrema = false;
  int64_t below = 0, above = 0;
  int taken = 0, calm = 0, wide = 0;
  for (; taken < groups && taken < kPrepared && calm <= kCalmGroups; ++taken) {
    source.fetch(begin + taken);  // 12 % faster on Laplace(1) from memory
    const Group group = source.group(begin + taken);
    H top[kPairs], largest = splat(uint16_t(0)), smallest = abs_bits;
#pragma GCC unroll 16
    for (int i = 0; i < kPairs; ++i) {
      top[i] = top_halves(group.x[2 * i], group.x[2 * i + 1]);
      const H a = top[i] & abs_bits;
      largest = max(largest, a);
      smallest = min(smallest, a);
      if (kNarrow) store(index + 2 * kLanes * i, shift_right(top[i], shift));
    }
    if (any_at_least(largest, beyond) || any_at_least(low, smallest)) {
      if (any_odd(group)) break;
      for (int i = 0; i < kPairs; ++i) {
        if (kNarrow) store(index + 2 * kLanes * i, work.narrow.of(top[i]));
      }
    }
    calm = any_at_least(largest, not_calm) ? 0 : calm + 1;
    if (any_at_least(largest, record)) {
      new_extrema = true;
      for (const F& v : group.x) {
        least = min(least, v);
        most = max(most, v);
      }
    }
    if (!any_at_least(largest, splat(uint16_t(1)))) {
      set.zeros += kGroup;
      continue;
    }
    index += kGroup;
    if (!kNarrow) count_wide(work, group, set);
    if (!any_at_least(largest, restless)) {
      group.store_to(near);
      near += kGroup;
      wide += calm == 0;
      continue;
    }
    uint64_t are_below = 0, are_above = 0;
#pragma GCC unroll 16
    for (int i = 0; i < kGroup / kLanes; ++i) {
      const F v = group.x[i];
      are_below |= (uint64_t)mask_bits(less(v, clip_low)) << (i * kLanes);
      are_above |= (uint64_t)mask_bits(less(clip_high, v)) << (i * kLanes);
    }
    below += __builtin_popcountll(are_below);
    above += __builtin_popcountll(are_above);
    if (!any_at_least(largest, far_from)) {
      group.store_to(near);
      near += kGroup;
      continue;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kGroup / kLanes; ++i) {
      const F v = group.x[i];
      const uint32_t is_near = mask_bits(less(abs(v), limit));
      const int64_t count = compress_store(near, v, is_near);
      compress_store(far, v, is_near ^ kAll);
      near += count;
      far += kLanes - count;
    }
  }
  set.not_calm += wide;
  if (new_extrema) {
    store(set.min_x, least);
    store(set.max_x, most);
    set_record(set);
  }
  set_watch(work, set);
  set.counts[layout::kCountClipLow] += below;
  set.counts[layout::kCountClipHigh] += above;
  set.far_waiting = (int)(far - set.far);
  set.near_waiting = (int)(near - set.near);
  if (kNarrow) set.queued = (int)(index - set.queue);
  return taken;
}

// Takes the extrema of a group that goes the common way; false where it does not, or has no record.
template <typename Source>
__attribute__((noinline)) bool take_record(const Workspace& work, const Source& source, int g,
                                           Set& set) {
  const Group group = source.group(g);
  F least = load(set.min_x), most = load(set.max_x);
  H largest = splat(uint16_t(0));
  for (int i = 0; i < kGroup / kLanes; i += 2) {
    largest = max(largest, top_halves(group.x[i], group.x[i + 1]) & splat(uint16_t(0x7fff)));
  }
  if (any_at_least(largest, splat(limit_of(work, set)))) return false;
  if (!any_at_least(largest, splat(set.record))) return false;
  for (const F& v : group.x) {
    least = min(least, v);
    most = max(most, v);
  }
  store(set.min_x, least);
  store(set.max_x, most);
  set_record(set);
  set_watch(work, set);
  return true;
}

// Groups into the sums over near tokens and the histogram, as long as they need no closer look;
// returns the number done. No call inside: accumulators stay in registers (spilled ones cost 0.25
// cycles a token).
template <bool kNarrow, bool kCalm, typename Source>
__attribute__((noinline)) int add_groups(Workspace& work, const Source& source, int begin,
                                         int groups, Set& set, uint16_t first_watch) {
  constexpr int kPairs = kGroup / kLanes / 2;
  H bound = splat(first_watch);
  const H zero_counters = work.narrow.zero;
  const H watch = splat(set.watch), low = splat(work.low), abs_bits = splat(uint16_t(0x7fff));
  const int shift = work.narrow.shift;
  int64_t zero_tokens = 0;
  Indices indices(work.pending);
  std::conditional_t<kCalm, CalmSums, NearSums> sums(set);
  int done = 0;
  for (; done < groups; ++done) {
    source.fetch(begin + done);  // 27 % faster from memory on Zen 4, 6 % on Emerald Rapids
    const Group group = source.group(begin + done);
    H top[kPairs], largest = splat(uint16_t(0)), smallest = abs_bits;
#pragma GCC unroll 16
    for (int i = 0; i < kPairs; ++i) {
      top[i] = top_halves(group.x[2 * i], group.x[2 * i + 1]);
      H a = top[i] & abs_bits, index = shift_right(top[i], shift);
      largest = max(largest, a);
      if (Source::kUpperHalfTells) {  // zeros are the rule: told apart at once, 5 to 10 %
        const Z zeros = is_zero(a);
        index = select(zeros, zero_counters, index);
        a = select(zeros, abs_bits, a);
      }
      smallest = min(smallest, a);
      if (kNarrow) store(indices.next + 2 * kLanes * i, index);
    }
    if (any_at_least(largest, bound)) break;
    bound = watch;
    if (Source::kUpperHalfTells) {
      if (any_at_least(low, smallest)) break;
      if (!any_at_least(largest, splat(uint16_t(1)))) {
        zero_tokens += kGroup;  // they add to nothing else
        continue;
      }
    } else if (any_at_least(low, smallest)) {
      if (!any_at_least(largest, low)) {
        if (any_at_least(largest, splat(uint16_t(1))) || any_subnormal(group)) break;
        zero_tokens += kGroup;
        continue;
      }
      H nonzero = abs_bits;
#pragma GCC unroll 16
      for (int i = 0; i < kPairs; ++i) {
        const H a = top[i] & abs_bits;
        const Z zeros = is_zero(a);
        nonzero = min(nonzero, select(zeros, abs_bits, a));
        if (kNarrow) {
          store(indices.next + 2 * kLanes * i,
                select(zeros, zero_counters, shift_right(top[i], shift)));
        }
      }
      if (any_at_least(low, nonzero) || any_subnormal(group)) break;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kGroup / kLanes; i += 2) {
      sums.add(group.x[i], group.x[i + 1]);
      // scalar increments of the group before hide behind vector arithmetic
      if (kNarrow) drain<2 * kLanes>(indices.last + i * kLanes, indices.histogram);
    }
    sums.end_group(set);
    if (kNarrow) {
      indices.turn(set.histogram);
    } else {
      count_wide(work, group, set);
    }
  }
  sums.store_to(set);
  set.zeros += zero_tokens;
  if (kNarrow) indices.store_back();
  return done;
}

// Up to `groups` groups of `source` from group `begin` into the set. Stops before a group with an
// odd token and returns the number done.
template <bool kNarrow, typename Source>
int run_groups(const Plan& plan, Workspace& work, const Source& source, int begin, int groups,
               Set& set) {
  int done = 0;
  const auto add = [&](uint16_t first_watch) {
    // wide bins are slow whatever the sums: more terms do no harm, one function less
    const int added = set.not_calm < kNotCalm
                          ? add_groups<kNarrow, kNarrow>(work, source, begin + done, groups - done,
                                                         set, first_watch)
                          : add_groups<kNarrow, false>(work, source, begin + done, groups - done,
                                                       set, first_watch);
    done += added;
    return added;
  };
  while (done < groups) {
    add(set.watch);
    if (done == groups) break;
    if (take_record(work, source, begin + done, set) && add(limit_of(work, set)) > 0) continue;
    const int taken = prepare<kNarrow>(plan, work, source, begin + done, groups - done, set);
    if (taken == 0) break;
    done += taken;
    if (set.near_waiting >= kBuffer) drain_near<kNarrow>(set, set.histogram);
    if (set.far_waiting >= kBuffer) drain_far<kNarrow>(set, set.histogram);
  }
  if (kNarrow) set.load += kGroup * done;
  return done;
}

template <typename Source>
inline int run(const Plan& plan, Workspace& work, const Source& source, int begin, int groups,
               Set& set) {
  if (!work.bins.narrow()) return run_groups<false>(plan, work, source, begin, groups, set);
  if (set.load + kGroup * groups > kMaxLoad) flush(work, set);
  return run_groups<true>(plan, work, source, begin, groups, set);
}

}  // namespace
}  // namespace pyrlstats
