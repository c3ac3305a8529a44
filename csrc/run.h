// Groups of 64 tokens of one set: the histogram, and every sum over near tokens; far ones are put
// aside.
#pragma once
#include <type_traits>

#include "mixed.h"
#include "near.h"

namespace pyrlstats {
namespace {

// Works on the full groups of near tokens that wait in the set.
template <bool kNarrow>
__attribute__((noinline)) void drain_near(Set& set, uint16_t* histogram) {
  const int count = set.near_waiting / kGroup * kGroup;
  NearSums sums(set);
  for (int g = 0; g < count; g += kGroup) {
    const float* const x = set.near + g;
#pragma GCC unroll 16
    for (int i = 0; i < kGroup; i += kLanes) {
      sums.add(widen(x + i), widen(x + i + kHalf));
      if (kNarrow) drain<kLanes>(set.queue + g, i, histogram);
    }
  }
  sums.store_to(set);
  set.near_waiting -= count;
  for (int i = 0; i < set.near_waiting; ++i) set.near[i] = set.near[count + i];
  if (kNarrow) dequeue(set, count);
}

// The same of all that waits, the last groups filled up; zeros add to no sum.
template <bool kNarrow>
void finish_parted(Workspace& work, Set& set) {
  if (kNarrow) {
    for (int i = 0; i < set.queued; i += kGroup) drain<kGroup>(set.queue + i, 0, set.histogram);
    set.queued = 0;
  }
  for (; set.near_waiting % kGroup != 0; ++set.near_waiting) set.near[set.near_waiting] = 0;
  if (set.near_waiting > 0) drain_near<kNarrow>(set, work.trash);
  finish_far<kNarrow>(set, work.trash);
}

// A closer look at up to kPrepared groups with large, tiny or record values: indices clamped,
// extrema updated, clips counted, near and far tokens packed. Stops before a group with an odd
// token; returns the number of groups taken. Calm groups in between are taken along: leaving costs
// more than they do here.
template <bool kNarrow, typename Source>
__attribute__((noinline)) int prepare(const Plan& plan, Workspace& work, const Source& source,
                                      int begin, Set& set) {
  constexpr int kPairs = kGroup / kLanes / 2, kCalmGroups = 3;
  const H restless = splat(work.restless), near_below = splat(uint16_t(layout::kNearBits >> 16));
  const H not_calm = splat(limit_of(work, set));
  const H beyond = splat(work.beyond), record = splat(set.record);
  const H low = splat(work.low), abs_bits = splat(uint16_t(0x7fff));
  const F limit = splat(kNearLimit);
  constexpr uint32_t kAll = (1u << kLanes) - 1;
  const int shift = work.narrow.shift;
  uint16_t* index = set.queue + set.queued;
  Extrema extrema(set);
  // in registers: stores of vectors may alias the set
  float* near = set.near + set.near_waiting;
  float* far = set.far + set.far_waiting;
  bool new_extrema = false;
  Clipped clipped;
  int taken = 0, calm = 0, wide = 0;
  for (; taken < kPrepared && calm <= kCalmGroups; ++taken) {
    if (taken > 0 && !set.run.goes_on(begin + taken)) break;
    const Group group = source.group(begin + taken);
    H top[kPairs], largest = splat(uint16_t(0)), smallest = abs_bits;
#pragma GCC unroll 16
    for (int i = 0; i < kPairs; ++i) {
      top[i] = top_halves(group.x[2 * i], group.x[2 * i + 1]);
      const H a = top[i] & abs_bits;
      largest = max(largest, a);
      smallest = min(smallest, a);
      if (kNarrow) store(index + 2 * kLanes * i, shift_right(top[i], shift));
    }
    if (any_at_least(largest, beyond) || any_at_least(low, smallest)) {
      if (any_odd(group)) break;
      for (int i = 0; i < kPairs; ++i) {
        if (kNarrow) store(index + 2 * kLanes * i, work.narrow.of(top[i]));
      }
    }
    calm = any_at_least(largest, not_calm) ? 0 : calm + 1;
    if (any_at_least(largest, record)) {
      new_extrema = true;
      extrema.add(group);
    }
    if (!any_at_least(largest, splat(uint16_t(1)))) {
      set.zeros += kGroup;
      continue;
    }
    index += kGroup;
    if (!kNarrow) count_wide(work, group, set);
    if (!any_at_least(largest, restless)) {
      group.store_to(near);
      near += kGroup;
      wide += calm == 0;
      continue;
    }
    clipped.add(group, plan.clip_low, plan.clip_high);
    if (!any_at_least(largest, near_below)) {
      group.store_to(near);
      near += kGroup;
      wide += calm == 0;
      continue;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kGroup / kLanes; ++i) {
      const F v = group.x[i];
      const uint32_t is_near = mask_bits(less(abs(v), limit));
      const int64_t count = compress_store(near, v, is_near);
      compress_store(far, v, is_near ^ kAll);
      near += count;
      far += kLanes - count;
    }
  }
  set.not_calm += wide;
  if (new_extrema) extrema.store_to(set);
  set_watch(work, set);
  clipped.store_to(set);
  set.far_waiting = (int)(far - set.far);
  set.near_waiting = (int)(near - set.near);
  if (kNarrow) set.queued = (int)(index - set.queue);
  return taken;
}

// Takes the extrema of up to kPrepared groups of the run, the first of which has a record, as long
// as upper halves of |x| are below a limit; returns their number. (Of many at once: tokens of one
// sign hold a record in every group, as `set.record` knows records, and one at a time have 0.6 of
// this rate.)
template <typename Source>
__attribute__((noinline)) int take_records(const Workspace& work, const Source source, int begin,
                                           Set& set, uint16_t limit) {
  Extrema extrema(set);
  int taken = 0;
  do {
    const Group group = source.group(begin + taken);
    H largest = splat(uint16_t(0));
    for (int i = 0; i < kGroup / kLanes; i += 2) {
      largest = max(largest, top_halves(group.x[i], group.x[i + 1]) & splat(uint16_t(0x7fff)));
    }
    if (any_at_least(largest, splat(limit))) break;
    if (taken == 0 && !any_at_least(largest, splat(set.record))) return 0;
    extrema.add(group);
  } while (++taken < kPrepared && set.run.goes_on(begin + taken));
  extrema.store_to(set);
  set_watch(work, set);
  return taken;
}

// Groups below `watch` into the sums over near tokens and the histogram, as long as they need no
// closer look; returns the number done. No call inside: accumulators stay in registers (spilled
// ones cost 0.25 cycles a token).
template <bool kNarrow, bool kCalm, typename Source>
__attribute__((noinline)) int add_groups(Workspace& work, const Source source, int begin, Set& set,
                                         uint16_t watch) {
  const LookConstants constants(work);
  const H bound = splat(watch);
  Indices indices(work.pending);
  std::conditional_t<kCalm, CalmSums, NearSums> sums(set);
  const H restless = splat(work.restless);
  Clipped clipped;
  int64_t g = begin;
  for (bool more = true; more; more = set.run.goes_on(++g)) {
    const Group group = source.group(g);
    const Look<kNarrow, Source> look(group, constants, indices.next);
    if (any_at_least(look.largest, bound)) break;
    const Kind kind = look.tell(group, constants, indices.next);
    if (kind == kOther) break;
    if (kind == kZeros) {
      set.zeros += kGroup;  // they add to nothing else
      continue;
    }
    if (!kCalm && any_at_least(look.largest, restless)) {
      const MixedConstants& c = work.mixed_constants;
      clipped.add(group, c.clip_low, c.clip_high);
    }
    // scalar increments of the group before hide behind vector arithmetic: the finer, the better
    sums.add(group, [&](int i) __attribute__((always_inline)) {
      if (kNarrow) drain<kHalf>(indices.last, i * kHalf, indices.histogram);
    });
    sums.end_group(set);
    if (kNarrow) {
      indices.turn(set.histogram);
    } else {
      count_wide(work, group, set);
    }
  }
  sums.store_to(set);
  if (!kCalm) clipped.store_to(set);
  if (kNarrow) indices.store_back();
  return (int)(g - begin);
}

// Groups of `source` from group `begin` into the set, as far as its run goes. Stops before a group
// with an odd token and returns the number done.
template <bool kNarrow, typename Source>
int run_groups(const Plan& plan, Workspace& work, const Source& source, int begin, Set& set) {
  int g = begin;
  const auto add = [&](uint16_t watch) {
    // wide bins are slow whatever the sums: more terms do no harm, one function less
    return set.not_calm < kNotCalm ? add_groups<kNarrow, kNarrow>(work, source, g, set, watch)
                                   : add_groups<kNarrow, false>(work, source, g, set, watch);
  };
  // (expected no more: not even what follows a record)
  const auto mix = [&](uint16_t watch) {
    return set.expect_far ? add_mixed(work, source, g, set, watch) : 0;
  };
  // Groups by one way, and once more behind a record. False: group g needs another way.
  const auto take = [&](const auto& way, uint16_t watch, uint16_t limit) {
    int done = way(watch);
    g += done;
    if (done > 0 && !set.run.goes_on(g)) return true;
    const int known = take_records(work, source, g, set, limit);
    if (known == 0) return false;
    const int64_t end = set.run.end;
    set.run.end = g + known;
    done = way(limit);
    set.run.end = end;
    g += done;
    return done > 0;
  };
  while (g == begin || set.run.goes_on(g)) {
    if (!set.expect_far) {
      if (take(add, set.watch, limit_of(work, set))) continue;
      set.expect_far = kNarrow && many_far(source.group(g));
    }
    if (kNarrow && set.expect_far) {
      const int first = g;
      if (take(mix, set.record, work.too_large) || g > first) continue;
    }
    const int taken = prepare<kNarrow>(plan, work, source, g, set);
    if (taken == 0) break;
    g += taken;
    if (set.near_waiting >= kBuffer) drain_near<kNarrow>(set, set.histogram);
    if (set.far_waiting >= kBuffer) drain_far<kNarrow>(set, set.histogram);
  }
  if (kNarrow) set.load += kGroup * (g - begin);
  return g - begin;
}

// The same. Group `begin` is there and of the set: it is taken without being asked.
template <typename Source>
inline int run(const Plan& plan, Workspace& work, const Source& source, int begin,
               const Run& how_far, Set& set) {
  set.run = how_far;
  if (!work.bins.narrow()) return run_groups<false>(plan, work, source, begin, set);
  if (set.load + kGroup * (how_far.end - begin) > kMaxLoad) flush(work, set);
  return run_groups<true>(plan, work, source, begin, set);
}

}  // namespace
}  // namespace pyrlstats
