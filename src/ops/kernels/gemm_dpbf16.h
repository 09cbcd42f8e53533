// The bf16 products with AVX-512's dot product of pairs (VDPBF16PS): twice the rate of widening to
// f32. Both sides are bf16 pairs along the summed dimension, sums are f32 chains of kChain/2 pair
// products, in the same fixed shape as `tile_sum`: a result depends neither on the number of rows
// nor on threads. f32 gradients that come in (of logits) are rounded to bf16 first. The instruction
// flushes subnormal results and rounds a pair's sum its own way, so its bits are those of no other
// table.
#pragma once

#include "ops/kernels/gemm.h"
#include "ops/kernels/rowwise.h"

namespace tandem::TD_ISA {

inline constexpr std::int64_t kChainPairs = kChain / 2;

inline __m512bh as_pairs(__m512i v) { return reinterpret_cast<__m512bh>(v); }

inline std::int32_t pair_at(const bf16* p) {
  std::int32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

// acc[r] += sum over pairs i of a[r·rs + i·cs] (a pair) · b[i][16 pairs].
template <int MR>
inline void tile_sum_pairs(const bf16* a, std::ptrdiff_t rs, std::ptrdiff_t cs, const bf16* b,
                           std::int64_t pairs, V16 (&acc)[MR]) {
  for (; pairs > 0; pairs -= kChainPairs) {
    __m512 chain[MR];
    for (auto& c : chain) c = _mm512_setzero_ps();
    const std::int64_t count = std::min(pairs, kChainPairs);
    for (std::int64_t i = 0; i < count; ++i) {
      const __m512bh bv = as_pairs(_mm512_loadu_si512(b));
      for (int r = 0; r < MR; ++r)
        chain[r] = _mm512_dpbf16_ps(chain[r], as_pairs(_mm512_set1_epi32(pair_at(a + r * rs))), bv);
      a += cs;
      b += 32;
    }
    for (int r = 0; r < MR; ++r) acc[r].v = _mm512_add_ps(acc[r].v, chain[r]);
  }
}

// Rows padded to an even width, so that every pair is whole: x itself where k is even.
inline const bf16* even_rows(const bf16* x, std::int64_t rows, std::int64_t k,
                             std::vector<bf16>& scratch) {
  if (k % 2 == 0) return x;
  scratch.assign(rows * (k + 1), bf16{0});
  for (std::int64_t r = 0; r < rows; ++r) std::copy_n(x + r * k, k, scratch.data() + r * (k + 1));
  return scratch.data();
}

// bf16 view of dy: itself, or f32 rounded into scratch.
inline const bf16* as_bf16(const void* dy, bool is_f32, std::int64_t count,
                           std::vector<bf16>& scratch) {
  if (!is_f32) return static_cast<const bf16*>(dy);
  scratch.resize(count);
  to_bf16(static_cast<const float*>(dy), scratch.data(), count);
  return scratch.data();
}

template <class Y>
void linear_pairs_rows(const bf16* x, const bf16* w, const bf16* bias, Y* y, std::int64_t rows,
                       std::int64_t n, std::int64_t k) {
  const std::int64_t panels = round_up(n, 16) / 16, width = round_up(k, 2);
  const std::int64_t row_block = std::max<std::int64_t>(
      kTileRows, (131072 / std::max<std::int64_t>(k, 1)) / kTileRows * kTileRows);
  const std::int64_t chunks = (panels + kPanelGroup - 1) / kPanelGroup;
#pragma omp parallel for schedule(dynamic)
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    const std::int64_t first = chunk * kPanelGroup, last = std::min(panels, first + kPanelGroup);
    for (std::int64_t m0 = 0; m0 < rows; m0 += row_block) {
      const std::int64_t block = std::min(row_block, rows - m0);
      for (std::int64_t p = first; p < last; ++p) {
        const bf16* panel = w + p * panel_stride(k, bf16{});
        const std::int64_t lanes = n - p * 16;
        const V16 b = bias ? load_tail(bias + p * 16, lanes) : zero();
        for_row_tiles(block, [&](auto mr, std::int64_t m) {
          constexpr int MR = decltype(mr)::value;
          V16 acc[MR];
          for (int r = 0; r < MR; ++r) acc[r] = zero();
          tile_sum_pairs<MR>(x + (m0 + m) * width, width, 2, panel, width / 2, acc);
          for (int r = 0; r < MR; ++r)
            store_tail(y + (m0 + m + r) * n + p * 16, bias ? acc[r] + b : acc[r], lanes);
        });
      }
    }
  }
}

inline void linear_pairs(const void* x, const void* w, const void* bias, void* y, bool y_is_f32,
                         std::int64_t rows, std::int64_t n, std::int64_t k) {
  thread_local std::vector<bf16> scratch;
  const bf16* xe = even_rows(static_cast<const bf16*>(x), rows, k, scratch);
  const auto* we = static_cast<const bf16*>(w);
  const auto* be = static_cast<const bf16*>(bias);
  if (y_is_f32)
    linear_pairs_rows(xe, we, be, static_cast<float*>(y), rows, n, k);
  else
    linear_pairs_rows(xe, we, be, static_cast<bf16*>(y), rows, n, k);
}

// t[j/2][16 k][2] = W[n0 + j, k0 .. k0+15] in pairs along n, for one panel of 16 rows.
inline void transpose_pairs(const bf16* panel, std::int64_t k, std::int64_t k0, bf16* t) {
  const std::int64_t cols = std::min<std::int64_t>(16, k - k0);
  for (std::int64_t i = 0; i < 16; ++i) {
    const bf16* row = panel + (k0 + i) / 2 * 32 + (k0 + i) % 2;  // [16 n] at stride 2
    for (int j = 0; j < 16; ++j) t[j / 2 * 32 + i * 2 + j % 2] = i < cols ? row[j * 2] : bf16{0};
  }
}

inline void linear_dx_pairs(const void* dy, bool dy_is_f32, const void* w, void* dx,
                            std::int64_t rows, std::int64_t n, std::int64_t k) {
  constexpr std::int64_t kInner = 8 * kChain;
  thread_local std::vector<bf16> rounded, padded;
  const bf16* d = even_rows(as_bf16(dy, dy_is_f32, rows * n, rounded), rows, n, padded);
  const auto* we = static_cast<const bf16*>(w);
  auto* out = static_cast<bf16*>(dx);
  const std::int64_t tiles = round_up(k, 16) / 16, width = round_up(n, 2);
  const std::int64_t panel_size = 16 * std::min(round_up(n, 16), kInner);
#pragma omp parallel
  {
    std::vector<bf16> t(kColumnGroup * panel_size);
    std::vector<float> sums(n > kInner ? rows * 16 * kColumnGroup : 0);
    const auto [first, last] = share(tiles, omp_get_thread_num(), omp_get_num_threads());
    for (std::int64_t c0 = first; c0 < last; c0 += kColumnGroup) {
      const std::int64_t group = std::min(kColumnGroup, last - c0);
      for (std::int64_t n0 = 0; n0 < n; n0 += kInner) {
        const std::int64_t inner = std::min(kInner, n - n0);
        for (std::int64_t g = 0; g < group; ++g)
          for (std::int64_t p = 0; p < round_up(inner, 16) / 16; ++p)
            transpose_pairs(we + (n0 / 16 + p) * panel_stride(k, bf16{}), k, (c0 + g) * 16,
                            t.data() + g * panel_size + p * 256);
        const bool is_last = n0 + inner == n;
        for_row_tiles(rows, [&](auto mr, std::int64_t m) {
          constexpr int MR = decltype(mr)::value;
          for (std::int64_t g = 0; g < group; ++g) {
            float* partial = sums.data() + (g * rows + m) * 16;
            V16 acc[MR];
            for (int r = 0; r < MR; ++r) acc[r] = n0 == 0 ? zero() : load(partial + r * 16);
            tile_sum_pairs<MR>(d + m * width + n0, width, 2, t.data() + g * panel_size,
                               (inner + 1) / 2, acc);
            const std::int64_t column = (c0 + g) * 16;
            for (int r = 0; r < MR; ++r) {
              if (is_last)
                store_tail(out + (m + r) * k + column, acc[r], k - column);
              else
                store(partial + r * 16, acc[r]);
            }
          }
        });
      }
    }
  }
}

// Two rows of x as sixteen pairs along rows.
inline void store_row_pairs(bf16* t, const bf16* low, const bf16* high, std::int64_t n) {
  for (std::int64_t i = 0; i < 16; ++i) {
    t[2 * i] = i < n ? low[i] : bf16{0};
    t[2 * i + 1] = i < n && high ? high[i] : bf16{0};
  }
}

inline void linear_dw_pairs(const void* dy, bool dy_is_f32, const void* x, float* dw,
                            bool accumulate, std::int64_t rows, std::int64_t n, std::int64_t k) {
  thread_local std::vector<bf16> rounded, packed;
  const bf16* d = as_bf16(dy, dy_is_f32, rows * n, rounded);
  const auto* xe = static_cast<const bf16*>(x);
  const std::int64_t row_tiles = (n + kTileRows - 1) / kTileRows, pairs = (rows + 1) / 2;
  packed.resize(row_tiles * kTileRows * pairs * 2);
  bf16* pack = packed.data();
#pragma omp parallel
  {
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const auto [r0, r1] = share(row_tiles, thread, threads);
    for (std::int64_t t = r0; t < r1; ++t)  // pack[t][pair][kTileRows][2]
      for (std::int64_t m = 0; m < rows + rows % 2; ++m)
        for (std::int64_t i = 0; i < kTileRows; ++i) {
          const std::int64_t column = t * kTileRows + i;
          pack[((t * pairs + m / 2) * kTileRows + i) * 2 + m % 2] =
              m < rows && column < n ? d[m * n + column] : bf16{0};
        }
#pragma omp barrier
    std::vector<bf16> xp(pairs * 32 * kColumnGroup);
    const std::int64_t cols = round_up(k, 16) / 16;
    const bool cut_columns = cols >= 2 * threads;
    const auto [c0, c1] =
        cut_columns ? share(cols, thread, threads) : std::pair{std::int64_t{0}, cols};
    const auto [t0, t1] =
        cut_columns ? std::pair{std::int64_t{0}, row_tiles} : share(row_tiles, thread, threads);
    for (std::int64_t c = c0; c < c1; c += kColumnGroup) {
      const std::int64_t group = std::min(kColumnGroup, c1 - c);
      for (std::int64_t g = 0; g < group; ++g)
        for (std::int64_t m = 0; m < rows; m += 2) {
          const bf16* low = xe + m * k + (c + g) * 16;
          store_row_pairs(xp.data() + (g * pairs + m / 2) * 32, low,
                          m + 1 < rows ? low + k : nullptr, k - (c + g) * 16);
        }
      for (std::int64_t t = t0; t < t1; ++t)
        for (std::int64_t g = 0; g < group; ++g) {
          V16 acc[kTileRows];
          for (auto& a : acc) a = zero();
          tile_sum_pairs<kTileRows>(pack + t * pairs * kTileRows * 2, 2, kTileRows * 2,
                                    xp.data() + g * pairs * 32, pairs, acc);
          const std::int64_t column = (c + g) * 16;
          for (int i = 0; i < kTileRows && t * kTileRows + i < n; ++i) {
            float* out = dw + (t * kTileRows + i) * k + column;
            store_tail(out, accumulate ? load_tail(out, k - column) + acc[i] : acc[i], k - column);
          }
        }
    }
  }
}

}  // namespace tandem::TD_ISA
