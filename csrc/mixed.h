// Groups with many far tokens among near ones: every vector adds to the sums of both, by masks.
// Packing them apart took 1.35 times as long on Laplace(1) data, before this way had a sixth fewer
// operations (Emerald Rapids; alike on Zen 4).
#pragma once
#include "far.h"
#include "group.h"

namespace pyrlstats {
namespace {

// The sums over |x| < kMixedLimit. x and x^2 of all tokens in float64, in registers; in float32
// what is near of them, and what one exponential gives for near and far tokens alike.
struct MixedSums {
  // Four vectors are summed up, and then two such parts: four roundings, and equal terms round
  // little.
  static constexpr int kVectors = 4, kPerGroup = kGroup / kLanes / kVectors;
  static constexpr int kSettle = kMixedParts / kPerGroup;  // groups
  enum { kNearX, kNearX2, kNearK3, kNearSquare, kFarK3, kFarW, kFarW2, kSize, kSums };
  D x, x2;
  F below, above, far;  // counts

  explicit MixedSums(const Set& set)
      : x(load(set.mixed_x)),
        x2(load(set.mixed_x2)),
        below(load(set.mixed_below)),
        above(load(set.mixed_above)),
        far(load(set.mixed_far)) {}
  void store_to(Set& set) const {
    store(set.mixed_x, x);
    store(set.mixed_x2, x2);
    store(set.mixed_below, below);
    store(set.mixed_above, above);
    store(set.mixed_far, far);
  }

