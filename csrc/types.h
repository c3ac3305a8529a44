// The structs that cross files: no functions, only <cstddef> and <cstdint>, so that kernel objects
// stay free of code that the linker could pick for everyone.
#pragma once
#include <cstddef>
#include <cstdint>

#include "layout.h"

namespace pyrlstats {

// Codes of element types; module.cc maps names to them.
enum Dtype : int {
  kFloat32,
  kBFloat16,
  kFloat16,
  kFloat64,
  kBool,
  kInt8,
  kUInt8,
  kInt16,
  kUInt16,
  kInt32,
  kUInt32,
  kInt64,
  kUInt64,
  kDtypes
};

// Bytes of one element.
constexpr int kItemSize[kDtypes] = {4, 2, 2, 8, 1, 1, 1, 2, 2, 4, 4, 8, 8};

// An array as the caller has it: no copy, any strides, dimensions that can be walked as one are
// one.
struct Operand {
  const char* data;
  int dtype;
  int ndim;                // 0: a single element
  const int64_t* shape;    // [ndim]
  const int64_t* strides;  // [ndim], bytes
};

// Bits of the least normal float32. The upper half of a smaller x may look like a zero's: such
// tokens are taken one at a time.
constexpr uint32_t kTiny = 0x00800000;

// n + kMagic is rounded to whole n, whose biased exponent is then in its lowest bits.
constexpr float kMagic = 0x1.8p23f + 127;
constexpr double kWideMagic = 0x1.8p52 + 1023;
// Of x - n ln 2 in float32: the first half ends in zeros, n times it is exact.
constexpr float kMinusLn2 = -0.693359375f, kMinusLn2Rest = 2.12194440e-4f;

constexpr int kMaxMasks = 63;  // masks of one pass, a bit each in a set's key: never kNone

// Everything a kernel needs to know about one call.
struct Plan {
  Operand logp, old_logp;
  const Operand* masks;  // [slices], or null
  const Operand* ids;    // or null; with neither, every token is in the only slice
  const Operand* base;   // or null
  int64_t slices;
  int mantissa_bits, min_exp, max_exp;
  float clip_low, clip_high;  // bounds on x
};

// What one chunk of tokens adds to one slice. The far weights are scaled by 2^-far_scale.
struct Moments {
  int64_t counts[layout::kCountSize];
  double sums[layout::kSumSize];
  double maxima[layout::kMaxSize];
  double far_scale;
};

constexpr int kDigits = 1 << 11;  // counts of one interval

// Tokens of one slice whose key (digits.h) lies in [low, low + width), by (key - low) >> shift,
// which is below kDigits.
struct Interval {
  int64_t slice;
  int32_t low, width;  // a width of 0 is skipped
  int shift;
};

struct Digits {
  const Interval* intervals;
  int64_t count;
  bool absolute;  // keys of |x|
};

// The groups of rows beside the core that a call asks for; bounds are on x.
struct GroupPlan {
  bool entropy, probabilities, truncation, policy_clip;
  double truncate_low, truncate_high;
  double clip_low, clip_high, clip_dual;
  const Operand* advantages;  // or null; updates and policy_clip need it
  float* updates;             // [tokens], exp(x) A; or null
  int64_t sequences;
  const int64_t* boundaries;  // [sequences + 1], ascending, within the tokens
  double* sums;               // [4][slices][sequences]: tokens, x, logp, old_logp; zeros
};

// What a chunk adds to one slice's rows. Scaled sums are kept as 2^-scale of themselves.
struct GroupRows {
  double entropy[layout::kEntropySumSize], entropy_max_x, entropy_scale;
  double probabilities[layout::kProbabilitiesSumSize];
  double probability_maxima[layout::kProbabilitiesMaxSize];
  int64_t truncation_counts[layout::kTruncationCountSize];
  double truncation[layout::kTruncationSumSize], truncation_max_x, truncation_scale;
  int64_t policy_clip_counts[layout::kPolicyClipCountSize];
};

// One instruction set's functions. A workspace is memory of `workspace_bytes`, aligned to a page,
// all zero before its first use and again after `finish`.
struct Kernels {
  size_t (*workspace_bytes)(const Plan&);
  // Tokens [begin, begin + count) into moments[slices], which it overwrites, and into the
  // workspace's histograms.
  void (*chunk)(const Plan&, void* workspace, int64_t begin, int64_t count, Moments* moments);
  // Adds the workspace's histograms to histogram[slices][2P] and zeros to n_zero[slice *
  // n_zero_stride]; clears them.
  void (*finish)(const Plan&, void* workspace, int64_t* histogram, int64_t* n_zero,
                 int64_t n_zero_stride);
  // Adds tokens [begin, begin + count) to counts[digits.count][kDigits]. Needs no workspace.
  void (*count_digits)(const Plan&, const Digits&, int64_t begin, int64_t count, int64_t* counts);
  // Adds tokens [begin, begin + count) to rows[slices] and to head[4][slices]: the sums of the
  // sequence that began before. Scratch memory of group_bytes, aligned to 64.
  void (*add_groups)(const Plan&, const GroupPlan&, void* scratch, int64_t begin, int64_t count,
                     GroupRows* rows, double* head);
  size_t group_bytes;
};

}  // namespace pyrlstats
