// The additive checksum of weights: two sums modulo 2^32 of terms that mix a word's bits with its
// index in the whole Hugging Face tensor. A word is one f32 or two bf16 side by side in a row (the
// last of an odd row alone), so word w of row r has the index r · words a row + w in every layout.
// Addition has no order, so a tensor, its tensor-parallel slices and any cut into boxes of rows
// compare, whatever layout each holds them in, and a row at the wrong place shows. Both
// multiplications are by odd numbers, so each term is a bijection of the bits: one wrong word
// always changes the first sum. It guards against faults, not against an adversary.
#pragma once

#include <bit>
#include <cstring>

#include "ops/kernels/gemm.h"

namespace tandem::TD_ISA {

inline constexpr std::uint32_t kIndexKey = 0x9e3779b1u;

template <class E>
inline constexpr std::int64_t kWordElements = 4 / sizeof(E);
template <class E>
inline constexpr std::int64_t words_of(std::int64_t cols) {
  return (cols + kWordElements<E> - 1) / kWordElements<E>;
}
// What counts of a row's last word.
template <class E>
inline constexpr std::uint32_t last_mask(std::int64_t cols) {
  return cols % kWordElements<E> == 0 ? 0xffffffffu : 0xffffu;
}

// Eight words side by side. Not passed by value: without AVX that would have an ABI of its own.
using U8 = std::uint32_t __attribute__((vector_size(32)));
struct Sum8 {
  U8 keys, a, b;  // keys: of the next eight words, index · kIndexKey
  void add(const U8& words) {
    const U8 t = (words + keys) * ((keys >> 15 ^ keys << 17) | 1u);
    a += t;
    b += (t ^ t >> 16) * 0x85ebca6bu;
  }
};
// The sums so far of eight rows or words, whose keys stand `step` apart: none.
inline Sum8 no_words(std::uint32_t first_key, std::uint32_t step) {
  const U8 lane = {0, 1, 2, 3, 4, 5, 6, 7};
  return {.keys = lane * step + first_key, .a = U8{}, .b = U8{}};
}
// Past the caches: what is written is not read again here. p is 32-byte aligned.
inline void stream_words(std::uint32_t* p, const U8& words) {
#if defined(__AVX2__)
  __m256i x;
  std::memcpy(&x, &words, sizeof x);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), x);
#else
  std::memcpy(p, &words, sizeof words);
#endif
}
inline void finish_streams() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// A panel's sixteen rows, eight in each sum; word w of them stands at from[16 · w]. `to` (may be
// null) gets a copy, cache line by cache line.
template <bool kCopies>
void sum_panel(const std::uint32_t* from, std::uint32_t* to, std::int64_t words, std::uint32_t mask,
               Sum8& upper, Sum8& lower) {
  Sum8 u = upper, l = lower;
  U8 x, y;
  for (std::int64_t w = 0; w < words; ++w, u.keys += kIndexKey, l.keys += kIndexKey) {
    std::memcpy(&x, from + w * 16, sizeof x);
    std::memcpy(&y, from + w * 16 + 8, sizeof y);
    if constexpr (kCopies) {
      stream_words(to + w * 16, x);
      stream_words(to + w * 16 + 8, y);
    }
    if (w + 1 == words) {
      x &= mask;
      y &= mask;
    }
    u.add(x);
    l.add(y);
  }
  upper = u;
  lower = l;
}

// Rows [row_begin, row_begin + rows) of panels with k columns, the first of which is row first_row
// of its tensor. kCopies: panel by panel to `to` as well; row_begin is then the first of a panel.
template <class E, bool kCopies>
void sum_panels(const void* from, void* to, std::int64_t k, std::int64_t row_begin,
                std::int64_t rows, std::int64_t first_row, std::uint32_t* sums) {
  const std::int64_t words = words_of<E>(k), stride = 16 * words;
  const auto* source = static_cast<const std::uint32_t*>(from);
  auto* target = static_cast<std::uint32_t*>(to);
  const std::int64_t first = row_begin / 16, last = (row_begin + rows + 15) / 16;
  std::uint32_t a = 0, b = 0;
#pragma omp parallel for schedule(dynamic, 4) reduction(+ : a, b)
  for (std::int64_t p = first; p < last; ++p) {
    const std::uint32_t row_key = static_cast<std::uint32_t>(words) * kIndexKey;
    const std::uint32_t first_key =
        static_cast<std::uint32_t>(first_row + p * 16 - row_begin) * row_key;
    Sum8 s[2] = {no_words(first_key, row_key), no_words(first_key + 8 * row_key, row_key)};
    sum_panel<kCopies>(source + p * stride, kCopies ? target + p * stride : nullptr, words,
                       last_mask<E>(k), s[0], s[1]);
    for (std::int64_t r = 0; r < 16; ++r) {
      if (p * 16 + r < row_begin || p * 16 + r >= row_begin + rows) continue;
      a += s[r / 8].a[r % 8];
      b += s[r / 8].b[r % 8];
    }
    if constexpr (kCopies) finish_streams();
  }
  sums[0] += a;
  sums[1] += b;
}

template <class E>
void checksum_panels(const void* w, std::int64_t k, std::int64_t row_begin, std::int64_t rows,
                     std::int64_t first_row, std::uint32_t* sums) {
  sum_panels<E, false>(w, nullptr, k, row_begin, rows, first_row, sums);
}
template <class E>
void copy_panels(const void* from, void* to, std::int64_t k, std::int64_t rows,
                 std::int64_t first_row, std::uint32_t* sums) {
  sum_panels<E, true>(from, to, k, 0, rows, first_row, sums);
}

// `count` words in a row, the first with that index; the last one is masked.
inline void sum_words(const void* x, std::int64_t count, std::int64_t index, std::uint32_t mask,
                      std::uint32_t* sums) {
  const auto* bytes = static_cast<const std::byte*>(x);
  Sum8 s = no_words(static_cast<std::uint32_t>(index) * kIndexKey, kIndexKey);
  for (std::int64_t at = 0; at < count; at += 8, s.keys += 8 * kIndexKey) {
    const std::int64_t n = std::min<std::int64_t>(8, count - at);
    U8 words{};
    std::memcpy(&words, bytes + at * 4, static_cast<std::size_t>(n) * 4);
    if (at + n == count) words[n - 1] &= mask;
    const U8 a = s.a, b = s.b;
    s.add(words);
    for (std::int64_t i = n; i < 8; ++i) s.a[i] = a[i], s.b[i] = b[i];  // words that are not there
  }
  for (std::int64_t i = 0; i < 8; ++i) {
    sums[0] += s.a[i];
    sums[1] += s.b[i];
  }
}

// The same of row-major elements.
template <class E>
void checksum_flat(const void* x, std::int64_t rows, std::int64_t cols, std::int64_t first_row,
                   std::uint32_t* sums) {
  const std::int64_t words = words_of<E>(cols);
  if (cols % kWordElements<E> == 0)
    return sum_words(x, rows * words, first_row * words, 0xffffffffu, sums);
  const E* row = static_cast<const E*>(x);
  std::vector<std::uint32_t> padded(static_cast<std::size_t>(words));
  for (std::int64_t r = 0; r < rows; ++r, row += cols) {
    std::memcpy(padded.data(), row, static_cast<std::size_t>(cols) * sizeof(E));
    sum_words(padded.data(), words, (first_row + r) * words, last_mask<E>(cols), sums);
  }
}

}  // namespace tandem::TD_ISA
