// Copies of weights on the device that are read back, many pieces in one launch: a thread compares
// what it stored with what it read, while it still lies in the L2 cache. Pieces that follow each
// other at both ends are one run. Memory works best when the words under way lie close together, so
// a thread takes one word and a block is short. The runs are arguments of the kernel rather than a
// table in memory, so that a block's first load waits for no other; with that and the rest of its
// form the kernel is as fast as a device copy (bench/results/gpu-2026-11-30.md).
#include <algorithm>
#include <vector>

#include "ops/cuda/device.cuh"
#include "ops/cuda/kernels.h"

namespace tandem::cuda {
namespace {

__device__ inline std::uint32_t different(const uint4& a, const uint4& b) {
  return (a.x ^ b.x) | (a.y ^ b.y) | (a.z ^ b.z) | (a.w ^ b.w);
}
__device__ inline std::uint32_t different(unsigned char a, unsigned char b) { return a ^ b; }

// What one launch copies; small enough for a kernel's arguments.
constexpr int kMaxRuns = 128;
struct Runs {
  int count = 0;
  std::int32_t tiles_begin[kMaxRuns];
  BytesCopy run[kMaxRuns];
};

constexpr int kBlock = 256;

// W: 16 bytes, or one. Sets *differ if anything does. The loads keep their lines, which is faster
// than to let them go at once.
template <class W>
__global__ void __launch_bounds__(kBlock)
    copy_kernel(const __grid_constant__ Runs runs, std::uint32_t* differ) {
  const int index = find_piece(runs.tiles_begin, runs.count);
  const BytesCopy& run = runs.run[index];
  const std::int64_t tile = static_cast<std::int64_t>(blockIdx.x) - runs.tiles_begin[index];
  const std::int64_t at = tile * kBlock + threadIdx.x;
  if (at >= run.bytes / static_cast<std::int64_t>(sizeof(W))) return;
  W* const to = static_cast<W*>(run.to) + at;
  const W v = static_cast<const W*>(run.from)[at];
  __stcg(to, v);
  if (different(v, __ldcg(to)) != 0) *differ = 1;
}

template <class W>
void copy_runs(const std::vector<BytesCopy>& copies, std::uint32_t* differ) {
  constexpr std::int64_t kTile = sizeof(W) * kBlock;
  for (std::size_t first = 0; first < copies.size(); first += kMaxRuns) {
    Runs runs;
    runs.count = static_cast<int>(std::min<std::size_t>(kMaxRuns, copies.size() - first));
    std::int64_t tiles = 0;
    for (int i = 0; i < runs.count; ++i) {
      runs.run[i] = copies[first + static_cast<std::size_t>(i)];
      runs.tiles_begin[i] = static_cast<std::int32_t>(tiles);
      tiles += ceil_div(runs.run[i].bytes, kTile);
    }
    copy_kernel<W><<<static_cast<unsigned>(tiles), kBlock, 0, stream()>>>(runs, differ);
    CHECK_LAUNCH("copy_and_compare");
  }
}

__global__ void compare_kernel(const unsigned char* from, const unsigned char* to,
                               std::int64_t bytes, std::uint32_t* differ) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < bytes;
       i += step)
    if (different(from[i], to[i]) != 0) *differ = 1;
}

// A word of the host's memory that kernels write, so that a copy without a fault sends nothing
// back.
std::uint32_t* host_flag() {
  thread_local std::uint32_t* const made = [] {
    void* p = nullptr;
    CHECK_CUDA(cudaHostAlloc(&p, sizeof(std::uint32_t), cudaHostAllocDefault));
    return static_cast<std::uint32_t*>(p);
  }();
  return made;
}

bool follows(const BytesCopy& a, const BytesCopy& b) {
  return static_cast<const char*>(a.from) + a.bytes == b.from &&
         static_cast<char*>(a.to) + a.bytes == b.to;
}

}  // namespace

// Seldom asked, so piece by piece.
void find_differing(const BytesCopy* pieces, std::int64_t count, std::uint32_t* differ) {
  std::uint32_t* const flag = host_flag();
  for (std::int64_t i = 0; i < count; ++i) {
    *flag = 0;
    compare_kernel<<<1024, 256, 0, stream()>>>(static_cast<const unsigned char*>(pieces[i].from),
                                               static_cast<const unsigned char*>(pieces[i].to),
                                               pieces[i].bytes, flag);
    CHECK_LAUNCH("compare");
    CHECK_CUDA(cudaStreamSynchronize(stream()));
    differ[i] = *flag;
  }
  if (std::all_of(differ, differ + count, [](std::uint32_t d) { return d == 0; }))
    std::fill_n(differ, count, 1u);
}

void copy_and_compare(const BytesCopy* pieces, std::int64_t count, std::uint32_t* differ) {
  std::fill_n(differ, count, 0u);
  std::vector<BytesCopy> runs;
  bool wide = true;
  for (std::int64_t i = 0; i < count; ++i) {
    const BytesCopy& p = pieces[i];
    if (p.bytes == 0) continue;
    wide = wide && p.bytes % 16 == 0 && aligned16(p.from) && aligned16(p.to);
    if (!runs.empty() && follows(runs.back(), p))
      runs.back().bytes += p.bytes;
    else
      runs.push_back(p);
  }
  if (runs.empty()) return;
  std::uint32_t* const flag = host_flag();
  *flag = 0;
  if (wide)
    copy_runs<uint4>(runs, flag);
  else
    copy_runs<unsigned char>(runs, flag);
  CHECK_CUDA(cudaStreamSynchronize(stream()));
  if (*flag != 0) find_differing(pieces, count, differ);
}

}  // namespace tandem::cuda
