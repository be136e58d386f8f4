// A vector of floats of the instruction set that this file is compiled for, and the few operations that the kernels need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace crossfill {

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

#if defined(__AVX512F__)

constexpr int kWidth = 16;
struct Vec { __m512 v; };

inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// NaN in `b` passes.
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
// a where x >= y, else 0; a NaN in x passes.
inline Vec where_not_less(Vec x, Vec y, Vec a) { return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_NLT_UQ), a.v)}; }
// a where x >= y, else b.
inline Vec select_ge(Vec x, Vec y, Vec a, Vec b) { return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_GE_OQ), b.v, a.v)}; }
inline bool any_greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ) != 0; }
inline Vec round_nearest(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2^n for whole n in [-126, 127].
inline Vec power_of_two(Vec n) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
inline float sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
inline float largest(Vec a) { return _mm512_reduce_max_ps(a.v); }
inline Vec load_bf16(const uint16_t* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
inline Vec load_u8(const uint8_t* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(raw))};
}

#elif defined(__AVX2__)

constexpr int kWidth = 8;
struct Vec { __m256 v; };

inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec where_not_less(Vec x, Vec y, Vec a) { return {_mm256_and_ps(_mm256_cmp_ps(x.v, y.v, _CMP_NLT_UQ), a.v)}; }
inline Vec select_ge(Vec x, Vec y, Vec a, Vec b) { return {_mm256_blendv_ps(b.v, a.v, _mm256_cmp_ps(x.v, y.v, _CMP_GE_OQ))}; }
inline bool any_greater(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ)) != 0; }
inline Vec round_nearest(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec power_of_two(Vec n) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23))};
}
inline float sum(Vec a) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}
inline float largest(Vec a) {
  const __m128 half = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  const __m128 quarter = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
}
inline Vec load_bf16(const uint16_t* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16))};
}
inline Vec load_u8(const uint8_t* p) {
  const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(raw))};
}

#else

// GCC's and Clang's portable vectors: SSE2, NEON, whatever the target has.
constexpr int kWidth = 4;
typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
struct Vec { Floats v; };

inline Vec load(const float* p) { Vec a; std::memcpy(&a.v, p, sizeof a.v); return a; }
inline void store(float* p, Vec a) { std::memcpy(p, &a.v, sizeof a.v); }
inline Vec broadcast(float x) { return {Floats{x, x, x, x}}; }
inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
inline Vec blend(Ints mask, Vec a, Vec b) {
  Ints x, y;
  std::memcpy(&x, &a.v, sizeof x);
  std::memcpy(&y, &b.v, sizeof y);
  const Ints z = (x & mask) | (y & ~mask);
  Vec c;
  std::memcpy(&c.v, &z, sizeof z);
  return c;
}
inline Vec max(Vec a, Vec b) { return blend(a.v > b.v, a, b); }
inline Vec where_not_less(Vec x, Vec y, Vec a) { return blend(x.v < y.v, broadcast(0), a); }
inline Vec select_ge(Vec x, Vec y, Vec a, Vec b) { return blend(x.v >= y.v, a, b); }
inline bool any_greater(Vec a, Vec b) {
  const Ints g = a.v > b.v;
  return (g[0] | g[1] | g[2] | g[3]) != 0;
}
// Exact for |a| below 2^22.
inline Vec round_nearest(Vec a) {
  volatile float magic = 12582912.0f;
  const Floats m = broadcast(magic).v;
  return {(a.v + m) - m};
}
inline Vec power_of_two(Vec n) {
  const Ints bits = (__builtin_convertvector(n.v, Ints) + 127) << 23;
  Vec a;
  std::memcpy(&a.v, &bits, sizeof bits);
  return a;
}
inline float sum(Vec a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
inline float largest(Vec a) {
  const float x = a.v[0] > a.v[1] ? a.v[0] : a.v[1], y = a.v[2] > a.v[3] ? a.v[2] : a.v[3];
  return x > y ? x : y;
}
inline Vec load_bf16(const uint16_t* p) {
  const Ints bits = Ints{p[0], p[1], p[2], p[3]} << 16;
  Vec a;
  std::memcpy(&a.v, &bits, sizeof bits);
  return a;
}
inline Vec load_u8(const uint8_t* p) { return {Floats{float(p[0]), float(p[1]), float(p[2]), float(p[3])}}; }

#endif

inline float from_bf16(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

// Round to nearest, ties to even; NaN stays NaN.
inline uint16_t to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// 2^x to 1e-7 relative; exactly 0 below -126 (and for minus infinity); NaN stays NaN. For x <= 127.
inline Vec exp2(Vec x) {
  const Vec low = broadcast(-126.0f);
  const Vec bounded = max(low, x);
  const Vec whole = round_nearest(bounded);
  const Vec f = bounded - whole;  // [-1/2, 1/2]
  // Taylor series of 2^f; the first term left out is below 1.2e-7.
  Vec p = broadcast(1.5403530393381608e-4f);
  p = fma(p, f, broadcast(1.3333558146428443e-3f));
  p = fma(p, f, broadcast(9.618129107628477e-3f));
  p = fma(p, f, broadcast(5.550410866482158e-2f));
  p = fma(p, f, broadcast(2.402265069591007e-1f));
  p = fma(p, f, broadcast(6.931471805599453e-1f));
  p = fma(p, f, broadcast(1.0f));
  return where_not_less(x, low, p * power_of_two(whole));
}

// Writes the transpose of the 4 x 4 floats at `from` (rows `from_stride` apart) to `to`.
inline void transpose4(const float* from, std::ptrdiff_t from_stride, float* to, std::ptrdiff_t to_stride) {
  typedef float Four __attribute__((vector_size(16)));
  Four a, b, c, d;
  std::memcpy(&a, from, 16);
  std::memcpy(&b, from + from_stride, 16);
  std::memcpy(&c, from + 2 * from_stride, 16);
  std::memcpy(&d, from + 3 * from_stride, 16);
  const Four ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Four cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  const Four rows[4] = {
      __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5), __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7),
      __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5), __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7)};
  for (int r = 0; r < 4; ++r) std::memcpy(to + r * to_stride, &rows[r], 16);
}

}  // namespace crossfill
