// Element-wise work on flat f32 ranges: sums of squares by fixed chunk (so that any cut of the
// range at chunk borders adds up to the same bits), accumulation, and AdamW.
#pragma once

#include <omp.h>

#include "ops/kernels/simd.h"

namespace tandem::TD_ISA {

inline void sum_squares(const float* x, std::int64_t count, double* sums) {
  const std::int64_t chunks = (count + kSumChunk - 1) / kSumChunk;
#pragma omp parallel for schedule(static)
  for (std::int64_t c = 0; c < chunks; ++c) {
    const std::int64_t end = std::min(count, (c + 1) * kSumChunk);
    double lanes[16] = {};
    for (std::int64_t i = c * kSumChunk; i < end; i += 16) {
      const std::int64_t n = std::min<std::int64_t>(16, end - i);
      for (std::int64_t j = 0; j < n; ++j)
        lanes[j] += static_cast<double>(x[i + j]) * static_cast<double>(x[i + j]);
    }
    for (int d = 8; d >= 1; d /= 2)
      for (int i = 0; i < d; ++i) lanes[i] += lanes[i + d];
    sums[c] = lanes[0];
  }
}

inline void add_f32(float* x, const float* y, std::int64_t count) {
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < count; i += 16)
    store_tail(x + i, load_tail(x + i, count - i) + load_tail(y + i, count - i), count - i);
}

inline void copy_f32(const float* x, float* y, std::int64_t count) {
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < count; i += 16)
    store_tail(y + i, load_tail(x + i, count - i), count - i);
}

inline void adamw(const AdamWStep& step, const float* grad, float* master, float* exp_avg,
                  float* exp_avg_sq, std::int64_t count) {
  const V16 b1 = set1(step.beta1), b2 = set1(step.beta2);
  const V16 one_b1 = set1(1.0f - step.beta1), one_b2 = set1(1.0f - step.beta2);
  const V16 decay = set1(1.0f - step.lr * step.weight_decay), eps = set1(step.eps);
  const V16 size = set1(step.lr / step.bias_correction1);
  const V16 root = set1(1.0f / std::sqrt(step.bias_correction2)), scale = set1(step.grad_scale);
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < count; i += 16) {
    const std::int64_t n = count - i;
    const V16 g = load_tail(grad + i, n) * scale;
    const V16 m = load_tail(exp_avg + i, n) * b1 + g * one_b1;
    const V16 v = load_tail(exp_avg_sq + i, n) * b2 + g * g * one_b2;
    const V16 p = load_tail(master + i, n) * decay - size * m / (sqrt(v) * root + eps);
    store_tail(exp_avg + i, m, n);
    store_tail(exp_avg_sq + i, v, n);
    store_tail(master + i, p, n);
  }
}

}  // namespace tandem::TD_ISA
