// Groups with many far tokens among near ones: every vector adds to the sums of both, by masks.
// Packing them apart takes 1.35 times as long on Laplace(1) data (Emerald Rapids; alike on Zen 4).
#pragma once
#include "far.h"
#include "group.h"

namespace pyrlstats {
namespace {

// The sums over |x| < kMixedLimit: x, |x| and x^2 in float64, in registers; in float32 what one
// exponential gives for near and far tokens alike.
struct MixedSums {
  // Four vectors are summed up, then four such sums: few roundings, and equal terms round little.
  static constexpr int kVectors = 4, kSettle = kLanes / 4;  // groups
  enum { kNearK3, kNearExcess, kFarK3, kFarW, kFarW2, kSums };
  D near_x, near_x2, far_x, far_x2, size;
  F below = splat(0.0f), above = below, far = below;  // counts, lane by lane

  explicit MixedSums(const Set& set)
      : near_x(load(set.near_x)),
        near_x2(load(set.near_x2)),
        far_x(load(set.far_x)),
        far_x2(load(set.far_x2)),
        size(load(set.abs_x)) {}
  void store_to(Set& set) const {
    store(set.near_x, near_x);
    store(set.near_x2, near_x2);
    store(set.far_x, far_x);
    store(set.far_x2, far_x2);
    store(set.abs_x, size);
    set.counts[layout::kCountClipLow] += count(below);
    set.counts[layout::kCountClipHigh] += count(above);
    set.counts[layout::kCountNFar] += count(far);
  }

  static int64_t count(F lanes) {
    alignas(64) float counts[kLanes];
    store(counts, lanes);
    float sum = 0;
    for (float n : counts) sum += n;
    return (int64_t)sum;
  }

