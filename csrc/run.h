// Groups of 64 tokens of one set: the histogram, and every sum over near tokens; far ones are put aside.
#pragma once

namespace pyrlstats {
namespace {

// exp(x) - 1 - x - x^2/2 = x^3 p(x), |x| < 0.5; p within 3e-7. Kept apart from x^2/2, which is summed in float64.
inline F k3_beyond_square(F x, F x2) {
  F p = splat(0.00019884294306393713f);
  p = fma(p, x, splat(0.0013966514961794019f));
  p = fma(p, x, splat(0.008333387784659863f));
  p = fma(p, x, splat(0.0416661836206913f));
  p = fma(p, x, splat(0.1666666567325592f));
  return p * (x2 * x);
}

// The group's tokens in the slices' own histograms, where 16 bits do not hold a bin.
__attribute__((noinline)) void count_wide(const Workspace& work, const float* x, const Set& set) {
  for (int i = 0; i < kGroup; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, x + i, sizeof bits);
    if ((bits & layout::kAbsBits) == 0) {
      each_slice(work, set, [&](int64_t slice) { ++work.slice_zeros[slice]; });
    } else {
      const int64_t bin = work.bins.of(bits);
      each_slice(work, set, [&](int64_t slice) {
        ++work.slice_histogram[slice * work.bins.count() + bin];
      });
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

// From which upper half of |x| a group may hold a new minimum or maximum, or be restless: groups below both
// extrema's |x| have none. Zeros alone have none once 0 is inside.
inline void set_watch(const Workspace& work, Set& set) {
  const float low = -lowest(set), high = highest(set), record = low < high ? low : high;
  const uint16_t top = record < 0 ? 0 : upper_half(record) > 0 ? upper_half(record) : 1;
  set.watch = top < work.restless ? top : work.restless;
}

inline bool any_subnormal(const Group& group) {
  uint32_t some = mask_bits(subnormal(group.x[0]));
  for (int i = 1; i < kGroup / kLanes; ++i) some |= mask_bits(subnormal(group.x[i]));
  return some != 0;
}

inline bool any_odd(const float* x) {
  uint32_t some = 0;
  for (int i = 0; i < kGroup; i += kLanes) some |= mask_bits(odd(load(x + i)));
  return some != 0;
}

// Clip counts of a group; far tokens go to their buffer and become zeros in `near`.
inline void part_far(const Plan& plan, const float* x, Set& set, float* near) {
  const F low = splat(plan.clip_low), high = splat(plan.clip_high), limit = splat(kNearLimit);
  for (int i = 0; i < kGroup; i += kLanes) {
    const F v = load(x + i);
    set.counts[layout::kCountClipLow] += __builtin_popcount(mask_bits(less(v, low)));
    set.counts[layout::kCountClipHigh] += __builtin_popcount(mask_bits(less(high, v)));
    const M far = at_least(abs(v), limit);
    set.far_waiting += compress_store(set.far + set.far_waiting, v, mask_bits(far));
    store(near + i, zero_where(far, v));
  }
  if (set.far_waiting >= kBuffer) drain_far(set);
}

// A closer look at up to kPrepared groups with large, tiny or record values: indices clamped, extrema updated,
// far tokens put aside. What is left for `add_groups` goes to work.prepared. Stops before a group with an odd
// token; returns the number of groups taken.
template <bool kNarrow, typename Source>
__attribute__((noinline)) int prepare(const Plan& plan, Workspace& work, const Source& source, int begin,
                                      int groups, Set& set) {
  const H zero = splat(uint16_t(0)), one = splat(uint16_t(1)), restless = splat(work.restless);
  Prepared& prepared = work.prepared;
  prepared.groups = 0;
  int taken = 0;
  for (; taken < groups && taken < kPrepared; ++taken) {
    const Group group = source.group(begin + taken);
    float* const x = work.scratch;
    for (int i = 0; i < kGroup / kLanes; ++i) store(x + i * kLanes, group.x[i]);
    uint16_t* index = prepared.index + kGroup * prepared.groups;
    H largest = zero, smallest = splat(uint16_t(0xffff));
    for (int i = 0; i < kGroup; i += 2 * kLanes) {
      const H top = top_halves(load(x + i), load(x + i + kLanes));
      const H a = top & splat(uint16_t(0x7fff));
      largest = max(largest, a);
      smallest = min(smallest, a);
      if (kNarrow) store(index + i, work.narrow.of(top));
    }
    const bool low = any_at_least(splat(work.small), smallest), high = any_at_least(largest, restless);
    if ((low || high) && any_odd(x)) break;
    if (!high && taken > 0) break;  // calm again
    if (set.watch < work.restless || high) {
      F least = load(set.min_x), most = load(set.max_x);
      for (int i = 0; i < kGroup; i += kLanes) {
        least = min(least, load(x + i));
        most = max(most, load(x + i));
      }
      store(set.min_x, least);
      store(set.max_x, most);
      if (set.watch < work.restless) set_watch(work, set);
    }
    if (!any_at_least(largest, one)) {
      set.zeros += kGroup;
      continue;
    }
    float* near = prepared.near + kGroup * prepared.groups++;
    if (!kNarrow) count_wide(work, x, set);
    if (high) {
      part_far(plan, x, set, near);
    } else {
      for (int i = 0; i < kGroup; i += kLanes) store(near + i, load(x + i));
    }
  }
  return taken;
}

// Groups into the sums over near tokens and the histogram. Unless they are prepared, it stops before a group
// that needs a closer look and returns the number done. No call inside: accumulators stay in registers (spilled
// ones cost 0.25 cycles a token).
template <bool kNarrow, bool kIsPrepared, typename Source>
__attribute__((noinline)) int add_groups(Workspace& work, const Source& source, int begin, int groups,
                                         Set& set) {
  Pending& pending = work.pending;
  uint16_t* histogram = pending.histogram;
  uint16_t *index = pending.index[0], *next = pending.index[1];
  const int shift = work.narrow.shift;
  const H watch = splat(set.watch), small = splat(uint16_t(work.small - 1));
  const H zero_counters = work.narrow.zero;
  int64_t zero_tokens = 0;
  D near_x = load(set.near_x), near_x2 = load(set.near_x2), abs_x = load(set.abs_x);
  D near_c = load(set.near_c), near_excess = load(set.near_excess);
  int done = 0;
  for (; done < groups; ++done) {
    const Group group = source.group(begin + done);
    if (kIsPrepared) {
      for (int i = 0; i < kGroup; i += 2 * kLanes) {
        if (kNarrow) store(next + i, load(work.prepared.index + kGroup * done + i));
      }
    } else {
      // upper halves of |x|, less one: a zero is above all that is small
      H largest = splat(uint16_t(0)), smallest = splat(uint16_t(0xffff));
      Z zeros = is_zero(smallest);
#pragma GCC unroll 16
      for (int i = 0; i < kGroup / kLanes; i += 2) {
        const H top = top_halves(group.x[i], group.x[i + 1]);
        const H a = top & splat(uint16_t(0x7fff));
        const Z zero = is_zero(a);
        zeros = zeros | zero;
        largest = max(largest, a);
        smallest = min(smallest, sub(a, splat(uint16_t(1))));
        if (kNarrow) store(next + i * kLanes, select(zero, zero_counters, shift_right(top, shift)));
      }
      if (any_at_least(largest, watch) || any_at_least(small, smallest)) break;
      if (any(zeros)) {
        if (any_subnormal(group)) break;  // their upper halves look like zeros
        if (!any_at_least(largest, splat(uint16_t(1)))) {
          zero_tokens += kGroup;  // they add to nothing else
          continue;
        }
      }
    }
    F c_group = splat(0.0f), excess_group = splat(0.0f);
#pragma GCC unroll 16
    for (int i = 0; i < kGroup / kLanes; ++i) {
      const F v = group.x[i];
      const F v2 = v * v;
      const F c = k3_beyond_square(v, v2);
      const F k3 = fma(splat(0.5f), v2, c);
      c_group = c_group + c;
      excess_group = fma(k3, v + v + k3, excess_group);
      const D low = low_half(v), high = high_half(v);
      near_x = near_x + (low + high);
      abs_x = abs_x + (abs(low) + abs(high));
      near_x2 = fma(high, high, fma(low, low, near_x2));
      // scalar increments of the group before hide behind vector arithmetic
      if (kNarrow) drain<kLanes>(index + i * kLanes, histogram);
    }
    near_c = near_c + (low_half(c_group) + high_half(c_group));
    near_excess = near_excess + (low_half(excess_group) + high_half(excess_group));
    histogram = set.histogram;
    uint16_t* const drained = index;
    index = next;
    next = drained;
    if (!kNarrow && !kIsPrepared) {
      for (int i = 0; i < kGroup / kLanes; ++i) store(work.scratch + i * kLanes, group.x[i]);
      count_wide(work, work.scratch, set);
    }
  }
  store(set.near_x, near_x);
  store(set.near_x2, near_x2);
  store(set.abs_x, abs_x);
  store(set.near_c, near_c);
  store(set.near_excess, near_excess);
  set.zeros += zero_tokens;
  if (kNarrow && done > 0) {
    if (index != pending.index[0]) __builtin_memcpy(pending.index[0], index, sizeof pending.index[0]);
    pending.histogram = histogram;
  }
  return done;
}

// Up to `groups` groups of `source` from group `begin` into the set. Stops before a group with an odd token and
// returns the number done.
template <bool kNarrow, typename Source>
int run_groups(const Plan& plan, Workspace& work, const Source& source, int begin, int groups, Set& set) {
  int done = 0;
  while (done < groups) {
    done += add_groups<kNarrow, false>(work, source, begin + done, groups - done, set);
    if (done == groups) break;
    const int taken = prepare<kNarrow>(plan, work, source, begin + done, groups - done, set);
    if (taken == 0) break;
    done += taken;
    add_groups<kNarrow, true>(work, Staged{work.prepared.near}, 0, work.prepared.groups, set);
  }
  set.load += kGroup * done;
  return done;
}

template <typename Source>
inline int run(const Plan& plan, Workspace& work, const Source& source, int begin, int groups, Set& set) {
  if (!work.bins.narrow()) return run_groups<false>(plan, work, source, begin, groups, set);
  if (set.load + kGroup * groups > kMaxLoad) flush(work, set);
  return run_groups<true>(plan, work, source, begin, groups, set);
}

}  // namespace
}  // namespace pyrlstats
