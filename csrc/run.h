// Groups of 64 tokens of one set: the histogram, and every sum over near tokens; far ones are put aside.
#pragma once

namespace pyrlstats {
namespace {

constexpr int kGroup = 64;
constexpr float kNearLimit = 0.5f;
static_assert(layout::kNearBits == 0x3f000000, "kNearLimit is layout.py's NEAR_LIMIT");

// exp(x) - 1 - x - x^2/2 = x^3 p(x), |x| < 0.5; p within 3e-7. Kept apart from x^2/2, which is summed in float64.
inline F k3_beyond_square(F x, F x2) {
  F p = splat(0.00019884294306393713f);
  p = fma(p, x, splat(0.0013966514961794019f));
  p = fma(p, x, splat(0.008333387784659863f));
  p = fma(p, x, splat(0.0416661836206913f));
  p = fma(p, x, splat(0.1666666567325592f));
  return p * (x2 * x);
}

// The upper half of the smallest |x| that is far or clipped.
inline uint16_t restless_from(const Plan& plan) {
  float limit = kNearLimit;
  if (plan.clip_high < limit) limit = plan.clip_high;
  if (-plan.clip_low < limit) limit = -plan.clip_low;
  uint32_t bits;
  __builtin_memcpy(&bits, &limit, sizeof bits);
  return bits >> 16;
}

// Histogram of a group where 16 bits do not hold a bin.
__attribute__((noinline)) void count_wide(const Workspace& work, const float* x, Set& set) {
  for (int i = 0; i < kGroup; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, x + i, sizeof bits);
    const bool zero = (bits & layout::kAbsBits) == 0;
    ++set.wide[zero ? work.bins.count() : work.bins.of(bits)];
  }
}

// Counts the share of the pending group that belongs to vector i / kLanes of the group in work: scalar
// increments hide behind vector arithmetic.
inline void drain_at(const uint16_t* index, int i, uint16_t* histogram) {
  drain<0, kLanes>(index + i, histogram);
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

// Up to `groups` groups from x. Stops before a group with an odd token and returns the number done.
template <bool kNarrow>
__attribute__((noinline)) int run_groups(const Plan& plan, Workspace& work, const float* x, int groups,
                                         Set& set) {
  Pending& pending = work.pending;
  const NarrowBins bins = work.narrow;
  // Upper halves from here on need a closer look: far, clipped or not finite.
  const H restless = splat(restless_from(plan)), not_finite = splat(uint16_t(layout::kInfBits >> 16));
  const H tiny = splat(uint16_t((kTiny >> 16) - 1));
  D near_x = load(set.near_x), near_x2 = load(set.near_x2), abs_x = load(set.abs_x);
  D near_c = load(set.near_c), near_excess = load(set.near_excess);
  F min_x = load(set.min_x), max_x = load(set.max_x);
  alignas(64) float scratch[kGroup];
  int done = 0;
  for (; done < groups; ++done, x += kGroup) {
    uint16_t* next = pending.index[pending.current ^ 1];
    H largest = splat(uint16_t(0)), smallest = splat(uint16_t(0xffff));
#pragma GCC unroll 8
    for (int i = 0; i < kGroup; i += 2 * kLanes) {
      const H top = top_halves(load(x + i), load(x + i + kLanes));
      const H a = top & splat(uint16_t(0x7fff));
      largest = max(largest, a);
      smallest = min(smallest, a);
      if (kNarrow) store(next + i, bins.of(top, a));
    }
    const float* near = x;
    if (any_at_least(tiny, smallest) && any_odd(x)) break;
    if (any_at_least(largest, restless)) {
      if (any_at_least(largest, not_finite)) break;
      store(set.abs_x, abs_x);
      part_far(plan, x, set, scratch);
      abs_x = load(set.abs_x);
      near = scratch;
    }
    F c_group = splat(0.0f), excess_group = splat(0.0f);
    const uint16_t* index = pending.index[pending.current];
#pragma GCC unroll 16
    for (int i = 0; i < kGroup; i += kLanes) {
      const F any_v = load(x + i), v = load(near + i);
      min_x = min(min_x, any_v);
      max_x = max(max_x, any_v);
      const F v2 = v * v;
      const F c = k3_beyond_square(v, v2);
      const F k3 = fma(splat(0.5f), v2, c);
      c_group = c_group + c;
      excess_group = fma(k3, v + v + k3, excess_group);
      const D low = low_half(v), high = high_half(v);
      near_x = near_x + (low + high);
      abs_x = abs_x + (abs(low) + abs(high));
      near_x2 = fma(high, high, fma(low, low, near_x2));
      if (kNarrow) drain_at(index, i, pending.histogram);
    }
    near_c = near_c + (low_half(c_group) + high_half(c_group));
    near_excess = near_excess + (low_half(excess_group) + high_half(excess_group));
    if (kNarrow) {
      pending.histogram = set.histogram;
      pending.current ^= 1;
    } else {
      count_wide(work, x, set);
    }
  }
  store(set.near_x, near_x);
  store(set.near_x2, near_x2);
  store(set.abs_x, abs_x);
  store(set.near_c, near_c);
  store(set.near_excess, near_excess);
  store(set.min_x, min_x);
  store(set.max_x, max_x);
  if (kNarrow) set.load += kGroup * done;
  return done;
}

inline int run(const Plan& plan, Workspace& work, const float* x, int groups, Set& set) {
  if (!work.bins.narrow()) {
    set.load = 1;  // never overflows; says only that there is something to flush
    return run_groups<false>(plan, work, x, groups, set);
  }
  if (set.load + kGroup * groups > kMaxLoad) flush(work, set);
  return run_groups<true>(plan, work, x, groups, set);
}

}  // namespace
}  // namespace pyrlstats
