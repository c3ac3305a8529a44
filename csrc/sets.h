// A set is a group of slices that tokens share: everything is accumulated per set, and a slice is
// the sum of the sets that contain it. The workspace holds the sets of one thread.
#pragma once
#include "bins.h"
#include "stage.h"

namespace pyrlstats {
namespace {

constexpr int kHalf = kLanes / 2;  // float64 lanes of a vector
constexpr int kBuffer = 512;       // tokens collected before they are worked on together
constexpr int kPrepared = 16;      // groups looked at ahead: parted by far and near, or for extrema
constexpr int kJointSets =
    16;  // sets of more than one slice in a chunk; beyond, slice by slice (L2 footprint)
// Tokens take turns on so many counters of a bin: one counter hit again and again costs 7.2 cycles
// a token, four side by side take 2.1.
constexpr int kTurns = 4;
constexpr uint32_t kMaxLoad =
    kTurns * 65535;  // tokens that 16-bit counters hold: no turn gets more than its share

constexpr int kMixedParts = 4;  // sums of four vectors each that a few mixed groups leave (mixed.h)

// What a chunk adds to a set, in lanes; buffers of tokens waiting for their set.
struct alignas(64) Set {
  double near_x[kHalf], near_x2[kHalf], near_k3[kHalf], near_excess[kHalf], abs_x[kHalf];
  double far_x[kHalf], far_x2[kHalf], far_abs[kHalf], far_k3[kHalf], far_w[kHalf], far_w2[kHalf];
  double calm_x2[kHalf], calm_x3[kHalf];  // of tokens below kCalmLimit (near.h), and of a few
  float calm[4][kLanes];                  // groups of them the sums of x^4, .., x^7
  // of groups with far tokens (mixed.h): x and x^2 of all their tokens; of a few of these groups
  // sums of both kinds of tokens
  double mixed_x[kHalf], mixed_x2[kHalf];
  float mixed[kMixedParts][8][kLanes];
  float mixed_below[kLanes], mixed_above[kLanes], mixed_far[kLanes];  // counts
  float min_x[kLanes], max_x[kLanes];  // of all chunks since `seen`: an extremum may be told twice
  int calm_groups, mixed_groups;       // how many these are
  uint16_t watch;    // groups with an upper half of |x| from here on need a closer look
  int not_calm;      // how many groups of this chunk were not calm, but not far either
  uint16_t record;   // those from here on may hold a new extremum
  double far_scale;  // k of the far weights; -inf while there are none
  int64_t counts[layout::kCountSize];
  double single[layout::kSumSize];  // tokens taken one at a time
  uint64_t key;                     // slices: bit s, or the slice itself where ids are given
  uint32_t load;                    // tokens in the 16-bit histogram
  int64_t zeros;                    // of groups that are nothing else
  int waiting, near_waiting, far_waiting, queued;
  bool expect_far;      // a quarter of the tokens to come or more is expected to be far (mixed.h)
  Run run;              // in work; written by run() alone
  bool touched;         // in this chunk
  bool seen;            // since the last flush_all
  uint16_t* histogram;  // [NarrowBins::counters()][kTurns]; none for wide bins
  alignas(64) float x[kBuffer + 64 + kLanes];
  // tokens of groups that are not calm, parted, and their histogram indices in any order: as many
  alignas(64) float near[kBuffer + kPrepared * kGroup + kLanes];
  alignas(64) float far[kBuffer + kPrepared * kGroup + kLanes];
  alignas(64) uint16_t queue[2 * kBuffer + kPrepared * kGroup + kGroup];
};

// A load waits for stores under way a multiple of 64 KB off, as if they were to its own address:
// where the indices lie so from the counters that the data hit, a token takes 7 cycles instead of
// 1.4 (Emerald Rapids). So the counters of the default layout, 256 bytes an octave and a sign, end
// at one place in 64 KB, and the workspace and the first sets keep away from them. (Exact zeros
// count at 0xfe00.) The distance is of physical memory. Where its pages lie in any order, only the
// place in a page is certain: the indices have that of the counters of 2^-14 and 2^2 and may still
// meet them. (Huge pages keep that out; but counters of x and -x, 64 KB apart, then always meet:
// bfloat16 had 0.94 of its rate.)
constexpr size_t kAlias = 1 << 16, kCountersEnd = 0x8600, kCountersBegin = kCountersEnd - 0x2000;
constexpr size_t kWorkspacePlace = 0xd000, kSetsPlace = 0x8700;
constexpr size_t kSetStride = kAlias / 2 + 0xc0;  // and not all in the same lines of the L1
struct Slot {
  Set set;
  char apart[kSetStride - sizeof(Set)];
};

constexpr bool keeps_away(size_t place, size_t bytes) {
  place %= kAlias;
  const bool before = place + bytes <= kCountersBegin, after = place >= kCountersEnd;
  return before || (after && place + bytes <= kAlias + kCountersBegin);
}
constexpr bool sets_keep_away(int sets) {
  for (int i = 0; i < sets; ++i) {
    if (!keeps_away(kSetsPlace + i * kSetStride, sizeof(Set))) return false;
  }
  return true;
}
static_assert(sets_keep_away(8));

// Histogram indices of the last group, counted while the next group is worked on.
struct Pending {
  alignas(64) uint16_t index[2][64];  // the second is for the group in work
  uint16_t* histogram;
};

// Constants of mixed.h, side by side in memory.
struct MixedConstants {
  float magic = kMagic, log2e = (float)layout::kLog2E, ln2_high = kMinusLn2,
        ln2_low = kMinusLn2Rest;
  // exp(r) - 1 - r = r^2 / 2 + r^3 p(r), |r| < 0.5, within 3e-8
  float p[5] = {0.16666666f, 0.0416660f, 0.0083334801f, 0.0013975332f, 0.00019863353f};
  float half = 0.5f, near_limit = kNearLimit, clip_low, clip_high;
};

struct Workspace {
  Pending pending;
  alignas(64) float mixed_x[kGroup];
  MixedConstants mixed_constants;
  // derived from the plan by `open`
  Bins bins;
  NarrowBins narrow;
  bool by_id;
  int slots;  // of sets
  Slot* sets;
  int32_t* order;  // sets in the order in which this chunk met them: sums never depend on the
                   // thread's past
  int touched, joint;
  int used;  // keys in the table (masks)
  uint64_t last_key;
  int last_set;
  uint8_t place[256];  // hash of a key -> its set, perhaps
  // of a block: its masks; or its ids, tokens of the base mask, and each group's set
  BlockMasks masks;
  BlockIds ids;
  uint64_t base[kBlock / kGroup], keys[kBlock / kGroup];
  uint8_t* mask_bytes;       // [slices + 1 (ids: 1)][kBlock]: masks that are not bytes in memory
  int64_t* slice_histogram;  // [slices][2P], the state's order
  int64_t* target;  // what `flush` adds to: slice_histogram, or the state's own at the very end
  bool dirty;       // slice_histogram is not all zeros
  int64_t* slice_zeros;  // [slices]
  uint16_t* trash;
  // upper halves of the least |x| that is far or beyond the bins; that, or clipped; that, or not
  // calm
  uint16_t far, restless, not_calm;
  uint16_t
      low;  // greatest upper half of |x| that may be a zero's, tiny, below the bins or kCalmLeast
  uint16_t beyond;     // upper half of the least |x| that is above the bins or not finite
  uint16_t too_large;  // that, or kMixedLimit's
  Stage stage;
};

static_assert(keeps_away(kWorkspacePlace, offsetof(Workspace, stage) + sizeof(Stage::x)));

inline size_t page(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

// The least offset from `bytes` on at `place` of 64 KB, the workspace itself at kWorkspacePlace.
inline size_t aligned_as(size_t bytes, size_t place) {
  const size_t offset = (place - kWorkspacePlace) % kAlias;
  return offset + (bytes - offset + kAlias - 1) / kAlias * kAlias;
}

struct Sizes {
  int slots;
  size_t sets, order, mask_bytes, slice_zeros, slice_histogram, histogram, histograms, total;
  explicit Sizes(const Plan& plan) {
    const Bins bins(plan);
    slots = (int)(plan.ids ? plan.slices : 2 * (plan.slices + kJointSets));
    sets = aligned_as(sizeof(Workspace), kSetsPlace);
    order = page(sets + sizeof(Slot) * slots);
    mask_bytes = order + page(sizeof(int32_t) * slots);
    slice_zeros = mask_bytes + page(kBlock * (plan.ids ? 1 : plan.slices + 1));
    slice_histogram = slice_zeros + page(sizeof(int64_t) * plan.slices);
    const size_t before_window_ends = sizeof(uint16_t) * kTurns * (bins.offset + bins.per_sign);
    histograms = aligned_as(slice_histogram + sizeof(int64_t) * bins.count() * plan.slices,
                            kCountersEnd - before_window_ends);
    histogram =
        bins.narrow() ? page(sizeof(uint16_t) * kTurns * NarrowBins(bins).counters()) : 4096;
    total = histograms + histogram * (slots + 1);
  }
};

inline Workspace& open(const Plan& plan, void* memory) {
  const Sizes sizes(plan);
  char* base = (char*)memory;
  Workspace& work = *(Workspace*)base;
  work.bins = Bins(plan);
  if (work.bins.narrow()) work.narrow = NarrowBins(work.bins);
  work.by_id = plan.ids != nullptr;
  work.slots = sizes.slots;
  work.sets = (Slot*)(base + sizes.sets);
  work.order = (int32_t*)(base + sizes.order);
  work.mask_bytes = (uint8_t*)(base + sizes.mask_bytes);
  work.slice_zeros = (int64_t*)(base + sizes.slice_zeros);
  work.slice_histogram = (int64_t*)(base + sizes.slice_histogram);
  if (!work.trash) {  // new memory: every set is a page of its own to touch
    for (int i = 0; i < work.slots; ++i) {
      work.sets[i].set.histogram = (uint16_t*)(base + sizes.histograms + sizes.histogram * i);
    }
    work.trash = (uint16_t*)(base + sizes.histograms + sizes.histogram * work.slots);
  }
  work.target = work.slice_histogram;
  work.far = far_from(plan);
  work.restless = restless_from(plan);
  const uint16_t calm = upper_half(kCalmLimit);
  work.not_calm = lesser(work.restless, calm);
  const int first = (127 + plan.min_exp) << 7, least = upper_half(kCalmLeast);
  work.low = (uint16_t)((first > least ? first : least) - 1);
  const int last = (127 + plan.max_exp) << 7, not_finite = layout::kInfBits >> 16;
  work.beyond = lesser((uint16_t)last, (uint16_t)not_finite);
  const uint16_t mixed = upper_half(kMixedLimit);
  work.too_large = lesser(mixed, work.beyond);
  work.mixed_constants = MixedConstants();
  work.mixed_constants.clip_low = plan.clip_low;
  work.mixed_constants.clip_high = plan.clip_high;
  if (!work.pending.histogram) work.pending.histogram = work.trash;
  return work;
}

// f(slice) for every slice of a set.
template <typename Function>
inline void each_slice(const Workspace& work, const Set& set, Function f) {
  if (work.by_id) {
    f((int64_t)set.key);
  } else {
    for (uint64_t rest = set.key; rest; rest &= rest - 1) f((int64_t)__builtin_ctzll(rest));
  }
}

// Each index by a load of its own: three arithmetic instructions fewer a token than parting words
// of four of them, 4 % faster.
template <int kCount>
inline void drain(const uint16_t* index, int first, uint16_t* histogram) {
#pragma GCC unroll 64
  for (int i = first; i < first + kCount; ++i) {
    ++histogram[kTurns * (size_t)index[i] + i % kTurns];
  }
}

// Count what is pending, now.
inline void settle(Workspace& work) {
  Pending& pending = work.pending;
  if (pending.histogram == work.trash) return;
  drain<64>(pending.index[0], 0, pending.histogram);
  pending.histogram = work.trash;
}

inline bool any_counted(const uint16_t* counters, int count) {
  H some = load(counters);
  for (int i = sizeof(H) / 2; i < count; i += sizeof(H) / 2) some = some | load(counters + i);
  return any_at_least(some, splat(uint16_t(1)));
}

// Adds `count` bins of the set to its slices' bins `bin`, bin + step, ..; clears them.
inline void flush_range(Workspace& work, Set& set, int from, int count, int64_t bin, int step) {
  constexpr int kStretch = 64;  // all-zero stretches are the rule
  static_assert(kTurns == 4, "a bin's counters are one word");
  for (int i = 0; i < count; i += kStretch) {
    const int n = count - i < kStretch ? count - i : kStretch;
    uint16_t* const p = set.histogram + kTurns * (from + i);
    if (n == kStretch && !any_counted(p, kTurns * kStretch)) continue;
    uint64_t turns[kStretch];
    __builtin_memcpy(turns, p, sizeof(uint64_t) * n);
    __builtin_memset(p, 0, sizeof(uint64_t) * n);
    for (int j = 0; j < n; ++j) {
      const uint64_t pairs =
          (turns[j] & 0x0000ffff0000ffff) + (turns[j] >> 16 & 0x0000ffff0000ffff);
      turns[j] = (pairs & 0xffffffff) + (pairs >> 32);
    }
    each_slice(work, set, [&](int64_t slice) {
      int64_t* to = work.target + slice * work.bins.count() + bin + i * step;
      if (step > 0) {
        for (int j = 0; j < n; ++j) to[j] += (int64_t)turns[j];
      } else {
        for (int j = 0; j < n; ++j) to[-j] += (int64_t)turns[j];
      }
    });
  }
}

// A set's histogram into its slices'; clears it.
void flush(Workspace& work, Set& set) {
  settle(work);
  work.dirty |= work.target == work.slice_histogram;
  const NarrowBins& narrow = work.narrow;
  const int size = work.bins.per_sign, offset = work.bins.offset;
  flush_range(work, set, offset, size, size, 1);
  flush_range(work, set, narrow.negative + offset, size, size - 1, -1);
  int64_t zeros = 0;
  for (int i = 0; i < kTurns * narrow.zero_count; ++i) {
    zeros += set.histogram[kTurns * narrow.zeros + i];
    set.histogram[kTurns * narrow.zeros + i] = 0;
  }
  each_slice(work, set, [&](int64_t slice) { work.slice_zeros[slice] += zeros; });
  set.load = set.queued;  // they are still to be counted
}

void flush_all(Workspace& work) {
  const int used = work.by_id ? work.slots : work.used;
  for (int i = 0; i < used; ++i) {
    Set& set = work.sets[i].set;
    if (set.load) flush(work, set);
    set.seen = false;
  }
  work.used = 0;
  work.last_set = -1;
}

// Tokens that are calm are so as a rule: a set that has met this many groups that are not has left
// the rule, and sums with more terms up to the end of the chunk.
constexpr int kNotCalm = 4;

// From which upper half of |x| a group goes another way: a function of the chunk's tokens alone, as
// sums must be. A record takes a look, and the same way as without.
inline uint16_t limit_of(const Workspace& work, const Set& set) {
  return set.not_calm < kNotCalm ? work.not_calm : work.far;
}
inline void set_watch(const Workspace& work, Set& set) {
  const uint16_t limit = limit_of(work, set);
  set.watch = lesser(set.record, limit);
}

// First meeting of a set in this chunk. Extrema stay: found anew they would cost 0.1 cycles a
// token.
void touch(Workspace& work, int index) {
  Set& set = work.sets[index].set;
  const D none = splat(0.0);
  double* const sums[] = {set.near_x, set.near_x2, set.near_k3, set.near_excess, set.abs_x,
                          set.far_x,  set.far_x2,  set.far_abs, set.far_k3,      set.far_w,
                          set.far_w2, set.calm_x2, set.calm_x3, set.mixed_x,     set.mixed_x2};
  for (double* sum : sums) store(sum, none);
  for (int i = 0; i < 4; ++i) store(set.calm[i], splat(i < 1 ? 0.0f : kCalmStart));
  float* const counts[] = {set.mixed_below, set.mixed_above, set.mixed_far};
  for (float* count : counts) store(count, splat(0.0f));
  set.expect_far = false;
  set.calm_groups = set.mixed_groups = 0;
  if (!set.seen) {
    store(set.min_x, splat(__builtin_inff()));
    store(set.max_x, splat(-__builtin_inff()));
    set.record = 0;
    set.seen = true;
  }
  set.zeros = 0;
  set.far_scale = -__builtin_inf();
  for (int64_t& count : set.counts) count = 0;
  for (double& sum : set.single) sum = 0;
  set.waiting = set.near_waiting = set.far_waiting = set.queued = 0;
  set.not_calm = 0;
  set_watch(work, set);
  set.touched = true;
  work.order[work.touched++] = index;
}

// The set of these slices, or null where the chunk has its share of joint sets.
inline Set* find(Workspace& work, uint64_t key) {
  int index = work.last_set;
  if (work.by_id) {
    index = (int)key;
    work.sets[index].set.key = key;
  } else if (index < 0 || work.last_key != key) {
    uint8_t& place = work.place[key * 0x9e3779b97f4a7c15 >> 56];
    index = place;
    if (index >= work.used || work.sets[index].set.key != key) {
      for (index = 0; index < work.used && work.sets[index].set.key != key;) ++index;
      place = (uint8_t)index;
    }
  }
  Set& set = work.sets[index].set;
  const bool known = work.by_id || index < work.used;
  if (!known || !set.touched) {
    const bool joint = !work.by_id && (key & (key - 1));
    if (joint && work.joint == kJointSets) return nullptr;
    work.joint += joint;
    if (!known) {
      ++work.used;
      set.key = key;
      set.load = 0;
      set.seen = false;
    }
    touch(work, index);
  }
  work.last_set = index;
  work.last_key = key;
  return &set;
}

}  // namespace
}  // namespace pyrlstats
