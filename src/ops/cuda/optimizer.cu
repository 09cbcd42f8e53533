// Element-wise work on flat f32 ranges: accumulation, copies and AdamW, which may write the rounded
// masters where a forward pass reads them.
#include <cmath>
#include <vector>

#include "ops/cuda/device.cuh"
#include "ops/cuda/kernels.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 256;
unsigned blocks_for(std::int64_t items) { return static_cast<unsigned>(ceil_div(items, kThreads)); }
__device__ inline std::int64_t item() {
  return static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

// The numbers of a step that do not depend on the element.
struct Factors {
  float b1, one_b1, b2, one_b2, decay, size, root, eps, scale;
};

// The roundings are written out, so that both kernels give the same bits.
__device__ inline void adamw_one(const Factors& f, float g, float& p, float& m, float& v) {
  g *= f.scale;
  m = __fmaf_rn(g, f.one_b1, __fmul_rn(m, f.b1));
  v = __fmaf_rn(__fmul_rn(g, g), f.one_b2, __fmul_rn(v, f.b2));
  const float step = __fdiv_rn(__fmul_rn(f.size, m), __fmaf_rn(__fsqrt_rn(v), f.root, f.eps));
  p = __fmaf_rn(p, f.decay, -step);
}

__global__ void adamw_kernel(Factors f, const float* grad, float* master, float* exp_avg,
                             float* exp_avg_sq, std::int64_t count) {
  const std::int64_t i = item() * 4;
  if (i + 4 <= count) {
    float g[4], p[4], m[4], v[4];
    load<4>(grad + i, g);
    load<4>(master + i, p);
    load<4>(exp_avg + i, m);
    load<4>(exp_avg_sq + i, v);
#pragma unroll
    for (int j = 0; j < 4; ++j) adamw_one(f, g[j], p[j], m[j], v[j]);
    store<4>(master + i, p);
    store<4>(exp_avg + i, m);
    store<4>(exp_avg_sq + i, v);
  } else {
    for (std::int64_t j = i; j < count; ++j)
      adamw_one(f, grad[j], master[j], exp_avg[j], exp_avg_sq[j]);
  }
}

// A tile of one piece a block; all pieces begin at a multiple of four elements, or kWide is false.
constexpr std::int64_t kTile = 8192;
template <bool kWide>
__global__ void adamw_into_kernel(Factors f, const float* grad, float* master, float* exp_avg,
                                  float* exp_avg_sq, const ArenaPiece* pieces,
                                  const std::int32_t* tiles_begin, int num_pieces) {
  int low = 0, high = num_pieces;  // the last piece that begins at this tile or before it
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (tiles_begin[middle] <= static_cast<std::int32_t>(blockIdx.x) ? low : high) = middle;
  }
  const ArenaPiece piece = pieces[low];
  const std::int64_t begin = (static_cast<std::int64_t>(blockIdx.x) - tiles_begin[low]) * kTile;
  const std::int64_t end = begin + kTile < piece.count ? begin + kTile : piece.count;
  auto* to = reinterpret_cast<bf16_t*>(piece.to);
  constexpr int kStep = kWide ? 4 : 1;
  for (std::int64_t i = begin + threadIdx.x * kStep; i < end; i += kThreads * kStep) {
    const std::int64_t at = piece.begin + i;
    float g[kStep], p[kStep], m[kStep], v[kStep];
    load<kStep>(grad + at, g);
    load<kStep>(master + at, p);
    load<kStep>(exp_avg + at, m);
    load<kStep>(exp_avg_sq + at, v);
#pragma unroll
    for (int j = 0; j < kStep; ++j) adamw_one(f, g[j], p[j], m[j], v[j]);
    store<kStep>(master + at, p);
    store<kStep>(exp_avg + at, m);
    store<kStep>(exp_avg_sq + at, v);
    store<kStep>(to + i, p);
  }
}

Factors factors_of(const AdamWStep& step) {
  return {.b1 = step.beta1,
          .one_b1 = 1.0f - step.beta1,
          .b2 = step.beta2,
          .one_b2 = 1.0f - step.beta2,
          .decay = 1.0f - step.lr * step.weight_decay,
          .size = step.lr / step.bias_correction1,
          .root = 1.0f / std::sqrt(step.bias_correction2),
          .eps = step.eps,
          .scale = step.grad_scale};
}

__global__ void add_kernel(float* x, const float* y, std::int64_t count) {
  const std::int64_t i = item();
  if (i < count) x[i] += y[i];
}

}  // namespace

void add_f32(float* x, const float* y, std::int64_t count) {
  if (count == 0) return;
  add_kernel<<<blocks_for(count), kThreads, 0, stream()>>>(x, y, count);
  CHECK_LAUNCH("add_f32");
}

void copy_f32(const float* x, float* y, std::int64_t count) {
  CHECK_CUDA(cudaMemcpyAsync(y, x, static_cast<std::size_t>(count) * 4, cudaMemcpyDeviceToDevice,
                             stream()));
}

void adamw(const AdamWStep& step, const float* grad, float* master, float* exp_avg,
           float* exp_avg_sq, std::int64_t count) {
  if (count == 0) return;
  adamw_kernel<<<blocks_for(ceil_div(count, 4)), kThreads, 0, stream()>>>(
      factors_of(step), grad, master, exp_avg, exp_avg_sq, count);
  CHECK_LAUNCH("adamw");
}

void adamw_into(const AdamWStep& step, const float* grad, float* master, float* exp_avg,
                float* exp_avg_sq, const ArenaPiece* pieces, std::int64_t num_pieces) {
  std::vector<std::int32_t> tiles_begin;
  std::int64_t tiles = 0;
  bool wide = aligned16(grad);
  for (std::int64_t i = 0; i < num_pieces; ++i) {
    const ArenaPiece& p = pieces[i];
    tiles_begin.push_back(static_cast<std::int32_t>(tiles));
    tiles += ceil_div(p.count, kTile);
    wide = wide && p.begin % 4 == 0 && p.count % 4 == 0 && aligned16(p.to);
  }
  if (tiles == 0) return;
  const auto piece_bytes = static_cast<std::size_t>(num_pieces) * sizeof(ArenaPiece);
  const std::size_t begin_bytes = tiles_begin.size() * 4;
  const Scratch memory(static_cast<std::int64_t>(piece_bytes + begin_bytes));
  auto* on_device = memory.as<ArenaPiece>();
  auto* begins = reinterpret_cast<std::int32_t*>(on_device + num_pieces);
  CHECK_CUDA(cudaMemcpyAsync(on_device, pieces, piece_bytes, cudaMemcpyHostToDevice, stream()));
  CHECK_CUDA(
      cudaMemcpyAsync(begins, tiles_begin.data(), begin_bytes, cudaMemcpyHostToDevice, stream()));
  const auto kernel = wide ? &adamw_into_kernel<true> : &adamw_into_kernel<false>;
  kernel<<<static_cast<unsigned>(tiles), kThreads, 0, stream()>>>(
      factors_of(step), grad, master, exp_avg, exp_avg_sq, on_device, begins,
      static_cast<int>(num_pieces));
  CHECK_LAUNCH("adamw_into");
}

}  // namespace tandem::cuda
