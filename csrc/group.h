// What is asked of a group of 64 tokens of one set, and what is counted of it apart from its sums.
#pragma once
#include "sets.h"

namespace pyrlstats {
namespace {

// Indices of the group in work, and of the group before.
struct Indices {
  Pending& pending;
  uint16_t* histogram;
  uint16_t *last, *next;

  explicit Indices(Pending& pending)
      : pending(pending),
        histogram(pending.histogram),
        last(pending.index[0]),
        next(pending.index[1]) {}
  void turn(uint16_t* counted) {
    histogram = counted;
    uint16_t* const free = last;
    last = next;
    next = free;
  }
  void store_back() const {
    if (last != pending.index[0]) __builtin_memcpy(pending.index[0], last, sizeof pending.index[0]);
    pending.histogram = histogram;
  }
};

// The group's tokens in the slices' own histograms, where 16 bits do not hold a bin.
__attribute__((noinline)) void count_wide(Workspace& work, const Group& group, const Set& set) {
  alignas(64) float x[kGroup];
  group.store_to(x);
  for (int i = 0; i < kGroup; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, x + i, sizeof bits);
    if ((bits & layout::kAbsBits) == 0) {
      each_slice(work, set, [&](int64_t slice) { ++work.slice_zeros[slice]; });
    } else {
      const int64_t bin = work.bins.of(bits);
      work.dirty = true;
      each_slice(work, set,
                 [&](int64_t slice) { ++work.slice_histogram[slice * work.bins.count() + bin]; });
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

// From which upper half of |x| a group may hold a new minimum or maximum: groups below both
// extrema's |x| have none. Zeros alone have none once 0 is inside.
inline void set_record(Set& set) {
  const float low = -lowest(set), high = highest(set), record = low < high ? low : high;
  const uint16_t half = upper_half(record) & 0x7fff;  // of a zero of either sign: 0
  set.record = record < 0 ? 0 : half > 0 ? half : 1;
}

// The extrema of a set and of more tokens.
struct Extrema {
  F least, most;
  explicit Extrema(const Set& set) : least(load(set.min_x)), most(load(set.max_x)) {}
  void add(F v) {
    least = min(least, v);
    most = max(most, v);
  }
  void add(const Group& group) {
    for (const F& v : group.x) add(v);
  }
  void store_to(Set& set) const {
    store(set.min_x, least);
    store(set.max_x, most);
    set_record(set);
  }
};

inline bool any_subnormal(const Group& group) {
  uint32_t some = mask_bits(subnormal(group.x[0]));
  for (int i = 1; i < kGroup / kLanes; ++i) some |= mask_bits(subnormal(group.x[i]));
  return some != 0;
}

inline bool any_odd(const Group& group) {
  uint32_t some = 0;
  for (const F& v : group.x) some |= mask_bits(odd(v));
  return some != 0;
}

// How many tokens of a group are clipped, on either side.
struct Clipped {
  int64_t below = 0, above = 0;
  __attribute__((always_inline)) void add(const Group& group, float clip_low, float clip_high) {
    const F low = splat(clip_low), high = splat(clip_high);
    uint64_t are_below = 0, are_above = 0;
#pragma GCC unroll 16
    for (int i = 0; i < kGroup / kLanes; ++i) {
      const F v = group.x[i];
      are_below |= (uint64_t)mask_bits(less(v, low)) << (i * kLanes);
      are_above |= (uint64_t)mask_bits(less(high, v)) << (i * kLanes);
    }
    below += __builtin_popcountll(are_below);
    above += __builtin_popcountll(are_above);
  }
  void store_to(Set& set) const {
    set.counts[layout::kCountClipLow] += below;
    set.counts[layout::kCountClipHigh] += above;
  }
};

// The first look at a group: its histogram indices, and what its |x| say of it.
enum Kind { kUsual, kZeros, kOther };  // kOther: with a token that is tiny

struct LookConstants {
  const H low, tiny = splat(uint16_t(upper_half(kCalmLeast) - 1));
  const H abs_bits = splat(uint16_t(0x7fff)), zero_counters;
  const NarrowBins& narrow;
  const int shift;
  explicit LookConstants(const Workspace& work)
      : low(splat(work.low)),
        zero_counters(work.narrow.zero),
        narrow(work.narrow),
        shift(work.narrow.shift) {}
};

template <bool kNarrow, typename Source>
struct Look {
  static constexpr int kPairs = kGroup / kLanes / 2;
  H top[kPairs], largest = splat(uint16_t(0)), smallest;

  __attribute__((always_inline)) Look(const Group& group, const LookConstants& c, uint16_t* index)
      : smallest(c.abs_bits) {
#pragma GCC unroll 16
    for (int i = 0; i < kPairs; ++i) {
      top[i] = top_halves(group.x[2 * i], group.x[2 * i + 1]);
      const H a = top[i] & c.abs_bits;
      H counter = shift_right(top[i], c.shift);
      largest = max(largest, a);
      if (Source::kUpperHalfTells) {  // zeros are the rule: told apart at once, 5 to 10 %
        const Z zeros = is_zero(a);
        counter = select(zeros, c.zero_counters, counter);
        smallest = min_except(zeros, a, smallest);
      } else {
        smallest = min(smallest, a);
      }
      if (kNarrow) store(index + 2 * kLanes * i, counter);
    }
  }

  __attribute__((always_inline)) Kind tell(const Group& group, const LookConstants& c,
                                           uint16_t* index) const {
    const bool some_low = any_at_least(c.low, smallest);
    if (!some_low && !Source::kUpperHalfTells) return kUsual;
    const bool subnormals = !Source::kUpperHalfTells && any_subnormal(group);
    if (!any_at_least(largest, splat(uint16_t(1))) && !subnormals) return kZeros;
    if (!some_low) return kUsual;
    H nonzero = c.abs_bits;
#pragma GCC unroll 16
    for (int i = 0; i < kPairs; ++i) {
      const H a = top[i] & c.abs_bits;
      nonzero = min(nonzero, select(is_zero(a), c.abs_bits, a));
      if (kNarrow) store(index + 2 * kLanes * i, c.narrow.of(top[i]));
    }
    return any_at_least(c.tiny, nonzero) || subnormals ? kOther : kUsual;
  }
};

}  // namespace
}  // namespace pyrlstats
