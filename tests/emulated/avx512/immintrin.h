// AVX-512's intrinsics on a machine without AVX-512: SIMDe's, and what 0.8.2 lacks or does
// otherwise.
#pragma once
#include_next <immintrin.h>
#define SIMDE_ENABLE_NATIVE_ALIASES
#define __mmask64 __mmask64  // (the compiler's own: Clang's is another type than SIMDe's)
#include <simde/x86/avx512.h>
#undef __mmask64

namespace emulated {

// (SIMDe's keep the sign of a zero and of a NaN)
static inline __m512i without(__m512i v, __m512i bits) { return simde_mm512_andnot_si512(bits, v); }
static inline __m512 abs(__m512 v) {
  const __m512i sign = simde_mm512_set1_epi32(1u << 31);
  return simde_mm512_castsi512_ps(without(simde_mm512_castps_si512(v), sign));
}
static inline __m512d abs(__m512d v) {
  const __m512i sign = simde_mm512_set1_epi64(1ull << 63);
  return simde_mm512_castsi512_pd(without(simde_mm512_castpd_si512(v), sign));
}
static inline __m512 mask3_fma(__m512 a, __m512 b, __m512 c, __mmask16 m) {
  return simde_mm512_mask_mov_ps(c, m, simde_mm512_fmadd_ps(a, b, c));
}
static inline __m512d widened(__m256 v) {
  simde__m512d_private wide;
  wide.m256d[0] = _mm256_cvtps_pd(_mm256_castps256_ps128(v));
  wide.m256d[1] = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
  return simde__m512d_from_private(wide);
}
static inline __mmask32 common_bits_none(__m512i a, __m512i b) {
  const __m512i both = simde_mm512_and_si512(a, b);
  return simde_mm512_cmpeq_epu16_mask(both, simde_mm512_setzero_si512());
}
template <int kKind>
static inline __mmask16 is_of(__m512 v) {
  static_assert(kKind == 0x20, "subnormal ones");
  const __m512i bits = simde_mm512_castps_si512(abs(v));
  return simde_mm512_cmpgt_epi32_mask(bits, simde_mm512_setzero_si512()) &
         simde_mm512_cmpgt_epi32_mask(simde_mm512_set1_epi32(0x800000), bits);
}

}  // namespace emulated

#undef _mm512_abs_ps
#undef _mm512_abs_pd
#undef _mm512_mask3_fmadd_ps
#undef _mm512_cvtps_pd
#undef _mm512_testn_epi16_mask
#undef _mm512_fpclass_ps_mask
#define _mm512_abs_ps(v) emulated::abs(v)
#define _mm512_abs_pd(v) emulated::abs(v)
#define _mm512_mask3_fmadd_ps(a, b, c, m) emulated::mask3_fma(a, b, c, m)
#define _mm512_cvtps_pd(v) emulated::widened(v)
#define _mm512_testn_epi16_mask(a, b) emulated::common_bits_none(a, b)
#define _mm512_fpclass_ps_mask(v, kind) emulated::is_of<kind>(v)
