// The only bin formula in C++ (layout.py states it), for one token and for a vector of tokens.
#pragma once
#include "simd.h"

namespace pyrlstats {
namespace {

struct Bins {
  int shift, offset, per_sign;
  explicit Bins(const Plan& plan)
      : shift(23 - plan.mantissa_bits),
        offset((127 + plan.min_exp) << plan.mantissa_bits),
        per_sign((plan.max_exp - plan.min_exp) << plan.mantissa_bits) {}

  int count() const { return 2 * per_sign; }
  // Does the upper half of a float hold its bin?
  bool narrow() const { return shift >= 16; }

  // The bin of finite bits that are not a zero's, in the ascending order of the state.
  int of(uint32_t bits) const {
    int pos = (int)((bits & layout::kAbsBits) >> shift) - offset;
    pos = pos < 0 ? 0 : pos >= per_sign ? per_sign - 1 : pos;
    return bits >> 31 ? per_sign - 1 - pos : per_sign + pos;
  }
};

// The same on upper halves of floats, 16 bits a token. The counters are indexed by (upper half >>
// shift) itself: one shift where x is inside the window, a clamp where it is not. Bin pos of a
// positive x is counter offset + pos, that of a negative one lies `negative` further on, and exact
// zeros take turns on counters of their own, where NaN would be: on one counter they would stall (7
// cycles a token).
struct NarrowBins {
  int shift, negative, zeros, zero_count;
  H first, last;  // upper halves of the least and the greatest |x| inside the window
  H zero;         // counters of zeros, lane by lane

  explicit NarrowBins(const Bins& bins)
      : shift(bins.shift - 16),
        negative(0x8000 >> shift),
        zeros(0x7f80 >> shift),
        zero_count(128 >> shift < 32 ? 128 >> shift : 32),
        first(splat((uint16_t)(bins.offset << shift))),
        last(splat((uint16_t)(((bins.offset + bins.per_sign) << shift) - 1))) {
    alignas(64) uint16_t lanes[2 * kLanes];
    for (int i = 0; i < 2 * kLanes; ++i) lanes[i] = (uint16_t)(zeros + i % zero_count);
    zero = load(lanes);
  }
  int counters() const { return 2 * negative; }

  H of(H top) const {
    const H a = top & splat((uint16_t)0x7fff), sign = top & splat((uint16_t)0x8000);
    return select(is_zero(a), zero, shift_right(min(max(a, first), last) | sign, shift));
  }
};

constexpr float kNearLimit = 0.5f;
constexpr float kMixedLimit = 40.0f;    // exp(2 x) of a few tokens is a float32, and a normal one
constexpr float kCalmLimit = 0.125f;    // below, fewer terms of exp(x) do
constexpr float kCalmLeast = 0x1p-31f;  // from here on float32 holds x^4
// What sums of higher powers start from: subnormal ones would take a hundred cycles each on Intel.
// So much that powers of either sign seldom cancel it to one: from 2^-120, those of |x| about 5e-6
// did in every fifteenth vector (1.7 times as long). It is taken off again, exactly, before the
// sums are used.
constexpr float kCalmStart = 0x1p-104f;
static_assert(layout::kNearBits == 0x3f000000, "kNearLimit is layout.py's NEAR_LIMIT");

inline uint16_t upper_half(float v) {
  uint32_t bits;
  __builtin_memcpy(&bits, &v, sizeof bits);
  return bits >> 16;
}

inline uint16_t lesser(uint16_t a, uint16_t b) { return a < b ? a : b; }

// The upper half of the least |x| that is far or beyond the bins.
inline uint16_t far_from(const Plan& plan) {
  const int beyond = (127 + plan.max_exp) << 7, far = upper_half(kNearLimit);
  return (uint16_t)(beyond < far ? beyond : far);
}

// The same of the least |x| that is far, clipped or beyond the bins.
inline uint16_t restless_from(const Plan& plan) {
  const float clip = plan.clip_high < -plan.clip_low ? plan.clip_high : -plan.clip_low;
  const uint16_t clipped = upper_half(clip), far = far_from(plan);
  return lesser(clipped, far);
}

}  // namespace
}  // namespace pyrlstats
