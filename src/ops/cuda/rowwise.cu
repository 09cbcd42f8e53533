// Row-wise kernels: norms, rotary embedding, gated activation, look-up and conversions. A row is
// computed from itself alone, its sums in a fixed tree, in f32; results are rounded once.
#include <numeric>

#include "ops/cuda/activation.cuh"
#include "ops/cuda/device.cuh"
#include "ops/cuda/kernels.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 256;

// Threads for each of the first `count` items of a flat range.
unsigned blocks_for(std::int64_t items) { return static_cast<unsigned>(ceil_div(items, kThreads)); }
__device__ inline std::int64_t item() {
  return static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

template <class E, class Y>
__global__ void fill_rows_kernel(const E* row, Y* y, std::int64_t count, std::int64_t width) {
  const std::int64_t i = item();
  if (i < count) y[i] = from_float<Y>(to_float(row[i % width]));
}

template <class E, int N>
__global__ void gather_rows_kernel(const E* w, std::int64_t k, const std::int32_t* ids,
                                   std::int64_t packs, E* y) {
  const std::int64_t i = item(), row_packs = k / N;
  next_may_start();
  previous_done();
  if (i >= packs) return;
  const std::int64_t r = i / row_packs, c = i % row_packs * N;
  *reinterpret_cast<Pack<E, N>*>(y + r * k + c) =
      *reinterpret_cast<const Pack<E, N>*>(w + ids[r] * k + c);
}

__global__ void feed_tokens_kernel(std::int32_t* tokens, std::int32_t* sources,
                                   const std::int32_t* last, std::int64_t rows) {
  const std::int64_t i = item();
  if (i >= rows || sources[i] < 0) return;
  tokens[i] = last[sources[i]];
  sources[i] = -1;
}

// kWarps warps a row, kThreads / (32·kWarps) rows a block.
template <class E, int N, int kWarps>
__global__ void rms_norm_kernel(const E* x, const E* weight, float eps, float offset, E* y,
                                float* rstd, std::int64_t rows, std::int64_t width) {
  constexpr int kRows = kThreads / (32 * kWarps), kStep = 32 * kWarps * N;
  __shared__ float shared[kRows][kWarps];
  const int group = threadIdx.x / (32 * kWarps), t = threadIdx.x % (32 * kWarps);
  const std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * kRows + group;
  const bool live = r < rows;
  next_may_start();
  previous_done();
  float sum = 0;
  for (std::int64_t i = t * N; live && i < width; i += kStep) {
    float v[N];
    load<N>(x + r * width + i, v);
#pragma unroll
    for (int j = 0; j < N; ++j) sum += v[j] * v[j];
  }
  sum = group_sum<kWarps>(sum, shared[group]);
  if (!live) return;
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(width) + eps);
  if (rstd && t == 0) rstd[r] = scale;
  for (std::int64_t i = t * N; i < width; i += kStep) {
    float v[N], w[N];
    load<N>(x + r * width + i, v);
    load<N>(weight + i, w);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = v[j] * scale * (w[j] + offset);
    store<N>(y + r * width + i, v);
  }
}

// dx = rstd·(g - x̂·mean(g·x̂)), g = dy·(weight + offset), x̂ = x·rstd.
template <class E, int N, int kWarps>
__global__ void rms_norm_dx_kernel(const E* dy, const E* x, const E* weight, float offset,
                                   const float* rstd, E* dx, std::int64_t rows,
                                   std::int64_t width) {
  constexpr int kRows = kThreads / (32 * kWarps), kStep = 32 * kWarps * N;
  __shared__ float shared[kRows][kWarps];
  const int group = threadIdx.x / (32 * kWarps), t = threadIdx.x % (32 * kWarps);
  const std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * kRows + group;
  const bool live = r < rows;
  const float scale = live ? rstd[r] : 0.0f;
  float dot = 0;
  for (std::int64_t i = t * N; live && i < width; i += kStep) {
    float v[N], w[N], d[N];
    load<N>(x + r * width + i, v);
    load<N>(weight + i, w);
    load<N>(dy + r * width + i, d);
#pragma unroll
    for (int j = 0; j < N; ++j) dot += d[j] * (w[j] + offset) * (v[j] * scale);
  }
  const float mean = group_sum<kWarps>(dot, shared[group]) / static_cast<float>(width);
  if (!live) return;
  for (std::int64_t i = t * N; i < width; i += kStep) {
    float v[N], w[N], d[N];
    load<N>(x + r * width + i, v);
    load<N>(weight + i, w);
    load<N>(dy + r * width + i, d);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = (d[j] * (w[j] + offset) - v[j] * scale * mean) * scale;
    store<N>(dx + r * width + i, v);
  }
}

// A warp for narrow rows (heads), a block for wide ones.
template <class F>
void with_row_warps(std::int64_t width, F&& f) {
  if (width <= 512)
    f(std::integral_constant<int, 1>{});
  else
    f(std::integral_constant<int, 8>{});
}

