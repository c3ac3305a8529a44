// The sums over near tokens, |x| < 0.5, of whole groups of them.
#pragma once
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
  // between(i) is called before each half of a vector, 0 the first.
  template <typename Between>
  __attribute__((always_inline)) void add(const Group& group, Between between) {
#pragma GCC unroll 16
    for (int i = 0; i < kGroup / kLanes; ++i) {
      between(2 * i);
      add(low_half(group.x[i]), high_half(group.x[i]));
      between(2 * i + 1);
    }
  }
  void end_group(Set&) {}
};

// The sum of a group's vectors, by pairs: each is rounded a few times, equal ones not at all.
struct Pairwise {
  F partial[8];
  __attribute__((always_inline)) void add(int i, F v) {
    int depth = 0;
    for (; i & 1; i >>= 1) v = partial[depth++] + v;
    partial[depth] = v;
  }
  F sum() const { return partial[__builtin_ctz(kGroup / kLanes)]; }
};

// The same of tokens below kCalmLimit, by S(n), the sum of x^n: k3 sums up to S(2)/2! + S(3)/3! +
// .., the excess (exp(x) - 1)^2 - x^2 to S(3) + 14/4! S(4) + .. + (2^n - 2)/n! S(n); up to n = 7
// that is within 1e-9 of k3 and 3e-8 of the excess. From n = 4 on they weigh so little that float32
// holds them for a few groups; S(3), most of the excess, it holds for one group. About 93 vector
// operations a group instead of 136.
struct CalmSums {
  static constexpr int kSettle = kLanes / 2;  // groups, so 32 additions: equal x^5 within 1e-6
  D x, x2, x3, size;
  F s4, s5, s6, s7;

  explicit CalmSums(const Set& set)
      : x(load(set.near_x)),
        x2(load(set.calm_x2)),
        x3(load(set.calm_x3)),
        size(load(set.abs_x)),
        s4(load(set.calm[0])),
        s5(load(set.calm[1])),
        s6(load(set.calm[2])),
        s7(load(set.calm[3])) {}
  // As they are: where a call ends must not be seen in the sums.
  void store_to(Set& set) const {
    store(set.near_x, x);
    store(set.calm_x2, x2);
    store(set.calm_x3, x3);
    store(set.abs_x, size);
    const F powers[] = {s4, s5, s6, s7};
    for (int i = 0; i < 4; ++i) store(set.calm[i], powers[i]);
  }

  template <typename Between>
  __attribute__((always_inline)) void add(const Group& group, Between between) {
    Pairwise sizes, cubes, fourths;
#pragma GCC unroll 16
    for (int i = 0; i < kGroup / kLanes; ++i) {
      const F v = group.x[i];
      add_exactly(v);
      sizes.add(i, abs(v));
      between(2 * i);
      const F v2 = v * v, v3 = v2 * v, v4 = v2 * v2;
      fourths.add(i, v4);
      s5 = fma(v3, v2, s5);
      s6 = fma(v3, v3, s6);
      s7 = fma(v4, v3, s7);
      cubes.add(i, v3);
      between(2 * i + 1);
    }
    size = size + widened(sizes.sum());
    x3 = x3 + widened(cubes.sum());
    s4 = s4 + fourths.sum();
  }
  void add_exactly(F v) {
    const D low = low_half(v), high = high_half(v);
    x = x + (low + high);
    x2 = fma(high, high, fma(low, low, x2));
  }
  void end_group(Set& set) {
    if (++set.calm_groups == kSettle) settle(set);
  }
  // (A call would have all sums in memory.)
  __attribute__((always_inline)) void settle(Set& set) {
    const D start = widened(splat(kCalmStart));
    const D p4 = widened(s4), p5 = widened(s5) - start, p6 = widened(s6) - start;
    const D p7 = widened(s7) - start;
    D k3 = p4 * splat(1.0 / 24);
    k3 = fma(p5, splat(1.0 / 120), k3);
    k3 = fma(p6, splat(1.0 / 720), k3);
    k3 = fma(p7, splat(1.0 / 5040), k3);
    D excess = p4 * splat(14.0 / 24);
    excess = fma(p5, splat(30.0 / 120), excess);
    // with what S(8) adds to it, 254/8!, as nearly as a share of S(6) can: within 3e-8, not 2e-7
    excess = fma(p6, splat(62.0 / 720 + 0.87 * kCalmLimit * kCalmLimit * 254 / 40320), excess);
    excess = fma(p7, splat(126.0 / 5040), excess);
    store(set.near_k3, load(set.near_k3) + k3);
    store(set.near_excess, load(set.near_excess) + excess);
    set.calm_groups = 0;
    s4 = splat(0.0f);
    s5 = s6 = s7 = splat(kCalmStart);
  }
};

// What the set's calm sums hold, into the sums over near tokens.
inline void finish_calm(Set& set) {
  CalmSums sums(set);
  if (set.calm_groups > 0) sums.settle(set);
  store(set.near_x2, load(set.near_x2) + sums.x2);
  const D k3 = fma(sums.x3, splat(1.0 / 6), load(set.near_k3));
  store(set.near_k3, fma(sums.x2, splat(0.5), k3));
  store(set.near_excess, load(set.near_excess) + sums.x3);
}

}  // namespace
}  // namespace pyrlstats
