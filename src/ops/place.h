// Where a process computes: the CPU, or one GPU through libtandem_cuda.so. One call loads that
// part; from then on a place names memory and kernels, and nothing above ops/ calls CUDA.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

#include "base/file.h"
#include "ops/cuda/part.h"
#include "ops/kernels/kernels.h"

namespace tandem {

// Loads libtandem_cuda.so from the program's folder and starts the device for this process and
// thread; again: the same. Error: no such file, no GPU, or a part of another build.
const CudaPart& load_cuda_part();
// Error unless load_cuda_part has been called.
const CudaPart& cuda_part();

const Kernels& kernels(Place place);
at::Device device_of(Place place);

// Zero-filled bytes of a place; on the CPU pages of their own, given back whole.
class Memory {
 public:
  Memory() = default;
  // Error naming `what` if there is not enough. shared: another process of this host may map it. On
  // the CPU the pages are a memory file then, which fd() opens and which vanishes with its last
  // user; on a GPU see CudaPart::export_memory.
  Memory(Place place, std::int64_t bytes, const char* what, bool shared = false);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  Place place() const { return place_; }
  void* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }
  int fd() const { return file_.get(); }  // -1: not shared
  // Two memories of one place and size change their content's place.
  void swap(Memory& other) noexcept;

  // Gives the physical memory back and keeps the addresses; nobody may touch them until it is taken
  // again, zero-filled. Error naming `what` if there is not enough of it then.
  void give_back();
  void take_again(const char* what);
  bool given_back() const { return given_back_; }

 private:
  Place place_ = Place::cpu;
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
  bool given_back_ = false;
  Fd file_;
};

// Between host memory and a place's; done on return.
void write_memory(Place place, void* to, const void* host, std::int64_t bytes);
void read_memory(Place place, void* host, const void* from, std::int64_t bytes);
void zero_memory(Place place, void* memory, std::int64_t bytes);

}  // namespace tandem
