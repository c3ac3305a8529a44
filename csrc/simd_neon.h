// NEON of arm64.
#pragma once
#include <arm_neon.h>

namespace pyrlstats {
namespace {

constexpr int kLanes = 4;

typedef float32x4_t F;
typedef float64x2_t D;
typedef uint16x8_t H;
typedef uint32x4_t M;  // a lane is all ones or all zeros
typedef H Z;           // the same of H

// --- float32 lanes
inline F load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, F v) { vst1q_f32(p, v); }
inline F splat(float v) { return vdupq_n_f32(v); }
inline F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
inline F min(F a, F b) { return vminq_f32(a, b); }
inline F max(F a, F b) { return vmaxq_f32(a, b); }
inline F abs(F v) { return vabsq_f32(v); }
// 2^n from t = n + kMagic, n in [-126, 127]
inline F power_from_magic(F t) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vreinterpretq_s32_f32(t), 23));
}

// --- lane masks
inline M less(F a, F b) { return vcltq_f32(a, b); }
inline M at_least(F a, F b) { return vcgeq_f32(a, b); }
inline F keep_where(M m, F v) {
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(v), m));
}
// sum + v, sum + a b where m, else the sum
inline F add_where(M m, F v, F sum) { return sum + keep_where(m, v); }
inline F fma_where(M m, F a, F b, F sum) { return fma(keep_where(m, a), b, sum); }
inline uint32_t mask_bits(M m) {
  const uint32_t bits[4] = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(m, vld1q_u32(bits)));
}
// x that is not finite, or not zero and below kTiny
inline M odd(F x) {
  const uint32x4_t a = vreinterpretq_u32_f32(abs(x));
  const uint32x4_t from = vsubq_u32(a, vdupq_n_u32(kTiny));
  return vandq_u32(vcgeq_u32(from, vdupq_n_u32(layout::kInfBits - kTiny)), vtstq_u32(a, a));
}
inline M subnormal(F x) {
  const uint32x4_t a = vreinterpretq_u32_f32(abs(x));
  return vandq_u32(vcltq_u32(a, vdupq_n_u32(0x800000)), vtstq_u32(a, a));
}

// Bytes that pack the set lanes of four to the front.
struct PackTable {
  alignas(16) uint8_t bytes[16][16];
  constexpr PackTable() : bytes() {
    for (int keep = 0; keep < 16; ++keep) {
      int n = 0;
      for (int i = 0; i < 4; ++i) {
        if (!(keep >> i & 1)) continue;
        for (int b = 0; b < 4; ++b) bytes[keep][n++] = (uint8_t)(4 * i + b);
      }
    }
  }
};
constexpr PackTable kPack;

// The lanes of `keep`, packed, to p[0 ..]; may write up to kLanes floats. Returns their number.
inline int compress_store(float* p, F x, uint32_t keep) {
  const uint8x16_t packed = vqtbl1q_u8(vreinterpretq_u8_f32(x), vld1q_u8(kPack.bytes[keep]));
  store(p, vreinterpretq_f32_u8(packed));
  return __builtin_popcount(keep);
}

// --- float64 lanes, half as many
inline D load(const double* p) { return vld1q_f64(p); }
inline void store(double* p, D v) { vst1q_f64(p, v); }
inline D splat(double v) { return vdupq_n_f64(v); }
inline D low_half(F v) { return vcvt_f64_f32(vget_low_f32(v)); }
inline D high_half(F v) { return vcvt_high_f64_f32(v); }
// kLanes / 2 floats at p
inline D widen(const float* p) { return vcvt_f64_f32(vld1_f32(p)); }
inline D fma(D a, D b, D c) { return vfmaq_f64(c, a, b); }
inline D abs(D v) { return vabsq_f64(v); }
inline D max(D a, D b) { return vmaxq_f64(a, b); }
inline D keep_where(D v, D mask) {
  return vreinterpretq_f64_u64(vandq_u64(vreinterpretq_u64_f64(v), vreinterpretq_u64_f64(mask)));
}
inline D keep_at_least(D v, D a, D b) {
  return vreinterpretq_f64_u64(vandq_u64(vreinterpretq_u64_f64(v), vcgeq_f64(a, b)));
}
// 2^n from t = n + kWideMagic, n in [-1022, 1023]
inline D power_from_magic(D t) {
  return vreinterpretq_f64_s64(vshlq_n_s64(vreinterpretq_s64_f64(t), 52));
}

// --- uint16 lanes, twice as many
inline H load(const uint16_t* p) { return vld1q_u16(p); }
inline H load(const uint8_t* p) { return vreinterpretq_u16_u8(vld1q_u8(p)); }
inline void store(uint16_t* p, H v) { vst1q_u16(p, v); }
inline H splat(uint16_t v) { return vdupq_n_u16(v); }
// The upper halves of the lanes of both
inline H top_halves(F a, F b) {
  return vuzp2q_u16(vreinterpretq_u16_f32(a), vreinterpretq_u16_f32(b));
}
inline H min(H a, H b) { return vminq_u16(a, b); }
inline H max(H a, H b) { return vmaxq_u16(a, b); }
inline H shift_right(H a, int count) { return vshlq_u16(a, vdupq_n_s16((int16_t)-count)); }
inline Z is_zero(H a) { return vceqzq_u16(a); }
inline H select(Z m, H then, H other) { return vbslq_u16(m, then, other); }
// min(a, b), b where m
inline H min_except(Z m, H a, H b) { return min(vorrq_u16(a, m), b); }
inline bool any(Z m) { return vmaxvq_u16(m) != 0; }
inline bool any_at_least(H a, H b) { return any(vcgeq_u16(a, b)); }

// --- 64 tokens at once
inline uint64_t nonzero64(const uint8_t* p) {
  const uint8x16_t bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  uint8x16_t v[4];
  for (int i = 0; i < 4; ++i) {
    const uint8x16_t bytes = vld1q_u8(p + 16 * i);
    v[i] = vandq_u8(vtstq_u8(bytes, bytes), bit);
  }
  const uint8x16_t sums = vpaddq_u8(vpaddq_u8(v[0], v[1]), vpaddq_u8(v[2], v[3]));
  return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(sums, sums)), 0);
}
inline uint64_t equal64(const int32_t* p, int32_t value) {
  const int32x4_t v = vdupq_n_s32(value);
  uint64_t word = 0;
  for (int i = 0; i < 64; i += 4) word |= (uint64_t)mask_bits(vceqq_s32(vld1q_s32(p + i), v)) << i;
  return word;
}

// --- widening loads
inline F load_bf16(const uint16_t* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
// 2 * kLanes of them in an order of its own, the same for every call: cheaper by half
inline void load_bf16_pair(const uint16_t* p, F& a, F& b) {
  const uint32x4_t v = vreinterpretq_u32_u16(vld1q_u16(p));
  a = vreinterpretq_f32_u32(vshlq_n_u32(v, 16));
  b = vreinterpretq_f32_u32(vandq_u32(v, vdupq_n_u32(0xffff0000)));
}
inline F load_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }

}  // namespace
}  // namespace pyrlstats