  // The group of 64 x in memory; between(i) is called before each half of a vector, 0 the first.
  template <typename Between>
  __attribute__((always_inline)) void add(const float* x, const MixedConstants* constants, Set& set,
                                          Between between) {
    constexpr int kAtOnce = 2;  // vectors side by side: one alone waits for itself
    F sums[kSums];
#pragma GCC unroll 16
    for (int i = 0; i < kGroup / kLanes; i += kAtOnce) {
      asm("" : "+r"(constants));  // operands from memory: in registers they would push the sums out
      const MixedConstants& c = *constants;
      const F magic = splat(c.magic), one = splat(c.one);
      F v[kAtOnce], shifted[kAtOnce], r[kAtOnce], k[kAtOnce];
      M is_near[kAtOnce], is_far[kAtOnce];
#pragma GCC unroll 2
      for (int j = 0; j < kAtOnce; ++j) {
        const float* const there = x + (i + j) * kLanes;
        v[j] = load(there);
        is_near[j] = less(abs(v[j]), splat(c.near_limit));
        is_far[j] = at_least(abs(v[j]), splat(c.near_limit));
        below = add_where(less(v[j], splat(c.clip_low)), one, below);
        above = add_where(less(splat(c.clip_high), v[j]), one, above);
        far = add_where(is_far[j], one, far);
        add_where(is_near[j], v[j], there, near_x, near_x2);
        add_where(is_far[j], v[j], there, far_x, far_x2);
        size = size + (abs(widen(there)) + abs(widen(there + kHalf)));
        between(2 * i + j);
      }
#pragma GCC unroll 2
      for (int j = 0; j < kAtOnce; ++j) {
        // near ones are their own remainder: what is left of ln 2 would cancel in their k3
        shifted[j] = fma_where(is_far[j], v[j], splat(c.log2e), magic);
        const F n = shifted[j] - magic;
        r[j] = fma(n, splat(c.ln2_low), fma(n, splat(c.ln2_high), v[j]));
      }
#pragma GCC unroll 2
      for (int j = 0; j < kAtOnce; ++j) {
        const F r2 = r[j] * r[j], r3 = r2 * r[j];
        const F even = fma(fma(splat(c.p[4]), r2, splat(c.p[2])), r2, splat(c.p[0]));
        const F odd = fma(splat(c.p[3]), r2, splat(c.p[1]));
        k[j] = fma(fma(odd, r[j], even), r3, r2 * splat(c.half));
      }
#pragma GCC unroll 2
      for (int j = 0; j < kAtOnce; ++j) {
        const F s = power_from_magic(shifted[j]), w = fma(s, r[j] + k[j], s);
        const F k3 = fma(s, k[j], fma(s, r[j], s - one) - v[j]);  // nothing cancels
        const F excess = fma(v[j], splat(c.two), k3);             // over k3
        const bool first = (i + j) % kVectors == 0;
        sums[kNearK3] =
            first ? keep_where(is_near[j], k3) : add_where(is_near[j], k3, sums[kNearK3]);
        sums[kNearExcess] = first ? keep_where(is_near[j], k3 * excess)
                                  : fma_where(is_near[j], k3, excess, sums[kNearExcess]);
        sums[kFarK3] = first ? keep_where(is_far[j], k3) : add_where(is_far[j], k3, sums[kFarK3]);
        sums[kFarW] = first ? keep_where(is_far[j], w) : add_where(is_far[j], w, sums[kFarW]);
        sums[kFarW2] =
            first ? keep_where(is_far[j], w * w) : fma_where(is_far[j], w, w, sums[kFarW2]);
        between(2 * i + kAtOnce + j);
      }
      if ((i + kAtOnce) % kVectors != 0) continue;
#pragma GCC unroll 16
      for (int k = 0; k < kSums; ++k) store(set.mixed[k], load(set.mixed[k]) + sums[k]);
    }
  }
};

// What the set's mixed sums hold, into the others. (A call would have the sums of add_mixed in
// memory.)
__attribute__((always_inline)) inline void finish_mixed(Set& set) {
  set.mixed_groups = 0;
  // The least scale that their weights, float32 unscaled, need.
  rescale_far(set, -kMixedLimit);
  const double unit = power_of_two(-set.far_scale);
  double* const to[] = {set.near_k3, set.near_excess, set.far_k3, set.far_w, set.far_w2};
  const double scales[] = {1, 1, 1, unit, unit * unit};
  for (int i = 0; i < MixedSums::kSums; ++i) {
    store(to[i], fma(widened(load(set.mixed[i])), splat(scales[i]), load(to[i])));
    store(set.mixed[i], splat(0.0f));
  }
}

// Is a quarter of the group far? Where few are, packing them is quicker.
inline bool many_far(const Group& group) {
  int count = 0;
  for (const F& v : group.x) {
    count += __builtin_popcount(mask_bits(at_least(abs(v), splat(kNearLimit))));
  }
  return count >= kGroup / 4;
}

// Groups with |x| below kMixedLimit and inside the bins, into the sums and the histogram, until
// more than kCalmRun in a row would have gone the common way. Stops before a group that needs
// another way; returns the number done.
template <typename Source>
__attribute__((noinline)) int add_mixed(Workspace& work, const Source source, int begin, int groups,
                                        Set& set) {
  constexpr int kCalmRun = 3;
  const LookConstants constants(work);
  const H bound = splat(work.too_large), far = splat(work.far);
  const H limit = splat(limit_of(work, set));
  int wide = 0, calm_run = 0;
  int64_t zero_tokens = 0;
  Indices indices(work.pending);
  MixedSums sums(set);
  int done = 0;
  for (; done < groups && calm_run <= kCalmRun; ++done) {
    const Group group = source.group(begin + done);
    const Look<true, Source> look(group, constants, indices.next);
    if (any_at_least(look.largest, bound)) break;
    const Kind kind = look.tell(group, constants, indices.next);
    if (kind == kOther) break;
    group.store_to(work.mixed_x);
    if (any_at_least(look.largest, splat(set.record))) {
      take_extrema(set, Staged{work.mixed_x}.group(0));
    }
    if (any_at_least(look.largest, limit)) {
      calm_run = 0;
      wide += !any_at_least(look.largest, far);
    } else {
      ++calm_run;
    }
    if (kind == kZeros) {
      zero_tokens += kGroup;
      continue;
    }
    sums.add(work.mixed_x, &work.mixed_constants, set, [&](int i) __attribute__((always_inline)) {
      drain<kHalf>(indices.last, i * kHalf, indices.histogram);
    });
    if (++set.mixed_groups == MixedSums::kSettle) finish_mixed(set);
    indices.turn(set.histogram);
  }
  sums.store_to(set);
  set.zeros += zero_tokens;
  set.not_calm += wide;
  set_watch(work, set);
  indices.store_back();
  return done;
}

}  // namespace
}  // namespace pyrlstats
