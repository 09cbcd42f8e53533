// What every file of the CUDA part shares on the host side: error checks, this thread's stream and
// scratch memory. No torch here, so that nvcc need not read its headers; part.cpp implements it
// over torch's streams and its caching allocator.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace tandem::cuda {

inline void check(cudaError_t code, const char* call) {
  if (code != cudaSuccess)
    throw std::runtime_error(std::string("CUDA: ") + call + ": " + cudaGetErrorString(code));
}
#define CHECK_CUDA(call) ::tandem::cuda::check((call), #call)
// After each launch.
#define CHECK_LAUNCH(kernel) ::tandem::cuda::check(cudaGetLastError(), "launch of " kernel)

// The stream that torch has set for this thread.
cudaStream_t stream();

// Whether a row's forward result must not depend on the call that it is in (part.h).
bool exact_mode();

// Device memory for work of this thread's stream; not initialised. Later work of the same stream
// may get the same bytes, which is right because it runs later.
class Scratch {
 public:
  explicit Scratch(std::int64_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace tandem::cuda