// One block a row, a thread N pairs of a head at a time: (i, i + half), or (2i, 2i + 1).
constexpr int kRotaryThreads = 128;
template <class E, int N, bool kInterleaved>
__global__ void rotary_kernel(E* x, std::int64_t row_stride, int heads, int head_dim, int half,
                              const std::int32_t* positions, const float* cos, const float* sin,
                              float sign) {
  const std::int64_t row = blockIdx.x, table = static_cast<std::int64_t>(positions[row]) * half;
  const int head_packs = half / N;
  for (int p = threadIdx.x; p < heads * head_packs; p += kRotaryThreads) {
    const int h = p / head_packs, i = p % head_packs * N;
    E* const head = x + row * row_stride + h * head_dim;
    float c[N], s[N];
    load<N>(cos + table + i, c);
    load<N>(sin + table + i, s);
    if constexpr (kInterleaved) {
      float v[2 * N];
      load<2 * N>(head + 2 * i, v);
#pragma unroll
      for (int j = 0; j < N; ++j) turn(v[2 * j], v[2 * j + 1], c[j], s[j] * sign);
      store<2 * N>(head + 2 * i, v);
    } else {
      float low[N], high[N];
      load<N>(head + i, low);
      load<N>(head + half + i, high);
#pragma unroll
      for (int j = 0; j < N; ++j) turn(low[j], high[j], c[j], s[j] * sign);
      store<N>(head + i, low);
      store<N>(head + half + i, high);
    }
  }
}

template <class E, int N, class Act>
__global__ void gate_mul_kernel(const E* x, E* y, std::int64_t packs, std::int64_t width) {
  const std::int64_t p = item(), row_packs = width / N;
  next_may_start();
  previous_done();
  if (p >= packs) return;
  const std::int64_t r = p / row_packs, i = p % row_packs * N;
  float g[N], u[N];
  load<N>(x + r * 2 * width + i, g);
  load<N>(x + r * 2 * width + width + i, u);
#pragma unroll
  for (int j = 0; j < N; ++j) g[j] = gated<E, Act>(g[j], u[j]);
  store<N>(y + r * width + i, g);
}

template <class E, int N, class Act>
__global__ void gate_mul_dx_kernel(const E* dy, const E* x, E* dx, std::int64_t packs,
                                   std::int64_t width) {
  const std::int64_t p = item(), row_packs = width / N;
  if (p >= packs) return;
  const std::int64_t r = p / row_packs, i = p % row_packs * N;
  float g[N], u[N], d[N];
  load<N>(x + r * 2 * width + i, g);
  load<N>(x + r * 2 * width + width + i, u);
  load<N>(dy + r * width + i, d);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float x = g[j], s = sigmoid<E>(Act::z(x)), act = x * s;
    g[j] = d[j] * u[j] * (s + act * (1.0f - s) * Act::dz(x));
    u[j] = d[j] * act;
  }
  store<N>(dx + r * 2 * width + i, g);
  store<N>(dx + r * 2 * width + width + i, u);
}

template <class X, class Y, int N>
__global__ void convert_kernel(const X* x, Y* y, std::int64_t count) {
  const std::int64_t i = item() * N;
  if (i + N <= count) {
    float v[N];
    load<N>(x + i, v);
    store<N>(y + i, v);
  } else {
    for (std::int64_t j = i; j < count; ++j) y[j] = from_float<Y>(to_float(x[j]));
  }
}

template <class X, class Y>
void convert(const X* x, Y* y, std::int64_t count) {
  if (count == 0) return;
  if (aligned16(x) && aligned16(y))
    convert_kernel<X, Y, 8><<<blocks_for(ceil_div(count, 8)), kThreads, 0, stream()>>>(x, y, count);
  else
    convert_kernel<X, Y, 1><<<blocks_for(count), kThreads, 0, stream()>>>(x, y, count);
  CHECK_LAUNCH("convert");
}

}  // namespace

void fill_rows(Element e, const void* row, void* y, bool y_is_f32, std::int64_t rows,
               std::int64_t width) {
  if (rows == 0) return;
  with_element(e, [&](auto element) {
    using E = decltype(element);
    const auto* from = static_cast<const E*>(row);
    if (y_is_f32)
      fill_rows_kernel<<<blocks_for(rows * width), kThreads, 0, stream()>>>(
          from, static_cast<float*>(y), rows * width, width);
    else
      fill_rows_kernel<<<blocks_for(rows * width), kThreads, 0, stream()>>>(
          from, static_cast<E*>(y), rows * width, width);
  });
  CHECK_LAUNCH("fill_rows");
}

