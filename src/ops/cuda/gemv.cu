// Products with one row, which a decode step of one sequence makes, and of up to four where
// stream_gemm.cu takes none (results in f32, odd widths): bound by reading the weights, so a warp
// reads one row of W with 16-byte loads, several in flight, and keeps the sums of all rows of x.
// bf16 in, f32 sums in a fixed tree.
#include "ops/cuda/device.cuh"
#include "ops/cuda/gemv.h"

namespace tandem::cuda {
namespace {

constexpr int kWarps = 8;

__device__ inline uint4 load_once(const bf16_t* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ inline float2 pair(std::uint32_t bits) {
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}

__device__ inline float add_products(uint4 a, uint4 b, float sum) {
  const std::uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 p = pair(x[i]), q = pair(y[i]);
    sum = fmaf(p.x, q.x, sum);
    sum = fmaf(p.y, q.y, sum);
  }
  return sum;
}

// kParts: loads of a row of W in flight.
template <int kRows, int kParts, class Y>
__global__ void __launch_bounds__(kWarps * 32)
    gemv_kernel(const bf16_t* x, const bf16_t* w, const bf16_t* bias, Y* y, int n, int k) {
  const int lane = threadIdx.x % 32, row = blockIdx.x * kWarps + threadIdx.x / 32;
  next_may_start();
  if (row >= n) return;
  const bf16_t* from = w + static_cast<std::int64_t>(row) * k;
  float sum[kRows] = {};
  int i = lane * 8;
  uint4 part[kParts];
  const auto load_parts = [&] {
#pragma unroll
    for (int j = 0; j < kParts; ++j) part[j] = load_once(from + i + j * 256);
  };
  const bool long_row = i + (kParts - 1) * 256 < k;
  if (long_row) load_parts();  // of weights, while the kernel before ends
  previous_done();
  for (bool loaded = long_row; i + (kParts - 1) * 256 < k; i += kParts * 256, loaded = false) {
    if (!loaded) load_parts();
#pragma unroll
    for (int j = 0; j < kParts; ++j)
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        sum[r] =
            add_products(part[j], *reinterpret_cast<const uint4*>(x + r * k + i + j * 256), sum[r]);
  }
  for (; i < k; i += 256) {
    const uint4 part = load_once(from + i);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      sum[r] = add_products(part, *reinterpret_cast<const uint4*>(x + r * k + i), sum[r]);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float total = warp_sum(sum[r]) + (bias ? to_float(bias[row]) : 0.0f);
    if (lane == 0) y[static_cast<std::int64_t>(r) * n + row] = from_float<Y>(total);
  }
}

template <int kRows, int kParts>
void launch(const void* x, const void* w, const void* bias, void* y, bool y_is_f32, std::int64_t n,
            std::int64_t k) {
  const std::int64_t blocks = ceil_div(n, kWarps);
  const auto *xe = static_cast<const bf16_t*>(x), *we = static_cast<const bf16_t*>(w),
             *be = static_cast<const bf16_t*>(bias);
  if (y_is_f32)
    chained(&gemv_kernel<kRows, kParts, float>, blocks, kWarps * 32, xe, we, be,
            static_cast<float*>(y), n, k);
  else
    chained(&gemv_kernel<kRows, kParts, bf16_t>, blocks, kWarps * 32, xe, we, be,
            static_cast<bf16_t*>(y), n, k);
}

// What is left behind whole rounds is loaded part by part, so the number that leaves less is taken.
template <int kRows>
void run(const void* x, const void* w, const void* bias, void* y, bool y_is_f32, std::int64_t n,
         std::int64_t k) {
  const std::int64_t parts = k / 256;
  if (parts % 5 < parts % 4)
    launch<kRows, 5>(x, w, bias, y, y_is_f32, n, k);
  else
    launch<kRows, 4>(x, w, bias, y, y_is_f32, n, k);
}

}  // namespace

bool gemv_takes(Element e, const void* x, const void* w, std::int64_t rows, std::int64_t n,
                std::int64_t k) {
  return e == Element::bf16 && rows >= 1 && rows <= 4 && k % 8 == 0 && aligned16(x) &&
         aligned16(w) && n < (std::int64_t{1} << 31);
}

void gemv(const void* x, const void* w, const void* bias, void* y, bool y_is_f32, std::int64_t rows,
          std::int64_t n, std::int64_t k) {
  switch (rows) {
    case 1:
      return run<1>(x, w, bias, y, y_is_f32, n, k);
    case 2:
      return run<2>(x, w, bias, y, y_is_f32, n, k);
    case 3:
      return run<3>(x, w, bias, y, y_is_f32, n, k);
    default:
      return run<4>(x, w, bias, y, y_is_f32, n, k);
  }
}

}  // namespace tandem::cuda
