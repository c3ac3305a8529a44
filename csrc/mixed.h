// Groups with many far tokens: every vector adds to the sums of near and of far ones, by masks. On
// Laplace(1) data packing them apart (run.h) takes 1.3 times as long on Emerald Rapids and 1.06 on
// Zen 4, from memory; where one token in a hundred is far this way takes 1.15 times as long.
#pragma once
#include "far.h"
#include "group.h"

namespace pyrlstats {
namespace {

// The sums over |x| < kMixedLimit, in registers. One float32 exponential serves near and far
// tokens; what it gives is summed up in float32 for a few groups, x and x^2 in float64.
struct MixedSums {
  static constexpr int kSettle = kLanes / 4;  // groups, so 16 additions
  D near_x, near_x2, far_x, far_x2;
  F near_k3, near_excess, far_k3, far_w, far_w2, size;
  int64_t below = 0, above = 0, far = 0;
  int groups;

  explicit MixedSums(const Set& set)
      : near_x(load(set.near_x)),
        near_x2(load(set.near_x2)),
        far_x(load(set.far_x)),
        far_x2(load(set.far_x2)),
        near_k3(load(set.mixed[0])),
        near_excess(load(set.mixed[1])),
        far_k3(load(set.mixed[2])),
        far_w(load(set.mixed[3])),
        far_w2(load(set.mixed[4])),
        size(load(set.mixed[5])),
        groups(set.mixed_groups) {}
  // As they are: where a call ends must not be seen in the sums.
  void store_to(Set& set) const {
    store(set.near_x, near_x);
    store(set.near_x2, near_x2);
    store(set.far_x, far_x);
    store(set.far_x2, far_x2);
    const F sums[] = {near_k3, near_excess, far_k3, far_w, far_w2, size};
    for (int i = 0; i < 6; ++i) store(set.mixed[i], sums[i]);
    set.mixed_groups = groups;
    set.counts[layout::kCountClipLow] += below;
    set.counts[layout::kCountClipHigh] += above;
    set.counts[layout::kCountNFar] += far;
  }

  // x: v in memory.
  __attribute__((always_inline)) void add(F v, const float* x, const MixedConstants* constants) {
    asm("" : "+r"(constants));  // operands from memory: in registers they would push the sums out
    const MixedConstants& c = *constants;
    const F magic = splat(c.magic), size_of_v = abs(v);
    const M is_near = less(size_of_v, splat(c.near_limit));
    const M is_far = at_least(size_of_v, splat(c.near_limit));
    size = size + size_of_v;
    below += __builtin_popcount(mask_bits(less(v, splat(c.clip_low))));
    above += __builtin_popcount(mask_bits(less(splat(c.clip_high), v)));
    far += __builtin_popcount(mask_bits(is_far));
    add_where(is_near, v, x, near_x, near_x2);
    add_where(is_far, v, x, far_x, far_x2);

    const F shifted = fma(v, splat(c.log2e), magic), n = shifted - magic;
    const F r = fma(n, splat(c.ln2_low), fma(n, splat(c.ln2_high), v)), r2 = r * r;
    // exp(r) - 1 - r = r^2 p(r), |r| < 0.347, within 1e-8
    F even = fma(splat(c.p[4]), r2, splat(c.p[2])), odd = fma(splat(c.p[5]), r2, splat(c.p[3]));
    even = fma(even, r2, splat(c.p[0]));
    odd = fma(odd, r2, splat(c.p[1]));
    const F k = fma(odd, r, even) * r2;
    const F s = power_from_magic(shifted), w = fma(s, r + k, s);
    const F k3 = fma(s, k, fma(s, r, s - splat(c.one)) - v);  // nothing cancels
    near_k3 = add_where(is_near, k3, near_k3);
    near_excess = fma_where(is_near, k3, fma(v, splat(c.two), k3), near_excess);
    far_k3 = add_where(is_far, k3, far_k3);
    far_w = add_where(is_far, w, far_w);
    far_w2 = fma_where(is_far, w, w, far_w2);
  }

  __attribute__((always_inline)) void settle(Set& set) {
    // The least scale that their weights, which are float32 unscaled, need; not before there are
    // any.
    rescale_far(set, -kMixedLimit);
    const double unit = power_of_two(-set.far_scale);
    const auto move = [](F& sum, double* to, double scale) {
      store(to, fma(widened(sum), splat(scale), load(to)));
      sum = splat(0.0f);
    };
    move(near_k3, set.near_k3, 1);
    move(near_excess, set.near_excess, 1);
    move(far_k3, set.far_k3, 1);
    move(far_w, set.far_w, unit);
    move(far_w2, set.far_w2, unit * unit);
    move(size, set.abs_x, 1);
    groups = 0;
  }
};

// What the set's mixed sums hold, into the others.
inline void finish_mixed(Set& set) {
  if (set.mixed_groups == 0) return;
  MixedSums sums(set);
  sums.settle(set);
  set.mixed_groups = 0;
}

inline bool many_far(int64_t tokens) { return tokens >= kGroup / 4; }
inline bool many_far(const Group& group) {
  int64_t far = 0;
  for (const F& v : group.x) {
    far += __builtin_popcount(mask_bits(at_least(abs(v), splat(kNearLimit))));
  }
  return many_far(far);
}

// Groups with many far tokens into the sums and the histogram. Stops after one with few, and before
// one that needs another way (|x| from kMixedLimit on, or tiny); returns the number done.
template <bool kNarrow, typename Source>
__attribute__((noinline)) int add_mixed(Workspace& work, const Source& source, int begin,
                                        int groups, Set& set) {
  const LookConstants constants(work);
  const H bound = splat(work.too_large), record = splat(set.record);
  bool new_extrema = false, many = true;
  Indices indices(work.pending);
  MixedSums sums(set);
  int done = 0;
  for (; done < groups && many; ++done) {
    source.fetch(begin + done);
    const Group group = source.group(begin + done);
    const Look<kNarrow, Source> look(group, constants, indices.next);
    if (any_at_least(look.largest, bound)) break;
    if (look.tell(group, constants, indices.next) != kUsual) break;
    if (any_at_least(look.largest, record)) {
      new_extrema = true;
      F least = load(set.min_x), most = load(set.max_x);
      for (const F& v : group.x) {
        least = min(least, v);
        most = max(most, v);
      }
      store(set.min_x, least);
      store(set.max_x, most);
    }
    const int64_t far_before = sums.far;
    group.store_to(work.mixed_x);
#pragma GCC unroll 16
    for (int i = 0; i < kGroup / kLanes; ++i) {
      sums.add(group.x[i], work.mixed_x + i * kLanes, &work.mixed_constants);
      if (kNarrow) drain<kLanes>(indices.last + i * kLanes, indices.histogram);
    }
    many = many_far(sums.far - far_before);
    if (++sums.groups == sums.kSettle) sums.settle(set);
    if (kNarrow) {
      indices.turn(set.histogram);
    } else {
      count_wide(work, group, set);
    }
  }
  sums.store_to(set);
  if (new_extrema) set_record(set);
  set_watch(work, set);
  if (kNarrow) indices.store_back();
  return done;
}

}  // namespace
}  // namespace pyrlstats
