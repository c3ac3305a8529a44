// Far tokens, |x| >= 0.5: weights exp(x) scaled by 2^-k in float64, right for any finite x.
#pragma once
#include "sets.h"

namespace pyrlstats {
namespace {

// 2^f on [-0.5, 0.5], relative error 2e-9.
inline D exp2_fraction(D f) {
  D p = splat(0.0001534581179833716);
  p = fma(p, f, splat(0.0013399931217282478));
  p = fma(p, f, splat(0.009618488957861477));
  p = fma(p, f, splat(0.055503287769705076));
  p = fma(p, f, splat(0.2402264689062726));
  p = fma(p, f, splat(0.6931472057372645));
  return fma(p, f, splat(1.0000000005541663));
}

// 2^exponent for an integer of any size: 0 below 2^-1022, inf above 2^1023.
inline double power_of_two(double exponent) {
  if (exponent < -1022) return 0;
  if (exponent > 1023) return __builtin_inf();
  const uint64_t bits = (uint64_t)((int64_t)exponent + 1023) << 52;
  double v;
  __builtin_memcpy(&v, &bits, sizeof v);
  return v;
}

// Raises the scale of the far weights to at least k of `max_x`.
inline void rescale_far(Set& set, double max_x) {
  const double scale = __builtin_floor(max_x * layout::kLog2E);
  if (scale <= set.far_scale) return;
  const double down = set.far_scale - scale;
  store(set.far_w, load(set.far_w) * splat(power_of_two(down)));
  store(set.far_w2, load(set.far_w2) * splat(power_of_two(2 * down)));
  set.far_scale = scale;
}

inline float greatest(const float* x, int count) {
  F most = load(x);
  for (int i = kLanes; i < count; i += kLanes) most = max(most, load(x + i));
  alignas(64) float lanes[kLanes];
  store(lanes, most);
  float v = lanes[0];
  for (float lane : lanes) v = lane > v ? lane : v;
  return v;
}

// Far tokens of any size, in float64, two halves of a vector at a time; x has room up to a full
// vector.
__attribute__((noinline)) void far_exact(Set& set, float* x, int count) {
  const int padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int i = count; i < padded; ++i) x[i] = x[0];
  rescale_far(set, greatest(x, padded));
  const D magic = splat(kWideMagic), one = splat(1.0), least_t = splat(-1022.0);
  const D log2e = splat(layout::kLog2E), scale = splat(set.far_scale);
  const D unscale = splat(power_of_two(set.far_scale));  // inf: so is the sum of k3
  D x_sum = load(set.far_x), x2_sum = load(set.far_x2), abs_sum = load(set.far_abs);
  D w_sum = load(set.far_w), w2_sum = load(set.far_w2), k3_sum = load(set.far_k3);
  alignas(64) uint64_t valid[kLanes];
  for (int i = 0; i < padded; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) valid[j] = i + j < count ? ~0ull : 0;
    const F both = load(x + i);
    for (int half = 0; half < 2; ++half) {
      const D keep = load((const double*)valid + half * kHalf);
      const D v = half ? high_half(both) : low_half(both);
      const D t = v * log2e - scale;  // rounded as the definition rounds it: no fma
      const D clamped = max(t, least_t);
      const D shifted = clamped + magic;
      const D mantissa = exp2_fraction(clamped - (shifted - magic));
      const D all_w = keep_at_least(mantissa * power_from_magic(shifted), t, least_t);
      const D w = keep_where(all_w, keep), kept = keep_where(v, keep);
      k3_sum = k3_sum + keep_where(fma(all_w, unscale, -one - v), keep);
      x_sum = x_sum + kept;
      abs_sum = abs_sum + abs(kept);
      x2_sum = fma(kept, kept, x2_sum);
      w_sum = w_sum + w;
      w2_sum = fma(w, w, w2_sum);
    }
  }
  // a far smaller x makes 0 times inf of it: the sum is inf all the same
  if (set.far_scale > 1023) k3_sum = splat(__builtin_inf());
  store(set.far_x, x_sum);
  store(set.far_x2, x2_sum);
  store(set.far_abs, abs_sum);
  store(set.far_w, w_sum);
  store(set.far_w2, w2_sum);
  store(set.far_k3, k3_sum);
}

// (a + b) + (c + d): float32 rounds it twice, by 1.2e-7 at most, and equal terms not at all.
inline F sum(F a, F b, F c, F d) { return (a + b) + (c + d); }
inline D widened(F v) { return low_half(v) + high_half(v); }

