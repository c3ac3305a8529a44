// Radix selection: tokens of one slice whose key lies in an interval, counted by the next digit of
// the key. The key of x orders as x does (its bits, negated where x is below 0; a zero of either
// sign is 0), or as |x|.
#pragma once
#include "stage.h"

namespace pyrlstats {
namespace {

inline int32_t key_of(float x, bool absolute) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  const int32_t a = bits & layout::kAbsBits;
  return bits >> 31 && !absolute ? -a : a;
}

// Which upper halves of keys some interval reaches: most tokens need no closer look.
struct Reach {
  uint8_t hit[1 << 16];

  explicit Reach(const Digits& wanted) {
    __builtin_memset(hit, 0, sizeof hit);
    for (int64_t t = 0; t < wanted.count; ++t) {
      const Interval& interval = wanted.intervals[t];
      if (interval.width <= 0) continue;
      const int64_t last = ((int64_t)interval.low + interval.width - 1) >> 16;
      for (int64_t half = interval.low >> 16; half <= last; ++half) hit[(uint16_t)half] = 1;
    }
  }
};

// Tokens [begin, begin + count) into wanted.counts.
void count_digits(const Plan& plan, const Digits& wanted, int64_t begin, int64_t count,
                  int64_t* counts) {
  SmallStage stage;
  const Reach reach(wanted);
  int32_t key[kSmallBlock];
  uint16_t where[kSmallBlock];
  alignas(64) uint8_t bytes[kSmallBlock + 64], base_bytes[kSmallBlock + 64];
  for (const int64_t end = begin + count; begin < end; begin += kSmallBlock) {
    const int n = end - begin < kSmallBlock ? (int)(end - begin) : kSmallBlock;
    stage_x(plan, begin, n, stage);
    for (int i = 0; i < n; ++i) key[i] = key_of(stage.x[i], wanted.absolute);
    int found = 0;
    for (int i = 0; i < n; ++i) {
      where[found] = (uint16_t)i;
      found += reach.hit[(uint16_t)(key[i] >> 16)];
    }
    if (found == 0) continue;
    const uint8_t* base = nullptr;
    if (plan.base) base = mask_bytes(*plan.base, begin, n, stage, base_bytes);
    if (plan.ids) stage_ids(*plan.ids, plan.slices, begin, n, stage);
    int64_t staged = -1;  // the slice whose members are in `members`
    const uint8_t* members = nullptr;
    for (int64_t t = 0; t < wanted.count; ++t) {
      const Interval& interval = wanted.intervals[t];
      if (interval.width <= 0) continue;
      if (plan.masks && staged != interval.slice) {
        members = mask_bytes(plan.masks[interval.slice], begin, n, stage, bytes);
        staged = interval.slice;
      }
      const uint32_t low = interval.low, width = interval.width;
      int64_t* const mine = counts + t * kDigits;
      for (int j = 0; j < found; ++j) {
        const int i = where[j];
        const uint32_t above = (uint32_t)key[i] - low;
        if (above >= width || (base && !base[i])) continue;
        if (plan.ids ? stage.ids[i] == interval.slice : !members || members[i]) {
          ++mine[above >> interval.shift];
        }
      }
    }
  }
}

}  // namespace
}  // namespace pyrlstats
