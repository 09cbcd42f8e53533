// Device memory in reserved address ranges (CUDA's virtual memory management): the physical memory
// behind a range can be given back and taken again at the same address, so that captured graphs and
// pointers stay right, and a range can be mapped by another process of the host, whose GPU then
// reads it over NVLink. Invariant: what `ranges` lists is reserved, and mapped unless given back.
#include "ops/cuda/memory.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include <map>
#include <mutex>

#include "ops/cuda/device.h"
#include "ops/cuda/driver.h"

namespace tandem::cuda {
namespace {

struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity =
      driver<decltype(cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity");
  decltype(&cuMemAddressReserve) reserve =
      driver<decltype(cuMemAddressReserve)>("cuMemAddressReserve");
  decltype(&cuMemAddressFree) unreserve = driver<decltype(cuMemAddressFree)>("cuMemAddressFree");
  decltype(&cuMemCreate) create = driver<decltype(cuMemCreate)>("cuMemCreate");
  decltype(&cuMemRelease) release = driver<decltype(cuMemRelease)>("cuMemRelease");
  decltype(&cuMemMap) map = driver<decltype(cuMemMap)>("cuMemMap");
  decltype(&cuMemUnmap) unmap = driver<decltype(cuMemUnmap)>("cuMemUnmap");
  decltype(&cuMemSetAccess) set_access = driver<decltype(cuMemSetAccess)>("cuMemSetAccess");
  decltype(&cuMemExportToShareableHandle) to_descriptor =
      driver<decltype(cuMemExportToShareableHandle)>("cuMemExportToShareableHandle");
  decltype(&cuMemImportFromShareableHandle) from_descriptor =
      driver<decltype(cuMemImportFromShareableHandle)>("cuMemImportFromShareableHandle");
};
const Driver& cu() {
  static const Driver made;
  return made;
}

struct Range {
  std::size_t bytes = 0;
  CUmemGenericAllocationHandle physical = 0;  // 0: given back
  bool shared = false;                        // can be exported
};

std::mutex guard;
std::map<CUdeviceptr, Range> ranges;

CUmemAllocationProp properties(bool shared = false) {
  int device = 0;
  CHECK_CUDA(cudaGetDevice(&device));
  CUmemAllocationProp p{};
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  p.location.id = device;
  if (shared) p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return p;
}

// This process's device reads and writes the range.
CUresult let_device_access(CUdeviceptr at, std::size_t bytes) {
  CUmemAccessDesc access{};
  access.location = properties().location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return cu().set_access(at, bytes, &access, 1);
}

// Physical memory behind the range; false if there is not enough even once torch's allocator has
// given back what it keeps for later.
bool map_range(CUdeviceptr at, Range& range) {
  const CUmemAllocationProp p = properties(range.shared);
  CUresult made = cu().create(&range.physical, range.bytes, &p, 0);
  if (made == CUDA_ERROR_OUT_OF_MEMORY) {
    c10::cuda::CUDACachingAllocator::emptyCache();
    made = cu().create(&range.physical, range.bytes, &p, 0);
  }
  if (made == CUDA_ERROR_OUT_OF_MEMORY) {
    range.physical = 0;
    return false;
  }
  if (made != CUDA_SUCCESS && range.shared) {  // a device or driver that exports nothing
    range.shared = false;
    return map_range(at, range);
  }
  check_driver(made, "cuMemCreate");
  check_driver(cu().map(at, range.bytes, 0, range.physical, 0), "cuMemMap");
  check_driver(let_device_access(at, range.bytes), "cuMemSetAccess");
  return true;
}

void unmap_range(CUdeviceptr at, Range& range) {
  if (!range.physical) return;
  cu().unmap(at, range.bytes);
  cu().release(range.physical);
  range.physical = 0;
}

void fill_with_zeros(void* memory, std::size_t bytes) {
  CHECK_CUDA(cudaMemsetAsync(memory, 0, bytes, stream()));
}

}  // namespace

void* allocate(std::int64_t bytes, bool shared) {
  const CUmemAllocationProp p = properties(shared);
  std::size_t grain = 0;
  check_driver(cu().granularity(&grain, &p, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
               "cuMemGetAllocationGranularity");
  Range range;
  range.shared = shared;
  range.bytes = (static_cast<std::size_t>(bytes) + grain - 1) / grain * grain;
  CUdeviceptr at = 0;
  check_driver(cu().reserve(&at, range.bytes, 0, 0, 0), "cuMemAddressReserve");
  if (!map_range(at, range)) {
    cu().unreserve(at, range.bytes);
    return nullptr;
  }
  const std::lock_guard lock(guard);
  ranges.emplace(at, range);
  auto* memory = reinterpret_cast<void*>(at);
  fill_with_zeros(memory, range.bytes);
  return memory;
}

// At the end of the process the driver may be gone already, so nothing is checked.
void release(void* memory) {
  const std::lock_guard lock(guard);
  const auto found = ranges.find(reinterpret_cast<CUdeviceptr>(memory));
  if (found == ranges.end()) return;
  cudaDeviceSynchronize();
  unmap_range(found->first, found->second);
  cu().unreserve(found->first, found->second.bytes);
  ranges.erase(found);
  cudaGetLastError();
}

void give_back(void* memory) {
  const std::lock_guard lock(guard);
  const auto found = ranges.find(reinterpret_cast<CUdeviceptr>(memory));
  CHECK_CUDA(cudaDeviceSynchronize());
  unmap_range(found->first, found->second);
}

bool take_again(void* memory) {
  const std::lock_guard lock(guard);
  const auto found = ranges.find(reinterpret_cast<CUdeviceptr>(memory));
  if (found->second.physical) return true;
  if (!map_range(found->first, found->second)) return false;
  fill_with_zeros(memory, found->second.bytes);
  return true;
}

int export_memory(void* memory, std::int64_t* bytes) {
  const std::lock_guard lock(guard);
  const auto found = ranges.find(reinterpret_cast<CUdeviceptr>(memory));
  if (found == ranges.end() || !found->second.shared) return -1;
  int descriptor = -1;
  if (cu().to_descriptor(&descriptor, found->second.physical,
                         CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) != CUDA_SUCCESS)
    return -1;
  *bytes = static_cast<std::int64_t>(found->second.bytes);
  return descriptor;
}

void* import_memory(int descriptor, std::int64_t bytes) {
  Range range;
  range.bytes = static_cast<std::size_t>(bytes);
  auto* const handle = reinterpret_cast<void*>(static_cast<std::uintptr_t>(descriptor));
  if (cu().from_descriptor(&range.physical, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) !=
      CUDA_SUCCESS)
    return nullptr;
  CUdeviceptr at = 0;
  check_driver(cu().reserve(&at, range.bytes, 0, 0, 0), "cuMemAddressReserve");
  const bool mapped = cu().map(at, range.bytes, 0, range.physical, 0) == CUDA_SUCCESS;
  // Fails where the two devices cannot reach each other's memory.
  if (mapped && let_device_access(at, range.bytes) == CUDA_SUCCESS) {
    const std::lock_guard lock(guard);
    ranges.emplace(at, range);
    return reinterpret_cast<void*>(at);
  }
  if (mapped) cu().unmap(at, range.bytes);
  cu().release(range.physical);
  cu().unreserve(at, range.bytes);
  return nullptr;
}

std::int64_t free_bytes() {
  std::size_t free = 0, total = 0;
  CHECK_CUDA(cudaMemGetInfo(&free, &total));
  return static_cast<std::int64_t>(free);
}

}  // namespace tandem::cuda