// Takes indices off the queue that have been counted.
inline void dequeue(Set& set, int count) {
  if (count == 0 || set.queued == 0) return;
  set.queued -= count;
  for (int i = 0; i < set.queued; i += kGroup) {
    __builtin_memcpy(set.queue + i, set.queue + count + i, kGroup * sizeof *set.queue);
  }
}

// Full groups of far tokens with |x| < 64: weights in float32, four vectors of them summed up there
// before they are widened. Each w is right within 9e-8, each k3 within 2e-7. x, |x| and x^2
// are summed in float64.
template <bool kNarrow>
__attribute__((noinline)) void far_groups(Set& set, const float* x, int groups,
                                          uint16_t* histogram) {
  const F magic = splat(kMagic), log2e = splat((float)layout::kLog2E), one = splat(1.0f);
  const F ln2_high = splat(kMinusLn2), ln2_low = splat(kMinusLn2Rest);
  const F unit = splat((float)power_of_two(-set.far_scale));
  D x_sum = load(set.far_x), x2_sum = load(set.far_x2), abs_sum = load(set.far_abs);
  D w_sum = load(set.far_w), w2_sum = load(set.far_w2), k3_sum = load(set.far_k3);
  constexpr int kVectors = 4;
  const uint16_t* index = set.queue;
  for (const float* end = x + kGroup * groups; x < end; x += kVectors * kLanes) {
    F w[kVectors], k3[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      const F v = load(x + i * kLanes);
      const F shifted = fma(v, log2e, magic);
      const F n = shifted - magic, r = fma(n, ln2_low, fma(n, ln2_high, v));
      // exp(r) - 1 - r = r^2 p(r), |r| < 0.347, within 2e-7
      F p = splat(0.0013901301426813006f);
      p = fma(p, r, splat(0.008363178931176662f));
      p = fma(p, r, splat(0.04166685417294502f));
      p = fma(p, r, splat(0.16666577756404877f));
      p = fma(p, r, splat(0.5f));
      const F k = p * (r * r);
      const F s = power_from_magic(shifted), scaled = s * unit;
      w[i] = fma(scaled, r + k, scaled);
      k3[i] = fma(s, k, fma(s, r, s - one) - v);  // nothing cancels
      const D low = widen(x + i * kLanes), high = widen(x + i * kLanes + kHalf);
      x_sum = x_sum + (low + high);
      abs_sum = abs_sum + (abs(low) + abs(high));
      x2_sum = fma(high, high, fma(low, low, x2_sum));
      if (kNarrow) drain<kLanes>(index, i * kLanes, histogram);
    }
    index += kVectors * kLanes;
    w_sum = w_sum + widened(sum(w[0], w[1], w[2], w[3]));
    w2_sum = w2_sum + widened(fma(w[1], w[1], w[0] * w[0]) + fma(w[3], w[3], w[2] * w[2]));
    k3_sum = k3_sum + widened(sum(k3[0], k3[1], k3[2], k3[3]));
  }
  store(set.far_x, x_sum);
  store(set.far_x2, x2_sum);
  store(set.far_abs, abs_sum);
  store(set.far_w, w_sum);
  store(set.far_w2, w2_sum);
  store(set.far_k3, k3_sum);
}

// Works on the full groups of far tokens that wait in the set.
template <bool kNarrow>
__attribute__((noinline)) void drain_far(Set& set, uint16_t* histogram) {
  constexpr float kFloatLimit = 64;
  const int groups = set.far_waiting / kGroup, count = groups * kGroup;
  if (groups == 0) return;
  F size = splat(0.0f);
  for (int i = 0; i < count; i += kLanes) size = max(size, abs(load(set.far + i)));
  alignas(64) float sizes[kLanes];
  store(sizes, size);
  rescale_far(set, greatest(set.far, count));
  if (greatest(sizes, kLanes) < kFloatLimit && set.far_scale < 100) {
    far_groups<kNarrow>(set, set.far, groups, histogram);
  } else {
    far_exact(set, set.far, count);
    for (int i = 0; kNarrow && i < count; i += kGroup) drain<kGroup>(set.queue + i, 0, histogram);
  }
  if (kNarrow) dequeue(set, count);
  set.counts[layout::kCountNFar] += count;
  set.far_waiting -= count;
  for (int i = 0; i < set.far_waiting; ++i) set.far[i] = set.far[count + i];
}

// The same of what is left at the end of a chunk.
template <bool kNarrow>
void finish_far(Set& set, uint16_t* histogram) {
  drain_far<kNarrow>(set, histogram);
  if (set.far_waiting == 0) return;
  far_exact(set, set.far, set.far_waiting);
  set.counts[layout::kCountNFar] += set.far_waiting;
  set.far_waiting = 0;
}

}  // namespace
}  // namespace pyrlstats
