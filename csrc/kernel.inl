// The CPU kernels, compiled once per instruction set (CMakeLists.txt, add_isa): the ISA's vector
// type comes from its own header, the algorithm is the same.
//
//   chunk -> blocks of 8192 tokens -> x and masks staged where they must be -> groups of 64 tokens
//   of one set
//
// Tokens in groups that are not of one set are packed into their sets' buffers and worked on from
// there, so that the arithmetic only ever sees full groups of one set.
#include "digits.h"
#include "groups.h"
#include "run.h"

namespace pyrlstats {
namespace {

// Works on the full groups that wait in the set.
void spill(const Plan& plan, Workspace& work, Set& set) {
  const int groups = set.waiting / kGroup;
  run(plan, work, Staged{set.x}, 0, Run::up_to(groups), set);
  const int rest = set.waiting - groups * kGroup;
  for (int i = 0; i < rest; ++i) set.x[i] = set.x[groups * kGroup + i];
  set.waiting = rest;
}

// A token that the vector path leaves out: counted apart, or so small that only float64 holds its
// cube.
__attribute__((noinline)) void add_odd(const Plan& plan, Workspace& work, float x, Set& set) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  const uint32_t a = bits & layout::kAbsBits;
  if (a > layout::kInfBits) {
    ++set.counts[layout::kCountNNan];
  } else if (a == layout::kInfBits) {
    ++set.counts[bits >> 31 ? layout::kCountNNegInf : layout::kCountNPosInf];
  } else {
    const double v = x, k3 = 0.5 * v * v;
    set.single[layout::kSumNearX] += v;
    set.single[layout::kSumNearX2] += v * v;
    set.single[layout::kSumNearK3] += k3;
    set.single[layout::kSumNearExcess] += k3 * (2 * v + k3);
    set.single[layout::kSumAbsX] += v < 0 ? -v : v;
    set.counts[layout::kCountClipLow] += x < plan.clip_low;
    set.counts[layout::kCountClipHigh] += x > plan.clip_high;
    store(set.min_x, min(load(set.min_x), splat(x)));
    store(set.max_x, max(load(set.max_x), splat(x)));
    // its bin, straight into the slices
    work.dirty = true;
    each_slice(work, set, [&](int64_t slice) {
      ++work.slice_histogram[slice * work.bins.count() + work.bins.of(bits)];
    });
  }
}

// Tokens `members` of a group to the set's buffer.
void append(const Plan& plan, Workspace& work, const float* x, uint64_t members,
            uint64_t odd_tokens, Set& set) {
  set.counts[layout::kCountNTokens] += __builtin_popcountll(members);
  for (uint64_t rest = members & odd_tokens; rest; rest &= rest - 1) {
    add_odd(plan, work, x[__builtin_ctzll(rest)], set);
  }
  members &= ~odd_tokens;
  int waiting = set.waiting;  // in a register: stores of vectors may alias the set
#pragma GCC unroll 16
  for (int i = 0; i < kGroup; i += kLanes) {
    const uint32_t keep = (uint32_t)(members >> i) & ((1u << kLanes) - 1);
    waiting += compress_store(set.x + waiting, load(x + i), keep);
  }
  set.waiting = waiting;
  if (set.waiting >= kBuffer) spill(plan, work, set);
}

void append_key(const Plan& plan, Workspace& work, const float* x, uint64_t members,
                uint64_t odd_tokens, uint64_t key) {
  if (Set* set = find(work, key)) {
    append(plan, work, x, members, odd_tokens, *set);
    return;
  }
  for (; key; key &= key - 1) {
    append(plan, work, x, members, odd_tokens, *find(work, key & -key));
  }
}

uint64_t odd_tokens_of(const float* x) {
  uint64_t word = 0;
  for (int i = 0; i < kGroup; i += kLanes) word |= (uint64_t)mask_bits(odd(load(x + i))) << i;
  return word;
}

// Tokens [from, to) of a group without odd tokens, of one set. Copies a whole group: the rest is
// overwritten.
inline void append_run(const Plan& plan, Workspace& work, const float* x, int from, int to,
                       Set& set) {
  set.counts[layout::kCountNTokens] += to - from;
  for (int i = 0; i < kGroup; i += kLanes) store(set.x + set.waiting + i, load(x + from + i));
  set.waiting += to - from;
  if (set.waiting >= kBuffer) spill(plan, work, set);
}

// A group whose tokens belong to several sets, or with odd tokens. words[slices]: its membership. x
// has room for another group behind it.
void mixed_masks(const Plan& plan, Workspace& work, const float* x, const uint64_t* words) {
  constexpr int kManyChanges = 6;  // of membership within a group: by slice is cheaper than by run
  const uint64_t odd_tokens = odd_tokens_of(x);
  uint64_t changes = 0;  // bit t: token t is of another set than token t - 1
  for (int64_t s = 0; s < plan.slices; ++s) changes |= words[s] ^ words[s] << 1;
  changes &= ~1ull;
  if (__builtin_popcountll(changes) > kManyChanges) {
    for (int64_t s = 0; s < plan.slices; ++s) {
      if (words[s]) append(plan, work, x, words[s], odd_tokens, *find(work, 1ull << s));
    }
    return;
  }
  for (int from = 0, to; from < kGroup; from = to) {
    to = changes ? __builtin_ctzll(changes) : kGroup;
    changes &= changes - 1;
    uint64_t key = 0;
    for (int64_t s = 0; s < plan.slices; ++s) key |= (words[s] >> from & 1) << s;
    if (key == 0) continue;
    Set* const set = find(work, key);
    if (set && odd_tokens == 0) {
      append_run(plan, work, x, from, to, *set);
    } else {
      const uint64_t members = (~0ull << from) & (~0ull >> (kGroup - to));
      append_key(plan, work, x, members, odd_tokens, key);
    }
  }
}

void mixed_ids(const Plan& plan, Workspace& work, const float* x, const int32_t* ids,
               uint64_t members, Moments* moments) {
  const uint64_t odd_tokens = odd_tokens_of(x);
  while (members) {
    const int32_t id = ids[__builtin_ctzll(members)];
    const uint64_t same = members & equal64(ids, id);
    members &= ~same;
    if (id < 0) continue;
    if (id < plan.slices) {
      append(plan, work, x, same, odd_tokens, *find(work, id));
    } else {
      moments[0].counts[layout::kCountNOutOfRange] += __builtin_popcountll(same);
    }
  }
}

// Groups of one set, as far as they are regular; returns the number done.
template <typename Source>
int run_key(const Plan& plan, Workspace& work, const Source& source, int begin, const Run& how_far,
            uint64_t key) {
  Set* set = find(work, key);
  if (!set) return 0;
  const int done = run(plan, work, source, begin, how_far, *set);
  set->counts[layout::kCountNTokens] += kGroup * done;
  return done;
}

// Slice ids of a block: each group's set, or kMixed, or kNone. Returns whether any token is in any
// slice.
bool find_ids(const Plan& plan, Workspace& work, int64_t begin, int64_t count) {
  const int64_t groups = groups_of(count), slices = plan.slices;
  for (int64_t g = 0; g < groups; ++g) work.base[g] = tokens_of_group(g, count);
  if (plan.base) {
    const uint8_t* bytes = mask_bytes(*plan.base, begin, count, work.stage, work.mask_bytes);
    for (int64_t g = 0; g < groups; ++g) work.base[g] &= nonzero64(bytes + kGroup * g);
  }
  uint64_t some = 0;
  work.ids.find(*plan.ids, slices, begin, count, work.stage);
  work.ids.each_group([&](int64_t g, int32_t id) {
    const bool mixed = id == kSeveralIds || id >= slices || work.base[g] != ~0ull;
    work.keys[g] = work.base[g] == 0 ? kNone : mixed ? kMixed : id < 0 ? kNone : (uint64_t)id;
    some |= work.keys[g] ^ kNone;
  });
  return some != 0;
}

// The groups of a block, runs of one id at a time.
template <typename Source>
void walk_ids(const Plan& plan, Workspace& work, const Source& source, int64_t count,
              Moments* moments) {
  const int groups = groups_of(count);
  for (int g = 0; g < groups;) {
    const uint64_t key = work.keys[g];
    int end = g + 1;
    if (key != kMixed) {
      while (end < groups && work.keys[end] == key) ++end;
    }
    work.ids.fetch_next(g, end);
    if (key != kMixed) {
      g = key == kNone ? end : g + run_key(plan, work, source, g, Run::up_to(end), key);
      if (g == end) continue;
    }
    // not of one id, or with an odd token
    alignas(64) float x[kGroup];
    source.ordered(g).store_to(x);
    alignas(64) int32_t ids[kGroup];
    work.ids.group(g, ids);
    mixed_ids(plan, work, x, ids, work.base[g], moments);
    ++g;
  }
}

// The groups of a block, one set after the other as the masks beside the tokens tell.
template <typename Source>
void walk_masks(const Plan& plan, Workspace& work, const Source& source, int64_t count) {
  const int groups = groups_of(count), full = (int)(count / kGroup);
  Run how_far = Run::up_to(full);
  if (work.masks.masks == 1) how_far.mask = work.masks.bytes[0];
  if (work.masks.masks > 1) how_far.masks = &work.masks;
  uint64_t words[kMaxMasks];
  for (int g = 0; g < groups;) {
    const uint64_t key = work.masks.members(g, tokens_of_group(g, count), words);
    if (key == kNone) {
      while (++g < full && how_far.masks && how_far.masks->as_before(g)) {
      }
      continue;
    }
    if (key != kMixed) {
      const int done = run_key(plan, work, source, g, how_far, key);
      g += done;
      if (done > 0 && !how_far.goes_on(g)) continue;
      for (int64_t s = 0; s < plan.slices; ++s) words[s] = -(key >> s & 1);
    }
    // not of one set, or with an odd token
    alignas(64) float x[2 * kGroup];
    source.ordered(g).store_to(x);
    mixed_masks(plan, work, x, words);
    ++g;
  }
}

template <typename Source>
void walk(const Plan& plan, Workspace& work, const Source& source, int64_t count,
          Moments* moments) {
  if (plan.ids) {
    walk_ids(plan, work, source, count, moments);
  } else {
    walk_masks(plan, work, source, count);
  }
}

// Inputs that need no staging: of one type, contiguous over the block.
template <typename T>
bool walk_direct(const Plan& plan, Workspace& work, int64_t begin, int64_t count,
                 Moments* moments) {
  const char* a = in_place(plan.logp, begin, count);
  const char* b = in_place(plan.old_logp, begin, count);
  if (!a || !b || count % kGroup) return false;
  walk(plan, work, Direct<T>{(const T*)a, (const T*)b}, count, moments);
  return true;
}

void block(const Plan& plan, Workspace& work, int64_t begin, int64_t count, Moments* moments) {
  if (plan.ids) {
    if (!find_ids(plan, work, begin, count)) return;
  } else {
    work.masks.find(plan, begin, count, work.stage, work.mask_bytes);
  }
  if (plan.logp.dtype == plan.old_logp.dtype) {
    const int dtype = plan.logp.dtype;
    if (dtype == kFloat32 && walk_direct<float>(plan, work, begin, count, moments)) return;
    if (dtype == kBFloat16 && walk_direct<BFloat16>(plan, work, begin, count, moments)) return;
    if (dtype == kFloat16 && walk_direct<Float16>(plan, work, begin, count, moments)) return;
  }
  if (!plan.ids && !work.masks.any_member(count)) return;
  stage_x(plan, begin, count, work.stage);
  for (int64_t i = count; i < groups_of(count) * kGroup; ++i) work.stage.x[i] = 0;
  walk(plan, work, Staged{work.stage.x}, count, moments);
}

// Works on what still waits in a set, the last group filled with zeros: they add to no sum, but to
// the extrema and the count of zeros, which are put right again.
void finish_set(const Plan& plan, Workspace& work, Set& set) {
  if (set.waiting >= kGroup) spill(plan, work, set);
  if (set.waiting > 0) {
    Extrema extrema(set);
    for (int i = set.waiting; i < kGroup; ++i) set.x[i] = set.x[0];
    extrema.add(Staged{set.x}.group(0));
    for (int i = set.waiting; i < kGroup; ++i) set.x[i] = 0;
    run(plan, work, Staged{set.x}, 0, Run::up_to(1), set);
    set.counts[layout::kCountNZero] -= kGroup - set.waiting;
    extrema.store_to(set);
    set.waiting = 0;
  }
  finish_calm(set);
  finish_mixed(set);
  if (work.bins.narrow()) {
    finish_parted<true>(work, set);
  } else {
    finish_parted<false>(work, set);
  }
}

template <int kSize, typename T>
double total(const T (&lanes)[kSize]) {
  double sum = 0;
  for (T lane : lanes) sum += lane;
  return sum;
}

// The set's lanes summed up, in Moments.
Moments reduce(const Set& set) {
  Moments m;
  for (int i = 0; i < layout::kCountSize; ++i) m.counts[i] = set.counts[i];
  m.sums[layout::kSumNearX] = total(set.near_x);
  m.sums[layout::kSumNearX2] = total(set.near_x2);
  m.sums[layout::kSumNearExcess] = total(set.near_excess);
  m.sums[layout::kSumAbsX] = total(set.abs_x) + total(set.far_abs);
  m.sums[layout::kSumFarX] = total(set.far_x) + total(set.mixed_x);
  m.sums[layout::kSumFarX2] = total(set.far_x2) + total(set.mixed_x2);
  m.sums[layout::kSumFarK3] = total(set.far_k3);
  m.sums[layout::kSumFarW] = total(set.far_w);
  m.sums[layout::kSumFarW2] = total(set.far_w2);
  m.sums[layout::kSumNearK3] = total(set.near_k3);
  for (int i = 0; i < layout::kSumSize; ++i) m.sums[i] += set.single[i];
  m.far_scale = set.far_scale;
  m.counts[layout::kCountNZero] += set.zeros;
  m.maxima[layout::kMaxMaxX] = highest(set);
  m.maxima[layout::kMaxNegMinX] = -(double)lowest(set);
  return m;
}

void clear(Moments& m) {
  for (int64_t& v : m.counts) v = 0;
  for (double& v : m.sums) v = 0;
  for (double& v : m.maxima) v = -__builtin_inf();
  m.far_scale = -__builtin_inf();
}

void add(const Moments& from, Moments& to) {
  for (int i = 0; i < layout::kCountSize; ++i) to.counts[i] += from.counts[i];
  const double scale = from.far_scale > to.far_scale ? from.far_scale : to.far_scale;
  for (int i = 0; i < layout::kSumSize; ++i) {
    double mine = to.sums[i], theirs = from.sums[i];
    if (i == layout::kSumFarW || i == layout::kSumFarW2) {
      const double power = i == layout::kSumFarW ? 1 : 2;
      if (mine) mine *= power_of_two(power * (to.far_scale - scale));
      if (theirs) theirs *= power_of_two(power * (from.far_scale - scale));
    }
    to.sums[i] = mine + theirs;
  }
  for (int i = 0; i < layout::kMaxSize; ++i) {
    if (from.maxima[i] > to.maxima[i]) to.maxima[i] = from.maxima[i];
  }
  to.far_scale = scale;
}

void chunk(const Plan& plan, void* memory, int64_t begin, int64_t count, Moments* moments) {
  Workspace& work = open(plan, memory);
  for (int64_t s = 0; s < plan.slices; ++s) clear(moments[s]);
  if (!work.by_id && work.used + kJointSets + plan.slices > work.slots) flush_all(work);
  work.touched = work.joint = 0;
  work.last_set = -1;
  const int64_t end = begin + count;
  for (int64_t i = begin; i < end; i += kBlock) {
    block(plan, work, i, end - i < kBlock ? end - i : kBlock, moments);
  }
  for (int i = 0; i < work.touched; ++i) {
    Set& set = work.sets[work.order[i]].set;
    finish_set(plan, work, set);
    const Moments m = reduce(set);
    each_slice(work, set, [&](int64_t slice) { add(m, moments[slice]); });
    set.touched = false;
  }
}

void finish(const Plan& plan, void* memory, int64_t* histogram, int64_t* n_zero,
            int64_t n_zero_stride) {
  Workspace& work = open(plan, memory);
  work.target = histogram;
  flush_all(work);
  const int64_t bins = work.dirty ? plan.slices * work.bins.count() : 0;
  for (int64_t i = 0; i < bins; ++i) {
    histogram[i] += work.slice_histogram[i];
    work.slice_histogram[i] = 0;
  }
  work.dirty = false;
  for (int64_t s = 0; s < plan.slices; ++s) {
    n_zero[s * n_zero_stride] += work.slice_zeros[s];
    work.slice_zeros[s] = 0;
  }
}

size_t workspace_bytes(const Plan& plan) { return Sizes(plan).total; }

}  // namespace

namespace ISA {
extern const Kernels kKernels;
const Kernels kKernels = {workspace_bytes, chunk,      finish,
                          count_digits,    add_groups, sizeof(GroupStage)};
}  // namespace ISA

}  // namespace pyrlstats
