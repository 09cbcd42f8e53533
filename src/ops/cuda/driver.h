// Functions of the CUDA driver, looked up at run time so that the part links without libcuda.
#pragma once

#include <cuda.h>

#include "ops/cuda/device.h"

namespace tandem::cuda {

template <class F>
F* driver(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  CHECK_CUDA(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result));
  if (result != cudaDriverEntryPointSuccess || !function)
    throw std::runtime_error(std::string("CUDA driver: it has no ") + name);
  return reinterpret_cast<F*>(function);
}

inline void check_driver(CUresult code, const char* call) {
  if (code != CUDA_SUCCESS)
    throw std::runtime_error(std::string("CUDA driver: ") + call + ": error " +
                             std::to_string(static_cast<int>(code)));
}

}  // namespace tandem::cuda
