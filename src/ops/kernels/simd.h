// Sixteen f32 lanes for the instruction set that the including file is compiled for, and the few
// operations the kernels need. The same source compiles to two AVX2 registers, one AVX-512 register
// or plain loops; AVX2 and AVX-512 give the same bits, operation by operation. Each including .cpp
// defines TD_ISA, the namespace that keeps the copies apart.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "ops/kernels/kernels.h"

namespace tandem::TD_ISA {

#if defined(__AVX512F__)

struct V16 {
  __m512 v;
};
inline V16 zero() { return {_mm512_setzero_ps()}; }
inline V16 set1(float x) { return {_mm512_set1_ps(x)}; }
inline V16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, V16 a) { _mm512_storeu_ps(p, a.v); }
inline V16 operator+(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V16 operator-(V16 a, V16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V16 operator*(V16 a, V16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V16 operator/(V16 a, V16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline V16 fma(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline V16 max(V16 a, V16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline V16 min(V16 a, V16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline V16 sqrt(V16 a) { return {_mm512_sqrt_ps(a.v)}; }
inline V16 round_even(V16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline V16 exp2_int(V16 n) {  // 2^n for integral n in [-126, 127]
  __m512i i = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(i, 23))};
}
inline V16 load(const bf16* p) {
  __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
}
inline void store(bf16* p, V16 a) {
  __m512i x = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  r = _mm512_mask_mov_epi32(r, nan, _mm512_set1_epi32(0x7fc00000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16)));
}
// Sixteen pairs (even, odd) of bf16 along k: the two f32 vectors.
inline void load_pairs(const bf16* p, V16& even, V16& odd) {
  __m512i w = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
inline constexpr int kTileRows = 12;

#elif defined(__AVX2__)

struct V16 {
  __m256 a, b;
};
inline V16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V16 set1(float x) {
  __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
inline V16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, V16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline V16 operator+(V16 x, V16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline V16 operator-(V16 x, V16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline V16 operator*(V16 x, V16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline V16 operator/(V16 x, V16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline V16 fma(V16 x, V16 y, V16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline V16 max(V16 x, V16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline V16 min(V16 x, V16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline V16 sqrt(V16 x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
inline V16 round_even(V16 x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline __m256 exp2_int8(__m256 n) {
  __m256i i = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(i, 23));
}
inline V16 exp2_int(V16 n) { return {exp2_int8(n.a), exp2_int8(n.b)}; }
inline __m256 widen8(__m128i w) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(w), 16));
}
inline V16 load(const bf16* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {widen8(_mm_loadu_si128(q)), widen8(_mm_loadu_si128(q + 1))};
}
inline __m256i narrow8(__m256 v) {
  __m256i x = _mm256_castps_si256(v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_add_epi32(x, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc00000), nan);
  return _mm256_srli_epi32(r, 16);
}
inline void store(bf16* p, V16 x) {
  __m256i packed = _mm256_packus_epi32(narrow8(x.a), narrow8(x.b));  // lanes 0-3,8-11 | 4-7,12-15
  packed = _mm256_permute4x64_epi64(packed, 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}
inline void load_pairs(const bf16* p, V16& even, V16& odd) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  __m256i w0 = _mm256_loadu_si256(q), w1 = _mm256_loadu_si256(q + 1);
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  even.a = _mm256_castsi256_ps(_mm256_slli_epi32(w0, 16));
  even.b = _mm256_castsi256_ps(_mm256_slli_epi32(w1, 16));
  odd.a = _mm256_castsi256_ps(_mm256_and_si256(w0, high));
  odd.b = _mm256_castsi256_ps(_mm256_and_si256(w1, high));
}
inline constexpr int kTileRows = 6;

#else

struct V16 {
  float v[16];
};
template <class F>
inline V16 each(F f) {
  V16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = f(i);
  return r;
}
inline V16 zero() {
  return each([](int) { return 0.0f; });
}
inline V16 set1(float x) {
  return each([=](int) { return x; });
}
inline V16 load(const float* p) {
  return each([=](int i) { return p[i]; });
}
inline void store(float* p, const V16& a) { std::memcpy(p, a.v, sizeof a.v); }
inline V16 operator+(V16 a, V16 b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline V16 operator-(V16 a, V16 b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline V16 operator*(V16 a, V16 b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline V16 operator/(V16 a, V16 b) {
  return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline V16 fma(V16 a, V16 b, V16 c) {
  return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline V16 max(V16 a, V16 b) {
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline V16 min(V16 a, V16 b) {
  return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline V16 sqrt(V16 a) {
  return each([&](int i) { return std::sqrt(a.v[i]); });
}
inline V16 round_even(V16 a) {
  return each([&](int i) { return std::nearbyint(a.v[i]); });
}
inline float bits_float(std::uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline V16 exp2_int(V16 n) {
  return each([&](int i) {
    return bits_float(static_cast<std::uint32_t>(static_cast<int>(n.v[i]) + 127) << 23);
  });
}
inline V16 load(const bf16* p) {
  return each([=](int i) { return bits_float(static_cast<std::uint32_t>(p[i].bits) << 16); });
}
inline void store(bf16* p, const V16& a) {
  for (int i = 0; i < 16; ++i) {
    std::uint32_t x;
    std::memcpy(&x, &a.v[i], 4);
    p[i].bits = a.v[i] != a.v[i] ? std::uint16_t{0x7fc0}
                                 : static_cast<std::uint16_t>((x + 0x7fff + ((x >> 16) & 1)) >> 16);
  }
}
inline void load_pairs(const bf16* p, V16& even, V16& odd) {
  for (int i = 0; i < 16; ++i) {
    even.v[i] = bits_float(static_cast<std::uint32_t>(p[2 * i].bits) << 16);
    odd.v[i] = bits_float(static_cast<std::uint32_t>(p[2 * i + 1].bits) << 16);
  }
}
inline constexpr int kTileRows = 4;

#endif

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  std::uint32_t u = static_cast<std::uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline bf16 to_bfloat(float x) {
  std::uint32_t u;
  std::memcpy(&u, &x, 4);
  if (x != x) return {0x7fc0};
  return {static_cast<std::uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
inline void assign(float& y, float x) { y = x; }
inline void assign(bf16& y, float x) { y = to_bfloat(x); }

// The first n (< 16) lanes; the others are `fill` when loaded and untouched when stored.
template <class T>
inline V16 load_n(const T* p, std::int64_t n, float fill = 0.0f) {
  float t[16];
  for (int i = 0; i < 16; ++i) t[i] = i < n ? to_float(p[i]) : fill;
  return load(t);
}
template <class T>
inline void store_n(T* p, V16 a, std::int64_t n) {
  float t[16];
  store(t, a);
  for (int i = 0; i < n; ++i) assign(p[i], t[i]);
}
template <class T>
inline V16 load_tail(const T* p, std::int64_t n, float fill = 0.0f) {
  return n >= 16 ? load(p) : load_n(p, n, fill);
}
template <class T>
inline void store_tail(T* p, V16 a, std::int64_t n) {
  if (n >= 16)
    store(p, a);
  else
    store_n(p, a, n);
}

// Lanes added in one fixed tree: distance 8, 4, 2, 1.
inline float sum_lanes(V16 a) {
  float t[16];
  store(t, a);
  for (int d = 8; d >= 1; d /= 2)
    for (int i = 0; i < d; ++i) t[i] = t[i] + t[i + d];
  return t[0];
}
inline float max_lanes(V16 a) {
  float t[16];
  store(t, a);
  float m = t[0];
  for (int i = 1; i < 16; ++i) m = t[i] > m ? t[i] : m;
  return m;
}

// e^x to about 1 ulp for x in [-87, 88]; smaller x give 0, larger e^88, NaN gives NaN: `max` and
// `min` return their second operand then, so x stands there. Polynomial of Cephes expf.
inline V16 exp(V16 x) {
  const V16 low = set1(-87.0f);
  V16 c = min(set1(88.0f), max(low, x));
  V16 n = round_even(c * set1(1.44269504088896341f));
  V16 r = fma(n, set1(-0.693359375f), c);
  r = fma(n, set1(2.12194440e-4f), r);
  V16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r) + set1(1.0f);
  V16 y = p * exp2_int(n);
#if defined(__AVX512F__)
  return {_mm512_mask_mov_ps(y.v, _mm512_cmp_ps_mask(x.v, low.v, _CMP_LT_OQ), _mm512_setzero_ps())};
#elif defined(__AVX2__)
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.a, low.a, _CMP_LT_OQ), y.a),
          _mm256_andnot_ps(_mm256_cmp_ps(x.b, low.b, _CMP_LT_OQ), y.b)};
#else
  return each([&](int i) { return x.v[i] < -87.0f ? 0.0f : y.v[i]; });
#endif
}

}  // namespace tandem::TD_ISA
