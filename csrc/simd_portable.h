// Vectors of 16 bytes through the compiler's own vector types: any machine GCC or clang knows.
#pragma once

namespace pyrlstats {
namespace {

constexpr int kLanes = 4;

typedef float F __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
typedef double D __attribute__((vector_size(16)));
typedef int64_t L __attribute__((vector_size(16)));
typedef uint16_t H __attribute__((vector_size(16)));
typedef I M;  // a lane is all ones or all zeros
typedef H Z;  // the same of H

// --- float32 lanes
inline F load(const float* p) {
  F v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, F v) { __builtin_memcpy(p, &v, sizeof v); }
inline F splat(float v) { return F{v, v, v, v}; }
inline F fma(F a, F b, F c) { return a * b + c; }
inline F min(F a, F b) { return (F)(((I)a & (a < b)) | ((I)b & ~(a < b))); }
inline F max(F a, F b) { return (F)(((I)a & (a > b)) | ((I)b & ~(a > b))); }
inline F abs(F v) { return (F)((I)v & 0x7fffffff); }
// 2^n from t = n + kMagic, n in [-126, 127]
inline F power_from_magic(F t) { return (F)((I)t << 23); }

// --- lane masks
inline M less(F a, F b) { return a < b; }
inline M at_least(F a, F b) { return a >= b; }
inline F keep_where(M m, F v) { return (F)((I)v & m); }
// sum + v, sum + a b where m, else the sum
inline F add_where(M m, F v, F sum) { return sum + keep_where(m, v); }
inline F fma_where(M m, F a, F b, F sum) { return fma(keep_where(m, a), b, sum); }
inline uint32_t mask_bits(M m) { return (m[0] & 1) | (m[1] & 2) | (m[2] & 4) | (m[3] & 8); }
// x that is not finite, or not zero and below kTiny
inline M odd(F x) {
  const I a = (I)x & 0x7fffffff;
  return (a > 0x7f7fffff) | ((a < (int32_t)kTiny) & (a > 0));
}

inline M subnormal(F x) {
  const I a = (I)x & 0x7fffffff;
  return (a < 0x800000) & (a > 0);
}

// The lanes of `keep`, packed, to p[0 ..]; may write up to kLanes floats. Returns their number.
inline int compress_store(float* p, F x, uint32_t keep) {
  int n = 0;
  for (int i = 0; i < kLanes; ++i) {
    p[n] = x[i];
    n += keep >> i & 1;
  }
  return n;
}

// --- float64 lanes, half as many
inline D load(const double* p) {
  D v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline void store(double* p, D v) { __builtin_memcpy(p, &v, sizeof v); }
inline D splat(double v) { return D{v, v}; }
inline D low_half(F v) { return D{v[0], v[1]}; }
inline D high_half(F v) { return D{v[2], v[3]}; }
// kLanes / 2 floats at p
inline D widen(const float* p) { return D{p[0], p[1]}; }
inline D fma(D a, D b, D c) { return a * b + c; }
inline D abs(D v) { return (D)((L)v & 0x7fffffffffffffff); }
inline D keep_where(D v, D mask) { return (D)((L)v & (L)mask); }
inline D keep_at_least(D v, D a, D b) { return (D)((L)v & (L)(a >= b)); }
inline D max(D a, D b) { return (D)(((L)a & (L)(a > b)) | ((L)b & ~(L)(a > b))); }
// 2^n from t = n + kWideMagic, n in [-1022, 1023]
inline D power_from_magic(D t) { return (D)((L)t << 52); }

// --- uint16 lanes, twice as many
inline H load(const uint8_t* p) {
  H v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline H load(const uint16_t* p) { return load((const uint8_t*)p); }
inline void store(uint16_t* p, H v) { __builtin_memcpy(p, &v, sizeof v); }
inline H splat(uint16_t v) { return H{v, v, v, v, v, v, v, v}; }
// The upper halves of the lanes of both, in an order of its own
inline H top_halves(F a, F b) {
  const I high = (I)b & (int32_t)0xffff0000;
  typedef uint32_t U __attribute__((vector_size(16)));
  return (H)((U)high | ((U)a >> 16));
}
inline H min(H a, H b) { return (a & (H)(a < b)) | (b & ~(H)(a < b)); }
inline H max(H a, H b) { return (a & (H)(a > b)) | (b & ~(H)(a > b)); }
inline H shift_right(H a, int count) { return a >> (uint16_t)count; }
inline Z is_zero(H a) { return (Z)(a == 0); }
inline H select(Z m, H then, H other) { return (then & m) | (other & ~m); }
// min(a, b), b where m
inline H min_except(Z m, H a, H b) { return min(a | m, b); }
inline bool any(Z m) { return (((L)m)[0] | ((L)m)[1]) != 0; }
inline bool any_at_least(H a, H b) { return any((Z)(a >= b)); }

// --- 64 tokens at once
inline uint64_t nonzero64(const uint8_t* p) {
  uint64_t word = 0;
  for (int i = 0; i < 8; ++i) {
    uint64_t v;
    __builtin_memcpy(&v, p + 8 * i, 8);
    v |= (v & 0x7f7f7f7f7f7f7f7f) + 0x7f7f7f7f7f7f7f7f;  // the top bit of a byte: is it non-zero
    v = (v >> 7) & 0x0101010101010101;
    word |= (v * 0x0102040810204080 >> 56) << (8 * i);
  }
  return word;
}
inline uint64_t equal64(const int32_t* p, int32_t value) {
  uint64_t word = 0;
  for (int i = 0; i < 64; ++i) word |= (uint64_t)(p[i] == value) << i;
  return word;
}

// --- widening loads
inline F load_bf16(const uint16_t* p) {
  I v = {p[0], p[1], p[2], p[3]};
  return (F)(v << 16);
}
// 2 * kLanes of them in an order of its own, the same for every call: cheaper by half
inline void load_bf16_pair(const uint16_t* p, F& a, F& b) {
  I v;
  __builtin_memcpy(&v, p, sizeof v);
  a = (F)(v << 16);
  b = (F)(v & (int32_t)0xffff0000);
}
inline F load_f16(const uint16_t* p) {
  const I v = {p[0], p[1], p[2], p[3]};
  const F magnitude = (F)((v & 0x7fff) << 13) * splat(0x1p112f);  // exact, subnormals too
  const I special = ((v & 0x7fff) > 0x7bff) & 0x7f800000;
  return (F)((I)magnitude | special | ((v & 0x8000) << 16));
}

}  // namespace
}  // namespace pyrlstats
