// Matrix products on panels of 16 columns. One micro-kernel (`tile`) serves the forward product,
// the input gradient and the weight gradient: MR rows × 16 lanes; the inner dimension is summed in
// one fixed way (`tile_sum`), whatever MR is. Threads and blocks cut rows and columns of the result
// only; a block border inside the inner dimension reloads the very accumulator, so it changes no
// bit.
#pragma once

#include <omp.h>

#include <algorithm>
#include <vector>

#include "ops/kernels/simd.h"

namespace tandem::TD_ISA {

// acc[i] += sum_k a[i·rs + k·cs] · b[k·ldb + 0..15]
template <int MR>
inline void tile(const float* a, std::ptrdiff_t rs, std::ptrdiff_t cs, const float* b,
                 std::ptrdiff_t ldb, std::int64_t k, V16 (&acc)[MR]) {
  for (std::int64_t i = 0; i < k; ++i) {
    const V16 bv = load(b);
    for (int r = 0; r < MR; ++r) acc[r] = fma(set1(a[r * rs]), bv, acc[r]);
    a += cs;
    b += ldb;
  }
}

// The same with b in bf16 pairs along k (leading dimension 16 pairs).
template <int MR>
inline void tile(const float* a, std::ptrdiff_t rs, std::ptrdiff_t cs, const bf16* b,
                 std::ptrdiff_t, std::int64_t k, V16 (&acc)[MR]) {
  for (std::int64_t i = 0; i < k; i += 2) {
    V16 even, odd;
    load_pairs(b, even, odd);
    for (int r = 0; r < MR; ++r) acc[r] = fma(set1(a[r * rs]), even, acc[r]);
    if (i + 1 < k)
      for (int r = 0; r < MR; ++r) acc[r] = fma(set1(a[r * rs + cs]), odd, acc[r]);
    a += 2 * cs;
    b += 32;
  }
}

// The sum over the inner dimension: chains of kChain FMAs, each from 0, added in ascending order.
// Shorter chains keep the rounding error of long sums near that of a blocked BLAS; borders count
// from index 0 of the dimension, so callers may cut k at multiples of kChain and go on.
inline constexpr std::int64_t kChain = 128;

inline std::ptrdiff_t chain_stride(std::ptrdiff_t ldb, const float*) { return kChain * ldb; }
inline std::ptrdiff_t chain_stride(std::ptrdiff_t, const bf16*) { return kChain * 16; }

template <int MR, class B>
inline void tile_sum(const float* a, std::ptrdiff_t rs, std::ptrdiff_t cs, const B* b,
                     std::ptrdiff_t ldb, std::int64_t k, V16 (&acc)[MR]) {
  for (; k > 0; k -= kChain) {
    V16 chain[MR];
    for (auto& c : chain) c = zero();
    tile<MR>(a, rs, cs, b, ldb, std::min(k, kChain), chain);
    for (int r = 0; r < MR; ++r) acc[r] = acc[r] + chain[r];
    a += kChain * cs;
    b += chain_stride(ldb, b);
  }
}

// Calls body(std::integral_constant<int, MR>, first row) over all rows, in tiles of at most
// kTileRows.
template <class F>
inline void for_row_tiles(std::int64_t rows, F&& body) {
  std::int64_t m = 0;
  for (; m + kTileRows <= rows; m += kTileRows) body(std::integral_constant<int, kTileRows>{}, m);
  const auto rest = rows - m;
  auto tail = [&](auto self, auto mr) {
    if constexpr (decltype(mr)::value > 0) {
      if (rest == decltype(mr)::value)
        body(mr, m);
      else
        self(self, std::integral_constant<int, decltype(mr)::value - 1>{});
    }
  };
  if (rest > 0) tail(tail, std::integral_constant<int, kTileRows - 1>{});
}

inline std::int64_t panel_stride(std::int64_t k, float) { return 16 * k; }
inline std::int64_t panel_stride(std::int64_t k, bf16) { return 16 * round_up(k, 2); }

// Contiguous share of `count` for thread t of n.
inline std::pair<std::int64_t, std::int64_t> share(std::int64_t count, int t, int n) {
  return {count * t / n, count * (t + 1) / n};
}

// f32 view of x: x itself, or a converted copy kept in `scratch`.
inline const float* as_f32(const float* x, std::int64_t, std::vector<float>&) { return x; }
inline const float* as_f32(const bf16* x, std::int64_t count, std::vector<float>& scratch) {
  scratch.resize(count);
  float* y = scratch.data();
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < count; i += 16)
    store_tail(y + i, load_tail(x + i, count - i), count - i);
  return y;
}