  // The group of 64 x in memory; between(i) is called before each half of a vector, 0 the first.
  template <typename Between>
  __attribute__((always_inline)) void add(const float* x, const MixedConstants* constants, Set& set,
                                          Between between) {
    F sums[kSums];
#pragma GCC unroll 16
    for (int i = 0; i < kGroup / kLanes; ++i) {
      asm("" : "+r"(constants));  // operands from memory: in registers they would push the sums out
      const MixedConstants& c = *constants;
      const float* const there = x + i * kLanes;
      const F v = load(there), size = abs(v), one = splat(1.0f);
      const M is_near = less(size, splat(c.near_limit)),
              is_far = at_least(size, splat(c.near_limit));
      below = add_where(less(v, splat(c.clip_low)), one, below);
      above = add_where(less(splat(c.clip_high), v), one, above);
      far = add_where(is_far, one, far);
      add_exactly(there);
      between(2 * i);
      // near ones are their own remainder: what is left of ln 2 would cancel in their k3
      const F shifted = fma_where(is_far, v, splat(c.log2e), splat(c.magic));
      const F n = shifted - splat(c.magic);
      const F r = fma(n, splat(c.ln2_low), fma(n, splat(c.ln2_high), v)), r2 = r * r;
      // exp(r) - 1 - r, near ones' k3
      const F p =
          fma(fma(splat(c.p[4]), r, splat(c.p[3])), r2, fma(splat(c.p[2]), r, splat(c.p[1])));
      const F k = fma(p, r2, fma(splat(c.p[0]), r, splat(c.half))) * r2;
      const F e = r + k, s = power_from_magic(shifted);
      const F w = keep_where(is_far, fma(s, e, s));
      const F k3 = keep_where(is_far, fma(s, e, (s - one) - v));
      const bool first = i % kVectors == 0;
      sums[kSize] = first ? size : sums[kSize] + size;
      sums[kNearX] = first ? keep_where(is_near, v) : add_where(is_near, v, sums[kNearX]);
      sums[kNearX2] = first ? keep_where(is_near, v * v) : fma_where(is_near, v, v, sums[kNearX2]);
      sums[kNearK3] = first ? keep_where(is_near, k) : add_where(is_near, k, sums[kNearK3]);
      sums[kNearSquare] =
          first ? keep_where(is_near, e * e) : fma_where(is_near, e, e, sums[kNearSquare]);
      sums[kFarK3] = first ? k3 : sums[kFarK3] + k3;
      sums[kFarW] = first ? w : sums[kFarW] + w;
      sums[kFarW2] = first ? w * w : fma(w, w, sums[kFarW2]);
      between(2 * i + 1);
      if ((i + 1) % kVectors != 0) continue;
      float (*const part)[kLanes] = set.mixed[set.mixed_groups * kPerGroup + i / kVectors];
#pragma GCC unroll 16
      for (int j = 0; j < kSums; ++j) store(part[j], sums[j]);
    }
  }
  void add_exactly(const float* there) {
    const D low = widen(there), high = widen(there + kHalf);
    x = x + (low + high);
    x2 = fma(high, high, fma(low, low, x2));
  }
};

// What the set's mixed float32 sums hold, into the others. (A call would have the sums of add_mixed
// in memory.)
__attribute__((always_inline)) inline void settle_mixed(Set& set) {
  using Sums = MixedSums;
  set.mixed_groups = 0;
  // The least scale that their weights, float32 unscaled, need.
  rescale_far(set, -kMixedLimit);
  const double unit = power_of_two(-set.far_scale);
  static_assert(kMixedParts == 4);
  D sums[Sums::kSums];
  for (int i = 0; i < Sums::kSums; ++i) {
    float *const p = set.mixed[0][i], *const q = set.mixed[1][i];
    store(p, load(p) + load(set.mixed[2][i]));  // from memory halves are widened in one step
    store(q, load(q) + load(set.mixed[3][i]));
    sums[i] = (widen(p) + widen(p + kHalf)) + (widen(q) + widen(q + kHalf));
  }
  const auto add = [](double* to, D sum) { store(to, load(to) + sum); };
  add(set.near_x, sums[Sums::kNearX]);
  add(set.near_x2, sums[Sums::kNearX2]);
  add(set.near_k3, sums[Sums::kNearK3]);
  add(set.near_excess, sums[Sums::kNearSquare] - sums[Sums::kNearX2]);
  add(set.far_x, -sums[Sums::kNearX]);  // of the sum over all
  add(set.far_x2, -sums[Sums::kNearX2]);
  add(set.far_k3, sums[Sums::kFarK3]);
  add(set.far_w, sums[Sums::kFarW] * splat(unit));
  add(set.far_w2, sums[Sums::kFarW2] * splat(unit * unit));
  add(set.abs_x, sums[Sums::kSize]);
}

// Is a quarter of the group far? Where few are, packing them is quicker.
inline bool many_far(const Group& group) {
  int count = 0;
  for (const F& v : group.x) {
    count += __builtin_popcount(mask_bits(at_least(abs(v), splat(kNearLimit))));
  }
  return count >= kGroup / 4;
}

// What the set's mixed groups have left in lanes, into its sums and counts.
inline void finish_mixed(Set& set) {
  if (set.mixed_groups > 0) {
    for (int i = set.mixed_groups * MixedSums::kPerGroup; i < kMixedParts; ++i) {
      for (float* sum : set.mixed[i]) store(sum, splat(0.0f));
    }
    settle_mixed(set);
  }
  const auto count = [](const float* lanes) {
    float sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += lanes[i];
    return (int64_t)sum;
  };
  set.counts[layout::kCountClipLow] += count(set.mixed_below);
  set.counts[layout::kCountClipHigh] += count(set.mixed_above);
  set.counts[layout::kCountNFar] += count(set.mixed_far);
}

// Groups with |x| below kMixedLimit and `watch`, inside the bins, into the sums and the histogram,
// until one has nothing far; only the last of kSettle is asked. Stops before a group that needs
// another way; returns the number done.
template <typename Source>
__attribute__((noinline)) int add_mixed(Workspace& work, const Source source, int begin, Set& set,
                                        uint16_t watch) {
  const LookConstants constants(work);
  const H bound = splat(lesser(watch, work.too_large));
  Indices indices(work.pending);
  MixedSums sums(set);
  int64_t g = begin;
  for (bool more = true; more; more = set.run.goes_on(++g) && set.expect_far) {
    const Group group = source.group(g);
    const Look<true, Source> look(group, constants, indices.next);
    if (any_at_least(look.largest, bound)) break;
    const Kind kind = look.tell(group, constants, indices.next);
    if (kind != kUsual) {
      set.expect_far = kind == kOther;
      break;
    }
    group.store_to(work.mixed_x);
    sums.add(work.mixed_x, &work.mixed_constants, set, [&](int i) __attribute__((always_inline)) {
      drain<kHalf>(indices.last, i * kHalf, indices.histogram);
    });
    indices.turn(set.histogram);
    if (++set.mixed_groups < MixedSums::kSettle) continue;
    settle_mixed(set);
    if (any_at_least(look.largest, splat(work.far))) continue;
    set.expect_far = false;
    set.not_calm += any_at_least(look.largest, splat(limit_of(work, set)));
  }
  sums.store_to(set);
  set_watch(work, set);
  indices.store_back();
  return (int)(g - begin);
}

}  // namespace
}  // namespace pyrlstats
