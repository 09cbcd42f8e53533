// y = x·Wᵀ (+ bias) for one to four rows of bf16; see gemv.cu.
#pragma once

#include "ops/cuda/device.h"
#include "ops/kernels/kernels.h"

namespace tandem::cuda {

bool gemv_takes(Element, const void* x, const void* w, std::int64_t rows, std::int64_t n,
                std::int64_t k);
void gemv(const void* x, const void* w, const void* bias, void* y, bool y_is_f32, std::int64_t rows,
          std::int64_t n, std::int64_t k);

}  // namespace tandem::cuda