// A panel in f32: itself, or converted into `wide`, [k rounded up to 2][16]. The tiles then compute
// the very chains that they compute on pairs, without converting anew for each tile of rows.
inline const float* widened(const float* panel, std::int64_t, std::vector<float>&) { return panel; }
inline const float* widened(const bf16* panel, std::int64_t k, std::vector<float>& wide) {
  wide.resize(static_cast<std::size_t>(16 * round_up(k, 2)));
  for (std::int64_t i = 0; i < k; i += 2) {
    V16 even, odd;
    load_pairs(panel + i * 16, even, odd);
    store(wide.data() + i * 16, even);
    store(wide.data() + (i + 1) * 16, odd);
  }
  return wide.data();
}

inline constexpr std::int64_t kPanelGroup = 4;  // panels of a forward product taken at a time

template <class E, class Y>
void linear_rows(const float* x, const E* w, const E* bias, Y* y, std::int64_t rows, std::int64_t n,
                 std::int64_t k) {
  const std::int64_t panels = round_up(n, 16) / 16;
  const std::int64_t row_block = std::max<std::int64_t>(
      kTileRows, (65536 / std::max<std::int64_t>(k, 1)) / kTileRows * kTileRows);
  // Panels go to the thread that is free first: the cores of a shared machine differ in speed. The
  // two gradients keep fixed shares, with which they were measured to be faster.
  const std::int64_t chunks = (panels + kPanelGroup - 1) / kPanelGroup;
#pragma omp parallel for schedule(dynamic)
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    thread_local std::vector<float> wide;
    const std::int64_t first = chunk * kPanelGroup, last = std::min(panels, first + kPanelGroup);
    for (std::int64_t m0 = 0; m0 < rows; m0 += row_block) {
      const std::int64_t block = std::min(row_block, rows - m0);
      for (std::int64_t p = first; p < last; ++p) {
        const std::int64_t lanes = n - p * 16;
        const V16 b = bias ? load_tail(bias + p * 16, lanes) : zero();
        const auto multiply = [&](const auto* panel) {
          for_row_tiles(block, [&](auto mr, std::int64_t m) {
            constexpr int MR = decltype(mr)::value;
            V16 acc[MR];
            for (int r = 0; r < MR; ++r) acc[r] = zero();
            tile_sum<MR>(x + (m0 + m) * k, k, 1, panel, 16, k, acc);
            for (int r = 0; r < MR; ++r)
              store_tail(y + (m0 + m + r) * n + p * 16, bias ? acc[r] + b : acc[r], lanes);
          });
        };
        const E* panel = w + p * panel_stride(k, E{});
        if (block > 2 * kTileRows)
          multiply(widened(panel, k, wide));
        else
          multiply(panel);
      }
    }
  }
}

template <class E>
void linear(const void* x, const void* w, const void* bias, void* y, bool y_is_f32,
            std::int64_t rows, std::int64_t n, std::int64_t k) {
  thread_local std::vector<float> scratch;
  const float* xf = as_f32(static_cast<const E*>(x), rows * k, scratch);
  const auto* we = static_cast<const E*>(w);
  const auto* be = static_cast<const E*>(bias);
  if (y_is_f32)
    linear_rows(xf, we, be, static_cast<float*>(y), rows, n, k);
  else
    linear_rows(xf, we, be, static_cast<E*>(y), rows, n, k);
}

