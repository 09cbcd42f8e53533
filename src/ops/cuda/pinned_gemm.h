// Exact mode's products of the forward pass: y = x·Wᵀ by one cuBLAS algorithm for each shape of W,
// whatever the number of rows, so that a row's result does not depend on the call it is in.
#pragma once

#include "ops/cuda/device.h"
#include "ops/kernels/kernels.h"

namespace tandem::cuda {

// y[rows, n] = x·Wᵀ, plus y itself if add; W holds n rows of a matrix of whole_n, whose algorithm
// is taken. The first call of a shape chooses the algorithm and proves on random rows that 1, 7, 64
// and 300 rows give the bits of 512, and that n columns are the same alone as among whole_n.
void pinned_linear(Element, const void* x, const void* w, void* y, bool y_is_f32, bool add,
                   std::int64_t rows, std::int64_t n, std::int64_t k, std::int64_t whole_n);

}  // namespace tandem::cuda
