// The only bin formula in C++ (layout.py states it). Inside the kernels a bin is
//   pos + (x < 0 ? P : 0),  P a power of two,  with kZeroLanes counters of exact zeros after them;
// `state_bin` turns that into the ascending order of the state.
#pragma once

namespace pyrlstats {
namespace {

constexpr int kZeroLanes = 32;  // exact zeros take turns on private counters: all-zero data does not stall

struct Bins {
  int shift, offset, per_sign;
  explicit Bins(const Plan& plan)
      : shift(23 - plan.mantissa_bits),
        offset((127 + plan.min_exp) << plan.mantissa_bits),
        per_sign((plan.max_exp - plan.min_exp) << plan.mantissa_bits) {}

  int count() const { return 2 * per_sign; }
  // Does a bin fit 16-bit arithmetic on the upper half of a float, and a histogram of 16-bit counters the L2?
  bool narrow() const { return shift >= 16 && count() <= 16384; }

  uint32_t of(uint32_t bits) const {
    int pos = (int)((bits & layout::kAbsBits) >> shift) - offset;
    pos = pos < 0 ? 0 : pos >= per_sign ? per_sign - 1 : pos;
    return pos + (bits >> 31 ? per_sign : 0);
  }
  int state_bin(int bin) const { return bin < per_sign ? per_sign + bin : 2 * per_sign - 1 - bin; }
};

// The same on the upper halves of floats, 16 bits a token.
struct NarrowBins {
  H first, span, sign, zero;
  int shift;
  explicit NarrowBins(const Bins& bins) {
    shift = bins.shift - 16;
    first = splat((uint16_t)(bins.offset << shift));
    span = splat((uint16_t)((bins.per_sign << shift) - 1));
    sign = splat((uint16_t)bins.per_sign);
    alignas(64) uint16_t lanes[2 * kLanes];
    for (int i = 0; i < 2 * kLanes; ++i) lanes[i] = (uint16_t)(bins.count() + i % kZeroLanes);
    zero = load(lanes);
  }
  // `top` upper halves of x, `a` the same without the sign. A zero there must be an exact zero.
  H of(H top, H a) const {
    const H pos = shift_right(min(sub_saturating(a, first), span), shift);
    return where_zero(a, zero, pos | (negative(top) & sign));
  }
};

}  // namespace
}  // namespace pyrlstats
