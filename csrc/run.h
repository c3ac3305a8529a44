// Groups of 64 tokens of one set: the histogram, and every sum over near tokens; far ones are put
// aside.
#pragma once
#include "far.h"

namespace pyrlstats {
namespace {

// exp(x) - 1 - x - x^2/2 = x^3 p(x), |x| < 0.5; p within 3e-7. Kept apart from x^2/2, which is
// exact in float64.
inline F k3_beyond_square(F x) {
  F p = splat(0.00019884294306393713f);
  p = fma(p, x, splat(0.0013966514961794019f));
  p = fma(p, x, splat(0.008333387784659863f));
  p = fma(p, x, splat(0.0416661836206913f));
  p = fma(p, x, splat(0.1666666567325592f));
  return p * (x * x * x);
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

// From which upper half of |x| a group may hold a new minimum or maximum, or be restless: groups
// below both extrema's |x| have none. Zeros alone have none once 0 is inside.
inline void set_watch(const Workspace& work, Set& set) {
  const float low = -lowest(set), high = highest(set), record = low < high ? low : high;
  const uint16_t half = upper_half(record) & 0x7fff;  // of a zero of either sign: 0
  const uint16_t top = record < 0 ? 0 : half > 0 ? half : 1;
  set.watch = top < work.restless ? top : work.restless;
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

// What the upper halves of |x| of a group say.
struct Heights {
  H largest = splat(uint16_t(0));
  H smallest = splat(uint16_t(0xffff));  // less one: a zero is above all that is small
  Z zeros = is_zero(splat(uint16_t(1)));

  void add(H a) {
    largest = max(largest, a);
    smallest = min(smallest, sub(a, splat(uint16_t(1))));
    zeros = zeros | is_zero(a);
  }
  bool all_zero() const { return !any_at_least(largest, splat(uint16_t(1))); }
};

// Clip counts of a group; far tokens go to their buffer and become zeros in `near`.
inline void part_far(const Plan& plan, const Group& group, Set& set, float* near) {
  const F low = splat(plan.clip_low), high = splat(plan.clip_high), limit = splat(kNearLimit);
  int below = 0, above = 0,
      waiting = set.far_waiting;  // in registers: stores of vectors may alias the set
#pragma GCC unroll 16
  for (int i = 0; i < kGroup / kLanes; ++i) {
    const F v = group.x[i];
    below += __builtin_popcount(mask_bits(less(v, low)));
    above += __builtin_popcount(mask_bits(less(high, v)));
    const M far = at_least(abs(v), limit);
    waiting += compress_store(set.far + waiting, v, mask_bits(far));
    store(near + i * kLanes, zero_where(far, v));
  }
  set.counts[layout::kCountClipLow] += below;
  set.counts[layout::kCountClipHigh] += above;
  set.far_waiting = waiting;
  if (waiting >= kBuffer) drain_far(set);
}

// A closer look at up to kPrepared groups with large, tiny or record values: indices clamped,
// extrema updated, far tokens put aside. What is left for `add_groups` goes to work.prepared. Stops
// before a group with an odd token; returns the number of groups taken.
template <bool kNarrow, typename Source>
__attribute__((noinline)) int prepare(const Plan& plan, Workspace& work, const Source& source,
                                      int begin, int groups, Set& set) {
  const H restless = splat(work.restless), not_finite = splat(uint16_t(layout::kInfBits >> 16));
  Prepared& prepared = work.prepared;
  F least = load(set.min_x), most = load(set.max_x);
  int taken = 0, kept = 0;
  for (; taken < groups && taken < kPrepared; ++taken) {
    const Group group = source.group(begin + taken);
    uint16_t* const index = prepared.index + kGroup * kept;
    Heights heights;
#pragma GCC unroll 16
    for (int i = 0; i < kGroup / kLanes; i += 2) {
      const H top = top_halves(group.x[i], group.x[i + 1]);
      heights.add(top & splat(uint16_t(0x7fff)));
      if (kNarrow) store(index + i * kLanes, work.narrow.of(top));
    }
    if (any_at_least(heights.largest, not_finite) && any_odd(group)) break;
    if (any_at_least(splat(work.tiny), heights.smallest) || any(heights.zeros)) {
      if (any_odd(group)) break;
    }
    const bool high = any_at_least(heights.largest, restless);
    if (taken > 0 && !high) break;  // calm again
    for (const F& v : group.x) {
      least = min(least, v);
      most = max(most, v);
    }
    if (heights.all_zero()) {
      set.zeros += kGroup;
      continue;
    }
    float* const near = prepared.near + kGroup * kept++;
    if (!kNarrow) count_wide(work, group, set);
    if (high) {
      part_far(plan, group, set, near);
    } else {
      group.store_to(near);
    }
  }
  store(set.min_x, least);
  store(set.max_x, most);
  set_watch(work, set);
  prepared.groups = kept;
  return taken;
}

// Groups into the sums over near tokens and the histogram. Unless they are prepared, it stops
// before a group that needs a closer look and returns the number done. No call inside: accumulators
// stay in registers (spilled ones cost 0.25 cycles a token).
template <bool kNarrow, bool kIsPrepared, typename Source>
__attribute__((noinline)) int add_groups(Workspace& work, const Source& source, int begin,
                                         int groups, Set& set) {
  Pending& pending = work.pending;
  uint16_t* histogram = pending.histogram;
  const uint16_t* index = pending.index[0];
  uint16_t* next = pending.index[1];
  const int shift = work.narrow.shift;
  const H watch = splat(set.watch), small = splat(work.small);
  const H zero_counters = work.narrow.zero;
  const D half = splat(0.5), two = splat(2.0);
  int64_t zero_tokens = 0;
  D near_x = load(set.near_x), near_x2 = load(set.near_x2), abs_x = load(set.abs_x);
  D near_c = load(set.near_c), near_excess = load(set.near_excess);
  int done = 0;
  for (; done < groups; ++done) {
    const Group group = source.group(begin + done);
    if (!kIsPrepared) {
      Heights heights;
#pragma GCC unroll 16
      for (int i = 0; i < kGroup / kLanes; i += 2) {
        const H top = top_halves(group.x[i], group.x[i + 1]);
        const H a = top & splat(uint16_t(0x7fff));
        heights.add(a);
        if (kNarrow)
          store(next + i * kLanes, select(is_zero(a), zero_counters, shift_right(top, shift)));
      }
      if (any_at_least(heights.largest, watch) || any_at_least(small, heights.smallest)) break;
      if (any(heights.zeros)) {
        if (any_subnormal(group)) break;  // their upper halves look like zeros
        if (heights.all_zero()) {
          zero_tokens += kGroup;  // they add to nothing else
          continue;
        }
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kGroup / kLanes; ++i) {
      const F v = group.x[i];
      const F beyond = k3_beyond_square(v);
      const D x_low = low_half(v), x_high = high_half(v);
      const D c_low = low_half(beyond), c_high = high_half(beyond);
      const D square_low = x_low * x_low, square_high = x_high * x_high;
      const D k3_low = fma(half, square_low, c_low), k3_high = fma(half, square_high, c_high);
      near_x = near_x + (x_low + x_high);
      abs_x = abs_x + (abs(x_low) + abs(x_high));
      near_x2 = near_x2 + (square_low + square_high);
      near_c = near_c + (c_low + c_high);
      // (w - 1)^2 - x^2 of just the k3 that is summed: what float32 lost cancels in the variance of
      // w
      near_excess = fma(k3_low, fma(two, x_low, k3_low), near_excess);
      near_excess = fma(k3_high, fma(two, x_high, k3_high), near_excess);
      // scalar increments of the group before hide behind vector arithmetic
      if (kNarrow) drain<kLanes>(index + i * kLanes, histogram);
    }
    histogram = set.histogram;
    if (kIsPrepared) {
      index = work.prepared.index + kGroup * done;
    } else {
      index = next;
      next = pending.index[next == pending.index[0]];
      if (!kNarrow) count_wide(work, group, set);
    }
  }
  store(set.near_x, near_x);
  store(set.near_x2, near_x2);
  store(set.abs_x, abs_x);
  store(set.near_c, near_c);
  store(set.near_excess, near_excess);
  set.zeros += zero_tokens;
  if (kNarrow && done > 0) {
    if (index != pending.index[0])
      __builtin_memcpy(pending.index[0], index, sizeof pending.index[0]);
    pending.histogram = histogram;
  }
  return done;
}

// Up to `groups` groups of `source` from group `begin` into the set. Stops before a group with an
// odd token and returns the number done.
template <bool kNarrow, typename Source>
int run_groups(const Plan& plan, Workspace& work, const Source& source, int begin, int groups,
               Set& set) {
  int done = 0;
  while (done < groups) {
    done += add_groups<kNarrow, false>(work, source, begin + done, groups - done, set);
    if (done == groups) break;
    const int taken = prepare<kNarrow>(plan, work, source, begin + done, groups - done, set);
    if (taken == 0) break;
    done += taken;
    add_groups<kNarrow, true>(work, Staged{work.prepared.near}, 0, work.prepared.groups, set);
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
