// Loading the CUDA part, and memory of either place.
#include "ops/place.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <mutex>

#include "base/check.h"
#include "base/process.h"

namespace tandem {
namespace {

std::atomic<const CudaPart*> loaded{nullptr};
std::mutex loading;

}  // namespace

const CudaPart& load_cuda_part() {
  const std::lock_guard lock(loading);
  if (const CudaPart* part = loaded.load()) return *part;
  const std::string path = cuda_part_path();
  TD_CHECK(std::filesystem::exists(path),
           "--device cuda: {} is not there; build it (cmake --preset cuda, needs nvcc) or use "
           "--device cpu",
           path);
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  TD_CHECK(library, "--device cuda: {} cannot be loaded: {}", path, ::dlerror());
  auto* start = reinterpret_cast<decltype(&tandem_cuda_part)>(::dlsym(library, "tandem_cuda_part"));
  TD_CHECK(start, "--device cuda: {} has no tandem_cuda_part: {}", path, ::dlerror());
  char why[512] = "";
  const CudaPart* part = start(0, why, sizeof why);
  TD_CHECK(part, "--device cuda: {}; use --device cpu", why);
  TD_CHECK(part->version == kCudaPartVersion,
           "--device cuda: {} is of version {}, this program wants {}; build both together", path,
           part->version, kCudaPartVersion);
  loaded.store(part);
  return *part;
}

const CudaPart& cuda_part() {
  const CudaPart* part = loaded.load(std::memory_order_acquire);
  TD_CHECK(part, "{}", "place cuda: used before the CUDA part was loaded");
  return *part;
}

const Kernels& kernels(Place place) {
  return place == Place::cpu ? kernels() : *cuda_part().kernels;
}

at::Device device_of(Place place) {
  if (place == Place::cpu) return at::Device(at::DeviceType::CPU);
  return at::Device(at::DeviceType::CUDA, static_cast<at::DeviceIndex>(cuda_part().device));
}

Memory::Memory(Place place, std::int64_t bytes, const char* what, bool shared)
    : place_(place), bytes_(bytes) {
  if (bytes == 0) return;
  if (place == Place::cuda) {
    data_ = cuda_part().allocate(bytes, shared);
    TD_CHECK(data_, "{}: {} bytes of GPU memory are not free", what, bytes);
    return;
  }
  if (shared) {
    file_ = Fd(::memfd_create(what, MFD_CLOEXEC));
    TD_CHECK(file_ && ::ftruncate(file_.get(), bytes) == 0, "{}: {} shared bytes cannot be had: {}",
             what, bytes, std::strerror(errno));
  }
  void* p =
      ::mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
             shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, file_.get(), 0);
  TD_CHECK(p != MAP_FAILED, "{}: {} bytes cannot be mapped: {}", what, bytes, std::strerror(errno));
  ::madvise(p, static_cast<std::size_t>(bytes), MADV_HUGEPAGE);
  data_ = p;
}

Memory::~Memory() {
  if (!data_) return;
  if (place_ == Place::cuda)
    cuda_part().release(data_);
  else
    ::munmap(data_, static_cast<std::size_t>(bytes_));
}

void Memory::swap(Memory& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(file_, other.file_);
}

void Memory::give_back() {
  if (!data_ || given_back_) return;
  if (place_ == Place::cuda)
    cuda_part().give_back(data_);
  else
    ::madvise(data_, static_cast<std::size_t>(bytes_), MADV_DONTNEED);
  given_back_ = true;
}

void Memory::take_again(const char* what) {
  if (!given_back_) return;
  TD_CHECK(place_ == Place::cpu || cuda_part().take_again(data_),
           "{}: {} bytes of GPU memory, given back for training, are not free now ({} are)", what,
           bytes_, cuda_part().free_bytes());
  given_back_ = false;
}

void write_memory(Place place, void* to, const void* host, std::int64_t bytes) {
  if (place == Place::cuda)
    cuda_part().write(to, host, bytes);
  else
    std::memcpy(to, host, static_cast<std::size_t>(bytes));
}

void read_memory(Place place, void* host, const void* from, std::int64_t bytes) {
  if (place == Place::cuda)
    cuda_part().read(host, from, bytes);
  else
    std::memcpy(host, from, static_cast<std::size_t>(bytes));
}

void zero_memory(Place place, void* memory, std::int64_t bytes) {
  if (place == Place::cuda)
    cuda_part().zero(memory, bytes);
  else
    std::memset(memory, 0, static_cast<std::size_t>(bytes));
}

}  // namespace tandem