void gather_rows(Element e, const void* w, std::int64_t k, const std::int32_t* ids,
                 std::int64_t rows, void* y) {
  if (rows == 0) return;
  with_element(e, [&](auto element) {
    using E = decltype(element);
    with_pack<E>(k, {w, y}, [&](auto n) {
      chained(&gather_rows_kernel<E, n>, blocks_for(rows * k / n), kThreads,
              static_cast<const E*>(w), k, ids, rows * k / n, static_cast<E*>(y));
    });
  });
}

void feed_tokens(std::int32_t* tokens, std::int32_t* sources, const std::int32_t* last,
                 std::int64_t rows) {
  if (rows == 0) return;
  feed_tokens_kernel<<<blocks_for(rows), kThreads, 0, stream()>>>(tokens, sources, last, rows);
  CHECK_LAUNCH("feed_tokens");
}

void rms_norm(Element e, const void* x, const void* weight, float eps, float offset, void* y,
              float* rstd, std::int64_t rows, std::int64_t width) {
  if (rows == 0) return;
  with_element(e, [&](auto element) {
    using E = decltype(element);
    with_pack<E>(width, {x, weight, y}, [&](auto n) {
      with_row_warps(width, [&](auto warps) {
        chained(&rms_norm_kernel<E, n, warps>, ceil_div(rows, kThreads / (32 * warps)), kThreads,
                static_cast<const E*>(x), static_cast<const E*>(weight), eps, offset,
                static_cast<E*>(y), rstd, rows, width);
      });
    });
  });
}

void rms_norm_dx(Element e, const void* dy, const void* x, const void* weight, float offset,
                 const float* rstd, void* dx, std::int64_t rows, std::int64_t width) {
  if (rows == 0) return;
  with_element(e, [&](auto element) {
    using E = decltype(element);
    with_pack<E>(width, {dy, x, weight, dx}, [&](auto n) {
      with_row_warps(width, [&](auto warps) {
        const auto blocks = static_cast<unsigned>(ceil_div(rows, kThreads / (32 * warps)));
        rms_norm_dx_kernel<E, n, warps><<<blocks, kThreads, 0, stream()>>>(
            static_cast<const E*>(dy), static_cast<const E*>(x), static_cast<const E*>(weight),
            offset, rstd, static_cast<E*>(dx), rows, width);
      });
    });
  });
  CHECK_LAUNCH("rms_norm_dx");
}

void rotary(Element e, void* x, std::int64_t row_stride, std::int64_t heads, std::int64_t head_dim,
            std::int64_t rotary_dim, bool interleaved, const std::int32_t* positions,
            const float* cos, const float* sin, int direction, std::int64_t rows) {
  const std::int64_t half = rotary_dim / 2;
  if (rows * heads * half == 0) return;
  with_element(e, [&](auto element) {
    using E = decltype(element);
    // Heads and halves of heads begin at whole packs if all of these are multiples of one.
    with_pack<E>(std::gcd(std::gcd(half, head_dim), row_stride), {x, cos, sin}, [&](auto n) {
      const auto kernel = interleaved ? &rotary_kernel<E, n, true> : &rotary_kernel<E, n, false>;
      kernel<<<static_cast<unsigned>(rows), kRotaryThreads, 0, stream()>>>(
          static_cast<E*>(x), row_stride, static_cast<int>(heads), static_cast<int>(head_dim),
          static_cast<int>(half), positions, cos, sin, static_cast<float>(direction));
    });
  });
  CHECK_LAUNCH("rotary");
}

void gate_mul(Element e, Activation activation, const void* x, void* y, std::int64_t rows,
              std::int64_t width) {
  if (rows == 0) return;
  with_element(e, [&](auto element) {
    using E = decltype(element);
    with_pack<E>(width, {x, y}, [&](auto n) {
      with_activation(activation, [&](auto act) {
        chained(&gate_mul_kernel<E, n, decltype(act)>, blocks_for(rows * width / n), kThreads,
                static_cast<const E*>(x), static_cast<E*>(y), rows * width / n, width);
      });
    });
  });
}

void gate_mul_dx(Element e, Activation activation, const void* dy, const void* x, void* dx,
                 std::int64_t rows, std::int64_t width) {
  if (rows == 0) return;
  with_element(e, [&](auto element) {
    using E = decltype(element);
    with_pack<E>(width, {dy, x, dx}, [&](auto n) {
      with_activation(activation, [&](auto act) {
        gate_mul_dx_kernel<E, n, decltype(act)>
            <<<blocks_for(rows * width / n), kThreads, 0, stream()>>>(
                static_cast<const E*>(dy), static_cast<const E*>(x), static_cast<E*>(dx),
                rows * width / n, width);
      });
    });
  });
  CHECK_LAUNCH("gate_mul_dx");
}

void to_f32(const bf16* x, float* y, std::int64_t count) {
  convert(reinterpret_cast<const bf16_t*>(x), y, count);
}

void to_bf16(const float* x, bf16* y, std::int64_t count) {
  convert(x, reinterpret_cast<bf16_t*>(y), count);
}

}  // namespace tandem::cuda
