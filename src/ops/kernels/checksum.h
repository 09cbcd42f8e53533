// The additive checksum of weights: two sums modulo 2^32 of terms that mix an element's bits with
// its index in the whole Hugging Face tensor. Addition has no order, so a tensor, its
// tensor-parallel slices and any cut into boxes compare, whatever layout each holds them in, and a
// row at the wrong place shows. Both multiplications are by odd numbers, so each term is a
// bijection of the bits: one wrong element always changes the first sum. It guards against faults,
// not against an adversary.
#pragma once

#include <bit>
#include <cstring>

#include "ops/kernels/gemm.h"

namespace tandem::TD_ISA {

inline constexpr std::uint32_t kIndexKey = 0x9e3779b1u;

// key = index · kIndexKey
inline std::uint32_t first_term(std::uint32_t key, std::uint32_t bits) {
  return (bits + key) * ((key >> 15 ^ key << 17) | 1u);
}
inline std::uint32_t second_term(std::uint32_t first) {
  return (first ^ first >> 16) * 0x85ebca6bu;
}

inline std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }
inline std::uint32_t bits_of(bf16 x) { return x.bits; }

// Eight of a panel's sixteen rows side by side.
using U8 = std::uint32_t __attribute__((vector_size(32)));
struct HalfPanel {
  U8 keys, a, b;
  void add(U8 at, U8 bits) {
    const U8 t = (bits + at) * ((at >> 15 ^ at << 17) | 1u);
    a += t;
    b += (t ^ t >> 16) * 0x85ebca6bu;
  }
};

inline void sum_half(const float* column, std::uint32_t cols, HalfPanel& h) {
  HalfPanel s = h;
  for (std::uint32_t c = 0; c < cols; ++c, s.keys += kIndexKey) {
    U8 bits;
    std::memcpy(&bits, column + c * 16, sizeof bits);
    s.add(s.keys, bits);
  }
  h = s;
}
// Pairs of columns in the halves of a word; the last second half may be padding.
inline void sum_half(const bf16* column, std::uint32_t cols, HalfPanel& h) {
  HalfPanel s = h;
  U8 words;
  for (std::uint32_t c = 0; c + 1 < cols; c += 2, s.keys += 2 * kIndexKey) {
    std::memcpy(&words, column + c * 16, sizeof words);
    s.add(s.keys, words & 0xffffu);
    s.add(s.keys + kIndexKey, words >> 16);
  }
  if (cols % 2 != 0) {
    std::memcpy(&words, column + (cols - 1) * 16, sizeof words);
    s.add(s.keys, words & 0xffffu);
  }
  h = s;
}

// Rows [row_begin, row_begin + rows) of panels with k columns; element (row, c) has the index
// first_index + (row - row_begin)·k + c.
template <class E>
void checksum_panels(const void* w, std::int64_t k, std::int64_t row_begin, std::int64_t rows,
                     std::int64_t first_index, std::uint32_t* sums) {
  const E* we = static_cast<const E*>(w);
  const std::int64_t first = row_begin / 16, last = (row_begin + rows + 15) / 16;
  std::uint32_t a = 0, b = 0;
#pragma omp parallel for schedule(dynamic, 4) reduction(+ : a, b)
  for (std::int64_t p = first; p < last; ++p) {
    for (std::int64_t half = 0; half < 2; ++half) {
      const std::int64_t row = p * 16 + half * 8;
      HalfPanel s{};
      for (std::int64_t r = 0; r < 8; ++r)
        s.keys[r] = static_cast<std::uint32_t>(first_index + (row + r - row_begin) * k) * kIndexKey;
      constexpr std::int64_t kHalf = 8 * 4 / sizeof(E);  // elements from one half to the other
      sum_half(we + p * panel_stride(k, E{}) + half * kHalf, static_cast<std::uint32_t>(k), s);
      for (std::int64_t r = 0; r < 8; ++r) {
        if (row + r < row_begin || row + r >= row_begin + rows) continue;
        a += s.a[r];
        b += s.b[r];
      }
    }
  }
  sums[0] += a;
  sums[1] += b;
}

// The same of row-major elements.
template <class E>
void checksum_flat(const void* x, std::int64_t count, std::int64_t first_index,
                   std::uint32_t* sums) {
  const E* xe = static_cast<const E*>(x);
  const auto origin = static_cast<std::uint32_t>(first_index) * kIndexKey;
  std::uint32_t a = 0, b = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t t =
        first_term(origin + static_cast<std::uint32_t>(i) * kIndexKey, bits_of(xe[i]));
    a += t;
    b += second_term(t);
  }
  sums[0] += a;
  sums[1] += b;
}

}  // namespace tandem::TD_ISA