// t[j][0..15] = W[n0 + j, k0 .. k0+15] for one panel of 16 rows n0..n0+15 (columns past k: zero).
inline void transpose_panel(const float* panel, std::int64_t k, std::int64_t k0, float* t) {
  const std::int64_t cols = std::min<std::int64_t>(16, k - k0);
#if defined(__AVX2__)
  if (cols == 16) {
    for (int half = 0; half < 2; ++half) {
      for (int kh = 0; kh < 2; ++kh) {
        const float* s = panel + (k0 + kh * 8) * 16 + half * 8;
        __m256 r[8], u[8];
        for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(s + i * 16);
        for (int i = 0; i < 4; ++i) {
          u[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
          u[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
        }
        for (int i = 0; i < 2; ++i) {
          r[4 * i] = _mm256_shuffle_ps(u[4 * i], u[4 * i + 2], 0x44);
          r[4 * i + 1] = _mm256_shuffle_ps(u[4 * i], u[4 * i + 2], 0xee);
          r[4 * i + 2] = _mm256_shuffle_ps(u[4 * i + 1], u[4 * i + 3], 0x44);
          r[4 * i + 3] = _mm256_shuffle_ps(u[4 * i + 1], u[4 * i + 3], 0xee);
        }
        for (int i = 0; i < 4; ++i) {
          _mm256_storeu_ps(t + (half * 8 + i) * 16 + kh * 8,
                           _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
          _mm256_storeu_ps(t + (half * 8 + i + 4) * 16 + kh * 8,
                           _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
        }
      }
    }
    return;
  }
#endif
  for (int j = 0; j < 16; ++j)
    for (std::int64_t i = 0; i < 16; ++i)
      t[j * 16 + i] = i < cols ? panel[(k0 + i) * 16 + j] : 0.0f;
}
inline void transpose_panel(const bf16* panel, std::int64_t k, std::int64_t k0, float* t) {
  float wide[16 * 16];  // [16 k][16 n]
  for (std::int64_t i = 0; i < 16; i += 2) {
    V16 even = zero(), odd = zero();
    if (k0 + i < k) load_pairs(panel + (k0 + i) * 16, even, odd);
    store(wide + i * 16, even);
    store(wide + (i + 1) * 16, odd);
  }
  transpose_panel(wide, 16, 0, t);
}

// Column tiles computed together: a tile of left-hand rows stays in the first cache for all of
// them, so that the left side is streamed from memory a fourth as often.
inline constexpr std::int64_t kColumnGroup = 4;

template <class E>
void linear_dx_rows(const float* dy, const E* w, E* dx, std::int64_t rows, std::int64_t n,
                    std::int64_t k) {
  constexpr std::int64_t kInner = 8 * kChain;  // rows of W transposed at a time
  const std::int64_t tiles = round_up(k, 16) / 16;
  const std::int64_t panel_floats = 16 * std::min(round_up(n, 16), kInner);
#pragma omp parallel
  {
    std::vector<float> t(kColumnGroup * panel_floats);
    std::vector<float> sums(n > kInner ? rows * 16 * kColumnGroup : 0);
    const auto [first, last] = share(tiles, omp_get_thread_num(), omp_get_num_threads());
    for (std::int64_t c0 = first; c0 < last; c0 += kColumnGroup) {
      const std::int64_t group = std::min(kColumnGroup, last - c0);
      for (std::int64_t n0 = 0; n0 < n; n0 += kInner) {
        const std::int64_t inner = std::min(kInner, n - n0);
        for (std::int64_t g = 0; g < group; ++g)
          for (std::int64_t p = 0; p < round_up(inner, 16) / 16; ++p)
            transpose_panel(w + (n0 / 16 + p) * panel_stride(k, E{}), k, (c0 + g) * 16,
                            t.data() + g * panel_floats + p * 256);
        const bool is_last = n0 + inner == n;
        for_row_tiles(rows, [&](auto mr, std::int64_t m) {
          constexpr int MR = decltype(mr)::value;
          for (std::int64_t g = 0; g < group; ++g) {
            float* partial = sums.data() + (g * rows + m) * 16;
            V16 acc[MR];
            for (int r = 0; r < MR; ++r) acc[r] = n0 == 0 ? zero() : load(partial + r * 16);
            tile_sum<MR>(dy + m * n + n0, n, 1, t.data() + g * panel_floats, 16, inner, acc);
            const std::int64_t column = (c0 + g) * 16;
            for (int r = 0; r < MR; ++r) {
              if (is_last)
                store_tail(dx + (m + r) * k + column, acc[r], k - column);
              else
                store(partial + r * 16, acc[r]);
            }
          }
        });
      }
    }
  }
}

template <class E>
void linear_dx(const void* dy, bool dy_is_f32, const void* w, void* dx, std::int64_t rows,
               std::int64_t n, std::int64_t k) {
  thread_local std::vector<float> scratch;
  const float* d = dy_is_f32 ? static_cast<const float*>(dy)
                             : as_f32(static_cast<const E*>(dy), rows * n, scratch);
  linear_dx_rows(d, static_cast<const E*>(w), static_cast<E*>(dx), rows, n, k);
}

// dw[n, k] += sum over rows of dy[m, n]·x[m, k], the sum a chain of its own from 0 (or replaces
// dw).
inline void linear_dw_rows(const float* dy, const float* x, float* dw, bool accumulate,
                           std::int64_t rows, std::int64_t n, std::int64_t k) {
  thread_local std::vector<float> packed;
  const std::int64_t row_tiles = (n + kTileRows - 1) / kTileRows;
  packed.resize(row_tiles * kTileRows * rows);
  float* pack = packed.data();
#pragma omp parallel
  {
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const auto [r0, r1] = share(row_tiles, thread, threads);
    for (std::int64_t t = r0; t < r1; ++t) {  // pack[t][m][kTileRows]
      float* p = pack + t * kTileRows * rows;
      const float* source = dy + t * kTileRows;
      if ((t + 1) * kTileRows <= n) {
        for (std::int64_t m = 0; m < rows; ++m)
          for (int i = 0; i < kTileRows; ++i) p[m * kTileRows + i] = source[m * n + i];
      } else {
        for (std::int64_t m = 0; m < rows; ++m)
          for (int i = 0; i < kTileRows; ++i)
            p[m * kTileRows + i] = t * kTileRows + i < n ? source[m * n + i] : 0.0f;
      }
    }
#pragma omp barrier
    std::vector<float> xp(rows * 16 * kColumnGroup);
    const std::int64_t cols = round_up(k, 16) / 16;
    // Cut the longer side of dw, so that thin matrices still feed every thread.
    const bool cut_columns = cols >= 2 * threads;
    const auto [c0, c1] =
        cut_columns ? share(cols, thread, threads) : std::pair{std::int64_t{0}, cols};
    const auto [t0, t1] =
        cut_columns ? std::pair{std::int64_t{0}, row_tiles} : share(row_tiles, thread, threads);
    for (std::int64_t c = c0; c < c1; c += kColumnGroup) {
      const std::int64_t group = std::min(kColumnGroup, c1 - c);
      for (std::int64_t g = 0; g < group; ++g)
        for (std::int64_t m = 0; m < rows; ++m)
          store(xp.data() + (g * rows + m) * 16,
                load_tail(x + m * k + (c + g) * 16, k - (c + g) * 16));
      for (std::int64_t t = t0; t < t1; ++t)
        for (std::int64_t g = 0; g < group; ++g) {
          V16 acc[kTileRows];
          for (auto& a : acc) a = zero();
          tile_sum<kTileRows>(pack + t * kTileRows * rows, 1, kTileRows, xp.data() + g * rows * 16,
                              16, rows, acc);
          const std::int64_t column = (c + g) * 16;
          for (int i = 0; i < kTileRows && t * kTileRows + i < n; ++i) {
            float* out = dw + (t * kTileRows + i) * k + column;
            store_tail(out, accumulate ? load_tail(out, k - column) + acc[i] : acc[i], k - column);
          }
        }
    }
  }
}

template <class E>
void linear_dw(const void* dy, bool dy_is_f32, const void* x, float* dw, bool accumulate,
               std::int64_t rows, std::int64_t n, std::int64_t k) {
  thread_local std::vector<float> dy_scratch, x_scratch;
  const float* d = dy_is_f32 ? static_cast<const float*>(dy)
                             : as_f32(static_cast<const E*>(dy), rows * n, dy_scratch);
  linear_dw_rows(d, as_f32(static_cast<const E*>(x), rows * k, x_scratch), dw, accumulate, rows, n,
                 k);
}

// db[n] += sum over rows of dy[m, n], a sum of its own from 0.
template <class E>
void bias_dw(const void* dy, float* db, std::int64_t rows, std::int64_t n) {
  const E* de = static_cast<const E*>(dy);
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < n; i += 16) {
    V16 sum = zero();
    for (std::int64_t m = 0; m < rows; ++m) sum = sum + load_tail(de + m * n + i, n - i);
    store_tail(db + i, load_tail(db + i, n - i) + sum, n - i);
  }
}

template <class E>
inline std::int64_t panel_index(std::int64_t k, std::int64_t row, std::int64_t col) {
  const std::int64_t base = row / 16 * panel_stride(k, E{});
  if constexpr (sizeof(E) == 4) return base + col * 16 + row % 16;
  return base + col / 2 * 32 + row % 16 * 2 + col % 2;
}

template <class E>
void write_panels(void* w, std::int64_t k, std::int64_t row_begin, std::int64_t rows,
                  const float* source) {
  E* we = static_cast<E*>(w);
  const std::int64_t first = row_begin / 16, last = (row_begin + rows + 15) / 16;
#pragma omp parallel for schedule(static)
  for (std::int64_t p = first; p < last; ++p) {
    const std::int64_t r0 = std::max(p * 16, row_begin),
                       r1 = std::min(p * 16 + 16, row_begin + rows);
    for (std::int64_t c0 = 0; c0 < k; c0 += 16)
      for (std::int64_t r = r0; r < r1; ++r)
        for (std::int64_t c = c0; c < std::min(c0 + 16, k); ++c)
          assign(we[panel_index<E>(k, r, c)], source[(r - row_begin) * k + c]);
  }
}

template <class E>
void read_panels(const void* w, std::int64_t k, std::int64_t row_begin, std::int64_t rows,
                 float* target) {
  const E* we = static_cast<const E*>(w);
#pragma omp parallel for schedule(static)
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < k; ++c)
      target[r * k + c] = to_float(we[panel_index<E>(k, row_begin + r, c)]);
}

template <class E>
void gather_rows(const void* w, std::int64_t k, const std::int32_t* ids, std::int64_t rows,
                 void* y) {
  const E* we = static_cast<const E*>(w);
  E* ye = static_cast<E*>(y);
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < k; ++c) ye[r * k + c] = we[panel_index<E>(k, ids[r], c)];
}

}  // namespace tandem::TD_ISA
