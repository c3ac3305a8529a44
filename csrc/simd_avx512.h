// AVX-512 F, BW, DQ, VL.
#pragma once
#include <immintrin.h>

namespace pyrlstats {
namespace {

constexpr int kLanes = 16;

typedef __m512 F;
typedef __m512d D;
typedef __m512i H;
typedef __mmask16 M;
typedef __mmask32 Z;  // lanes of H

// --- float32 lanes
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F v) { _mm512_storeu_ps(p, v); }
inline F splat(float v) { return _mm512_set1_ps(v); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F abs(F v) { return _mm512_abs_ps(v); }
// 2^n from t = n + kMagic, n in [-126, 127]
inline F power_from_magic(F t) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(t), 23));
}

// --- lane masks
inline M less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline M at_least(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline F keep_where(M m, F v) { return _mm512_maskz_mov_ps(m, v); }
// sum + v, sum + a b where m, else the sum
// (GCC copies the sum before an addition by mask)
inline F add_where(M m, F v, F sum) { return _mm512_mask3_fmadd_ps(v, splat(1.0f), sum, m); }
inline F fma_where(M m, F a, F b, F sum) { return _mm512_mask3_fmadd_ps(a, b, sum, m); }
inline uint32_t mask_bits(M m) { return m; }
// x that is not finite, or not zero and below kTiny
inline M odd(F x) {
  const __m512i a = _mm512_castps_si512(abs(x));
  const __m512i from = _mm512_sub_epi32(a, _mm512_set1_epi32((int)kTiny));
  return _mm512_cmpge_epu32_mask(from, _mm512_set1_epi32((int)(layout::kInfBits - kTiny))) &
         _mm512_test_epi32_mask(a, a);
}

inline M subnormal(F x) { return _mm512_fpclass_ps_mask(x, 0x20); }

// The lanes of `keep`, packed, to p[0 ..]; may write up to kLanes floats. Returns their number.
// (In a register first: vcompressps to memory is microcode on Zen 4.)
inline int compress_store(float* p, F x, uint32_t keep) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps((M)keep, x));
  return _mm_popcnt_u32(keep);
}

// --- float64 lanes, half as many
inline D load(const double* p) { return _mm512_loadu_pd(p); }
inline void store(double* p, D v) { _mm512_storeu_pd(p, v); }
inline D splat(double v) { return _mm512_set1_pd(v); }
inline D low_half(F v) { return _mm512_cvtps_pd(_mm512_castps512_ps256(v)); }
inline D high_half(F v) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)); }
// kLanes / 2 floats at p: one instruction less than from a register
inline D widen(const float* p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
inline D fma(D a, D b, D c) { return _mm512_fmadd_pd(a, b, c); }
inline D abs(D v) { return _mm512_abs_pd(v); }
inline D max(D a, D b) { return _mm512_max_pd(a, b); }
inline D keep_where(D v, D mask) { return _mm512_and_pd(v, mask); }
inline D keep_at_least(D v, D a, D b) {
  return _mm512_maskz_mov_pd(_mm512_cmp_pd_mask(a, b, _CMP_GE_OQ), v);
}
// 2^n from t = n + kWideMagic, n in [-1022, 1023]
inline D power_from_magic(D t) {
  return _mm512_castsi512_pd(_mm512_slli_epi64(_mm512_castpd_si512(t), 52));
}

// --- uint16 lanes, twice as many
inline H load(const uint16_t* p) { return _mm512_loadu_si512(p); }
inline H load(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store(uint16_t* p, H v) { _mm512_storeu_si512(p, v); }
inline H splat(uint16_t v) { return _mm512_set1_epi16((short)v); }
// The upper halves of the lanes of both, in an order of its own
inline H top_halves(F a, F b) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(a), 16);
  // (into the operand that nobody needs any more: no copy)
  return _mm512_ternarylogic_epi32(low, _mm512_castps_si512(b), _mm512_set1_epi32((int)0xffff0000),
                                   0xD8);
}
inline H min(H a, H b) { return _mm512_min_epu16(a, b); }
inline H max(H a, H b) { return _mm512_max_epu16(a, b); }
// (by as many in every lane: one micro-operation on Intel, where a shift by a register is two)
inline H shift_right(H a, int count) { return _mm512_srlv_epi16(a, splat((uint16_t)count)); }
inline Z is_zero(H a) { return _mm512_testn_epi16_mask(a, a); }
inline H select(Z m, H then, H other) { return _mm512_mask_mov_epi16(other, m, then); }
// min(a, b), b where m
inline H min_except(Z m, H a, H b) { return _mm512_mask_min_epu16(b, (Z)~m, a, b); }
inline bool any_at_least(H a, H b) { return _mm512_cmpge_epu16_mask(a, b) != 0; }

// --- 64 tokens at once
inline uint64_t nonzero64(const uint8_t* p) {
  const __m512i v = _mm512_loadu_si512(p);
  return _mm512_test_epi8_mask(v, v);
}
inline uint64_t equal64(const int32_t* p, int32_t value) {
  const __m512i v = _mm512_set1_epi32(value);
  uint64_t word = 0;
  for (int i = 0; i < 4; ++i) {
    word |= (uint64_t)_mm512_cmpeq_epi32_mask(_mm512_loadu_si512(p + 16 * i), v) << (16 * i);
  }
  return word;
}

// --- widening loads
inline F load_bf16(const uint16_t* p) {
  const __m512i v = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
}
// 2 * kLanes of them in an order of its own, the same for every call: cheaper by half
inline void load_bf16_pair(const uint16_t* p, F& a, F& b) {
  const __m512i v = _mm512_loadu_si512(p);
  a = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
  b = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000)));
}
inline F load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}

}  // namespace
}  // namespace pyrlstats
