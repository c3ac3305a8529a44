// Far tokens, |x| >= 0.5: weights exp(x) scaled by 2^-k in float64, right for any finite x.
#pragma once

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

// Works on the far tokens that wait in the set.
__attribute__((noinline)) void drain_far(Set& set) {
  const int count = set.far_waiting;
  if (count == 0) return;
  const int padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int i = count; i < padded; ++i) set.far[i] = set.far[0];
  F largest = load(set.far);
  for (int i = kLanes; i < padded; i += kLanes) largest = max(largest, load(set.far + i));
  alignas(64) float lanes[kLanes];
  store(lanes, largest);
  float max_x = lanes[0];
  for (float v : lanes) max_x = v > max_x ? v : max_x;
  rescale_far(set, max_x);

  const D magic = splat(0x1.8p52), one = splat(1.0), floor_t = splat(-1022.0);
  const D log2e = splat(layout::kLog2E), scale = splat(set.far_scale);
  const D unscale = splat(power_of_two(set.far_scale));  // inf: so is the sum of k3
  D x_sum = load(set.far_x), x2_sum = load(set.far_x2), k3_sum = load(set.far_k3);
  D w_sum = load(set.far_w), w2_sum = load(set.far_w2), abs_sum = load(set.far_abs);
  alignas(64) uint64_t valid[kLanes];
  for (int i = 0; i < padded; i += kLanes) {
    const bool partial = i + kLanes > count;
    if (partial) {
      for (int j = 0; j < kLanes; ++j) valid[j] = i + j < count ? ~0ull : 0;
    }
    const F both = load(set.far + i);
    for (int half = 0; half < 2; ++half) {
      D x = half ? high_half(both) : low_half(both);
      const D t = x * log2e - scale;  // rounded as the definition rounds it: no fma
      const D clamped = max(t, floor_t);
      const D shifted = clamped + magic;
      const D mantissa = exp2_fraction(clamped - (shifted - magic));
      D w = keep_at_least(mantissa * power_from_magic(shifted), t, floor_t);
      D k3 = fma(w, unscale, -one - x);
      if (partial) {
        const D keep = load((const double*)valid + half * kHalf);
        x = keep_where(x, keep);
        w = keep_where(w, keep);
        k3 = keep_where(k3, keep);
      }
      x_sum = x_sum + x;
      abs_sum = abs_sum + abs(x);
      x2_sum = fma(x, x, x2_sum);
      k3_sum = k3_sum + k3;
      w_sum = w_sum + w;
      w2_sum = fma(w, w, w2_sum);
    }
  }
  // e^x of a far smaller x is 0 times inf: the sum is inf all the same
  if (set.far_scale > 1023) k3_sum = splat(__builtin_inf());
  store(set.far_x, x_sum);
  store(set.far_x2, x2_sum);
  store(set.far_k3, k3_sum);
  store(set.far_w, w_sum);
  store(set.far_w2, w2_sum);
  store(set.far_abs, abs_sum);
  set.counts[layout::kCountNFar] += count;
  set.far_waiting = 0;
}

}  // namespace
}  // namespace pyrlstats
