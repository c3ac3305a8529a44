// AVX2, FMA, F16C.
#pragma once
#include <immintrin.h>

namespace pyrlstats {
namespace {

constexpr int kLanes = 8;

typedef __m256 F;
typedef __m256d D;
typedef __m256i H;
typedef __m256 M;  // a lane is all ones or all zeros
typedef H Z;       // the same of H

// --- float32 lanes
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F v) { _mm256_storeu_ps(p, v); }
inline F splat(float v) { return _mm256_set1_ps(v); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F abs(F v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }
// 2^n from t = n + kMagic, n in [-126, 127]
inline F power_from_magic(F t) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(t), 23));
}

// --- lane masks
inline M less(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline M at_least(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
inline F keep_where(M m, F v) { return _mm256_and_ps(m, v); }
// sum + v, sum + a b where m, else the sum
inline F add_where(M m, F v, F sum) { return sum + keep_where(m, v); }
inline F fma_where(M m, F a, F b, F sum) { return fma(keep_where(m, a), b, sum); }
inline uint32_t mask_bits(M m) { return (uint32_t)_mm256_movemask_ps(m); }
// x that is not finite, or not zero and below kTiny
inline M odd(F x) {
  const __m256i a = _mm256_castps_si256(abs(x));
  const __m256i special = _mm256_cmpgt_epi32(a, _mm256_set1_epi32(0x7f7fffff));
  const __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)kTiny), a);
  const __m256i some = _mm256_cmpgt_epi32(a, _mm256_setzero_si256());
  return _mm256_castsi256_ps(_mm256_or_si256(special, _mm256_and_si256(small, some)));
}

inline M subnormal(F x) {
  const __m256i a = _mm256_castps_si256(abs(x));
  const __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x800000), a);
  return _mm256_castsi256_ps(
      _mm256_and_si256(small, _mm256_cmpgt_epi32(a, _mm256_setzero_si256())));
}

// Lane numbers that pack the set bits of a byte to the front.
struct PackTable {
  alignas(8) uint8_t lanes[256][8];
  constexpr PackTable() : lanes() {
    for (int keep = 0; keep < 256; ++keep) {
      int n = 0;
      for (int i = 0; i < 8; ++i) {
        if (keep >> i & 1) lanes[keep][n++] = (uint8_t)i;
      }
    }
  }
};
constexpr PackTable kPack;

// The lanes of `keep`, packed, to p[0 ..]; may write up to kLanes floats. Returns their number.
inline int compress_store(float* p, F x, uint32_t keep) {
  const __m256i lanes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)kPack.lanes[keep]));
  store(p, _mm256_permutevar8x32_ps(x, lanes));
  return _mm_popcnt_u32(keep);
}

// --- float64 lanes, half as many
inline D load(const double* p) { return _mm256_loadu_pd(p); }
inline void store(double* p, D v) { _mm256_storeu_pd(p, v); }
inline D splat(double v) { return _mm256_set1_pd(v); }
inline D low_half(F v) { return _mm256_cvtps_pd(_mm256_castps256_ps128(v)); }
inline D high_half(F v) { return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)); }
// kLanes / 2 floats at p
inline D widen(const float* p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
inline D fma(D a, D b, D c) { return _mm256_fmadd_pd(a, b, c); }
inline D abs(D v) { return _mm256_andnot_pd(_mm256_set1_pd(-0.0), v); }
inline D max(D a, D b) { return _mm256_max_pd(a, b); }
inline D keep_where(D v, D mask) { return _mm256_and_pd(v, mask); }
inline D keep_at_least(D v, D a, D b) { return _mm256_and_pd(v, _mm256_cmp_pd(a, b, _CMP_GE_OQ)); }
// 2^n from t = n + kWideMagic, n in [-1022, 1023]
inline D power_from_magic(D t) {
  return _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_castpd_si256(t), 52));
}

// --- uint16 lanes, twice as many
inline H load(const uint16_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline H load(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void store(uint16_t* p, H v) { _mm256_storeu_si256((__m256i*)p, v); }
inline H splat(uint16_t v) { return _mm256_set1_epi16((short)v); }
// The upper halves of the lanes of both, in an order of its own
inline H top_halves(F a, F b) {
  const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(a), 16);
  return _mm256_blend_epi16(low, _mm256_castps_si256(b), 0xaa);
}
inline H min(H a, H b) { return _mm256_min_epu16(a, b); }
inline H max(H a, H b) { return _mm256_max_epu16(a, b); }
inline H shift_right(H a, int count) { return _mm256_srl_epi16(a, _mm_cvtsi32_si128(count)); }
inline Z is_zero(H a) { return _mm256_cmpeq_epi16(a, _mm256_setzero_si256()); }
inline H select(Z m, H then, H other) { return _mm256_blendv_epi8(other, then, m); }
// min(a, b), b where m
inline H min_except(Z m, H a, H b) { return min(_mm256_or_si256(a, m), b); }
inline bool any_at_least(H a, H b) {
  return _mm256_movemask_epi8(_mm256_cmpeq_epi16(_mm256_max_epu16(a, b), a)) != 0;
}

// --- 64 tokens at once
inline uint64_t nonzero64(const uint8_t* p) {
  const __m256i zero = _mm256_setzero_si256();
  const __m256i a = _mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i*)p), zero);
  const __m256i b = _mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i*)(p + 32)), zero);
  return ~((uint64_t)(uint32_t)_mm256_movemask_epi8(b) << 32 | (uint32_t)_mm256_movemask_epi8(a));
}
inline uint64_t equal64(const int32_t* p, int32_t value) {
  const __m256i v = _mm256_set1_epi32(value);
  uint64_t word = 0;
  for (int i = 0; i < 8; ++i) {
    const __m256i same = _mm256_cmpeq_epi32(_mm256_loadu_si256((const __m256i*)(p + 8 * i)), v);
    word |= (uint64_t)(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(same)) << (8 * i);
  }
  return word;
}

// --- widening loads
inline F load_bf16(const uint16_t* p) {
  const __m256i v = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
}
// 2 * kLanes of them in an order of its own, the same for every call: cheaper by half
inline void load_bf16_pair(const uint16_t* p, F& a, F& b) {
  const __m256i v = _mm256_loadu_si256((const __m256i*)p);
  a = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
  b = _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32((int)0xffff0000)));
}
inline F load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }

}  // namespace
}  // namespace pyrlstats
