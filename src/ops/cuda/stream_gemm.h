// y = x·Wᵀ (+ bias) for the few rows of a decode step, bf16 in and out, f32 sums; see
// stream_gemm.cu. y is aligned to two elements.
#pragma once

#include "ops/cuda/device.h"
#include "ops/kernels/kernels.h"

namespace tandem::cuda {

bool stream_takes(Element, const void* x, const void* w, std::int64_t rows, std::int64_t n,
                  std::int64_t k);
void stream_linear(const void* x, const void* w, const void* bias, void* y, std::int64_t rows,
                   std::int64_t n, std::int64_t k);

// y[rows, n/2] = gate_mul (kernels.h) of that product, whose values are rounded to bf16 in between.
bool stream_takes_gated(Element, const void* x, const void* w, std::int64_t rows, std::int64_t n,
                        std::int64_t k);
void stream_gated(Activation, const void* x, const void* w, const void* bias, void* y,
                  std::int64_t rows, std::int64_t n, std::int64_t k);

}  // namespace tandem::cuda
