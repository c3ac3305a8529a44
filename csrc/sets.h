// A set is a group of slices that tokens share: everything is accumulated per set, and a slice is the sum of
// the sets that contain it. The workspace holds the sets of one thread.
#pragma once

namespace pyrlstats {
namespace {

constexpr int kHalf = kLanes / 2;  // float64 lanes of a vector
constexpr int kBuffer = 512;       // tokens collected before they are worked on together
constexpr int kJointSets = 16;     // sets of more than one slice in a chunk; beyond, slice by slice (L2 footprint)
constexpr uint32_t kMaxLoad = 65535;  // a 16-bit counter

// What a chunk adds to a set, in lanes; buffers of tokens waiting for their set.
struct alignas(64) Set {
  double near_x[kHalf], near_x2[kHalf], near_c[kHalf], near_excess[kHalf], abs_x[kHalf];
  double far_x[kHalf], far_x2[kHalf], far_k3[kHalf], far_w[kHalf], far_w2[kHalf];
  float min_x[kLanes], max_x[kLanes];
  double far_scale;  // k of the far weights; -inf while there are none
  int64_t counts[layout::kCountSize];
  double single[layout::kSumSize];  // tokens taken one at a time
  uint64_t key;                     // slices: bit s, or the slice itself where ids are given
  uint32_t load;                    // tokens in the 16-bit histogram
  int waiting, far_waiting;
  bool touched;
  uint16_t* histogram;  // narrow bins
  int64_t* wide;        // else the histogram of 64-bit counters
  alignas(64) float x[kBuffer + 64 + kLanes];
  alignas(64) float far[kBuffer + 64 + kLanes];
};

// Histogram indices of the last group, counted while the next group is worked on.
struct Pending {
  alignas(64) uint16_t index[2][64];
  int current;
  uint16_t* histogram;
};

struct Workspace {
  // derived from the plan by `open`
  Bins bins;
  NarrowBins narrow;
  bool by_id;
  int slots;         // of sets
  int64_t histogram_size;  // counters of one set
  Set* sets;
  int32_t* order;    // sets in the order in which this chunk met them: sums never depend on the thread's past
  int touched, joint;
  int used;          // keys in the table (masks)
  uint64_t last_key;
  int last_set;
  uint64_t* words;   // [kBlock / 64][slices]: membership of a block
  uint64_t* base;    // [kBlock / 64]
  int64_t* slice_histogram;  // [slices][histogram_size]
  uint16_t* trash;
  Pending pending;
  Stage stage;
};

inline size_t page(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

struct Sizes {
  int slots;
  int64_t histogram_size;
  size_t sets, order, words, slice_histogram, histograms, total;
  explicit Sizes(const Plan& plan) {
    const Bins bins(plan);
    slots = (int)(plan.ids ? plan.slices : 2 * (plan.slices + kJointSets));
    histogram_size = bins.count() + 64;
    sets = page(sizeof(Workspace));
    order = sets + page(sizeof(Set) * slots);
    words = order + page(sizeof(int32_t) * slots);
    slice_histogram = words + page(sizeof(uint64_t) * (kBlock / 64) * (plan.slices + 1));
    histograms = slice_histogram + page(sizeof(int64_t) * histogram_size * plan.slices);
    const size_t counter = bins.narrow() ? sizeof(uint16_t) : sizeof(int64_t);
    total = histograms + page(counter * histogram_size) * (slots + 1);
  }
};

inline Workspace& open(const Plan& plan, void* memory) {
  const Sizes sizes(plan);
  char* base = (char*)memory;
  Workspace& work = *(Workspace*)base;
  work.bins = Bins(plan);
  work.narrow = NarrowBins(work.bins);
  work.by_id = plan.ids != nullptr;
  work.slots = sizes.slots;
  work.histogram_size = sizes.histogram_size;
  work.sets = (Set*)(base + sizes.sets);
  work.order = (int32_t*)(base + sizes.order);
  work.words = (uint64_t*)(base + sizes.words);
  work.base = work.words + plan.slices * (kBlock / 64);
  work.slice_histogram = (int64_t*)(base + sizes.slice_histogram);
  const size_t counter = work.bins.narrow() ? sizeof(uint16_t) : sizeof(int64_t);
  const size_t stride = page(counter * sizes.histogram_size);
  for (int i = 0; i < work.slots; ++i) {
    char* histogram = base + sizes.histograms + stride * i;
    work.sets[i].histogram = (uint16_t*)histogram;
    work.sets[i].wide = (int64_t*)histogram;
  }
  work.trash = (uint16_t*)(base + sizes.histograms + stride * work.slots);
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

template <int kBegin, int kCount>
inline void drain(const uint16_t* index, uint16_t* histogram) {
#pragma GCC unroll 64
  for (int i = kBegin; i < kBegin + kCount; i += 4) {
    uint64_t four;
    __builtin_memcpy(&four, index + i, 8);
    ++histogram[four & 0xffff];
    ++histogram[four >> 16 & 0xffff];
    ++histogram[four >> 32 & 0xffff];
    ++histogram[four >> 48];
  }
}

// Count what is pending, now.
inline void settle(Workspace& work) {
  Pending& pending = work.pending;
  if (pending.histogram == work.trash) return;
  drain<0, 64>(pending.index[pending.current], pending.histogram);
  pending.histogram = work.trash;
}

// A set's histogram into its slices'; clears it.
void flush(Workspace& work, Set& set) {
  settle(work);
  constexpr int kSkip = 32;  // all-zero stretches are the rule
  for (int64_t i = 0; i < work.histogram_size; i += kSkip) {
    uint64_t some = 0;
    if (work.bins.narrow()) {
      const uint64_t* p = (const uint64_t*)(set.histogram + i);
      for (int j = 0; j < kSkip / 4; ++j) some |= p[j];
      if (!some) continue;
      each_slice(work, set, [&](int64_t slice) {
        int64_t* to = work.slice_histogram + slice * work.histogram_size + i;
        for (int j = 0; j < kSkip; ++j) to[j] += set.histogram[i + j];
      });
      for (int j = 0; j < kSkip; ++j) set.histogram[i + j] = 0;
    } else {
      int64_t* from = set.wide + i;
      for (int j = 0; j < kSkip; ++j) some |= from[j];
      if (!some) continue;
      each_slice(work, set, [&](int64_t slice) {
        int64_t* to = work.slice_histogram + slice * work.histogram_size + i;
        for (int j = 0; j < kSkip; ++j) to[j] += from[j];
      });
      for (int j = 0; j < kSkip; ++j) from[j] = 0;
    }
  }
  set.load = 0;
}

void flush_all(Workspace& work) {
  const int used = work.by_id ? work.slots : work.used;
  for (int i = 0; i < used; ++i) {
    if (work.sets[i].load) flush(work, work.sets[i]);
  }
  work.used = 0;
  work.last_set = -1;
}

// First meeting of a set in this chunk.
void touch(Workspace& work, int index) {
  Set& set = work.sets[index];
  const D none = splat(0.0);
  double* const sums[] = {set.near_x, set.near_x2, set.near_c, set.near_excess, set.abs_x,
                          set.far_x,  set.far_x2,  set.far_k3, set.far_w,       set.far_w2};
  for (double* sum : sums) store(sum, none);
  store(set.min_x, splat(__builtin_inff()));
  store(set.max_x, splat(-__builtin_inff()));
  set.far_scale = -__builtin_inf();
  for (int64_t& count : set.counts) count = 0;
  for (double& sum : set.single) sum = 0;
  set.waiting = set.far_waiting = 0;
  set.touched = true;
  work.order[work.touched++] = index;
}

// The set of these slices, or null where the chunk has its share of joint sets.
inline Set* find(Workspace& work, uint64_t key) {
  int index = work.last_set;
  if (work.by_id) {
    index = (int)key;
    work.sets[index].key = key;
  } else if (index < 0 || work.last_key != key) {
    for (index = 0; index < work.used && work.sets[index].key != key;) ++index;
  }
  Set& set = work.sets[index];
  const bool known = work.by_id || index < work.used;
  if (!known || !set.touched) {
    const bool joint = !work.by_id && (key & (key - 1));
    if (joint && work.joint == kJointSets) return nullptr;
    work.joint += joint;
    if (!known) {
      ++work.used;
      set.key = key;
      set.load = 0;
    }
    touch(work, index);
  }
  work.last_set = index;
  work.last_key = key;
  return &set;
}

}  // namespace
}  // namespace pyrlstats
