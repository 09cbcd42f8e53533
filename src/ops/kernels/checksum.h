// The additive checksum of weights: the sum modulo 2^64 of mix(element index, bits) in two lanes.
// Addition has no order, so a tensor, its tensor-parallel slices and any cut into boxes compare,
// whatever layout each holds them in. The index is that of the element in the whole Hugging Face
// tensor, so a row at the wrong place shows; mix multiplies two index-dependent 32-bit words (the
// NH family of Black et al. 1999, "UMAC"), which four lanes of a plain multiply do.
#pragma once

#include <bit>

#include "ops/kernels/gemm.h"

namespace tandem::TD_ISA {

struct Sums {
  std::uint64_t a = 0, b = 0;
};

inline void mix(Sums& s, std::uint32_t index, std::uint32_t bits) {
  const std::uint32_t key = index * 0x9e3779b1u;
  s.a += static_cast<std::uint64_t>(bits + key) * (key ^ 0x85ebca6bu);
  s.b += static_cast<std::uint64_t>((bits ^ 0xc2b2ae35u) + index) * (key + 0x27d4eb2fu);
}

inline std::uint32_t bits_of(const float& x) { return std::bit_cast<std::uint32_t>(x); }
inline std::uint32_t bits_of(const bf16& x) { return std::bit_cast<std::uint16_t>(x); }

// Rows [row_begin, row_begin + rows) of panels with k columns; element (row, c) has the index
// first_index + (row - row_begin)·k + c.
template <class E>
void checksum_panels(const void* w, std::int64_t k, std::int64_t row_begin, std::int64_t rows,
                     std::int64_t first_index, std::uint64_t* sums) {
  const E* we = static_cast<const E*>(w);
  const std::int64_t first = row_begin / 16, last = (row_begin + rows + 15) / 16;
  std::uint64_t a = 0, b = 0;
#pragma omp parallel for schedule(static) reduction(+ : a, b)
  for (std::int64_t p = first; p < last; ++p) {
    const std::int64_t r0 = std::max(p * 16, row_begin) - p * 16;
    const std::int64_t r1 = std::min(p * 16 + 16, row_begin + rows) - p * 16;
    const E* panel = we + p * panel_stride(k, E{});
    const auto origin = static_cast<std::uint32_t>(first_index + (p * 16 - row_begin) * k);
    const auto width = static_cast<std::uint32_t>(k);
    Sums s;
    for (std::uint32_t c = 0; c < width; ++c) {
      const E* column = panel + (sizeof(E) == 4 ? c * 16 : c / 2 * 32 + c % 2);
      constexpr std::uint32_t kStep = sizeof(E) == 4 ? 1 : 2;
      if (r0 == 0 && r1 == 16) {
        for (std::uint32_t r = 0; r < 16; ++r)
          mix(s, origin + r * width + c, bits_of(column[r * kStep]));
      } else {
        for (auto r = static_cast<std::uint32_t>(r0); r < static_cast<std::uint32_t>(r1); ++r)
          mix(s, origin + r * width + c, bits_of(column[r * kStep]));
      }
    }
    a += s.a;
    b += s.b;
  }
  sums[0] += a;
  sums[1] += b;
}

// The same of row-major elements.
template <class E>
void checksum_flat(const void* x, std::int64_t count, std::int64_t first_index,
                   std::uint64_t* sums) {
  const E* xe = static_cast<const E*>(x);
  Sums s;
  for (std::int64_t i = 0; i < count; ++i)
    mix(s, static_cast<std::uint32_t>(first_index + i), bits_of(xe[i]));
  sums[0] += s.a;
  sums[1] += s.b;
}

}  // namespace tandem::TD_ISA
