// Element-wise work on flat f32 ranges: accumulation, copies and AdamW.
#include <cmath>

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

__device__ inline void adamw_one(const Factors& f, float g, float& p, float& m, float& v) {
  g *= f.scale;
  m = m * f.b1 + g * f.one_b1;
  v = v * f.b2 + g * g * f.one_b2;
  p = p * f.decay - f.size * m / (sqrtf(v) * f.root + f.eps);
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
  const Factors f{.b1 = step.beta1,
                  .one_b1 = 1.0f - step.beta1,
                  .b2 = step.beta2,
                  .one_b2 = 1.0f - step.beta2,
                  .decay = 1.0f - step.lr * step.weight_decay,
                  .size = step.lr / step.bias_correction1,
                  .root = 1.0f / std::sqrt(step.bias_correction2),
                  .eps = step.eps,
                  .scale = step.grad_scale};
  adamw_kernel<<<blocks_for(ceil_div(count, 4)), kThreads, 0, stream()>>>(f, grad, master, exp_avg,
                                                                          exp_avg_sq, count);
  CHECK_LAUNCH("adamw");
}

}  // namespace tandem::cuda
