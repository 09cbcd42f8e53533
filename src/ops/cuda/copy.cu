// Copies of weights on the device that are read back, many pieces in one launch. A block takes a
// tile. A thread compares what it stored with what it read, while it still lies in the L2 cache.
// Memory works best when the tiles under way lie close together, so a tile is what a block takes at
// once (measured: bench/results/gpu-2026-11-30.md); pieces that follow each other at both ends are
// one run.
#include <algorithm>
#include <cstring>
#include <vector>

#include "ops/cuda/device.cuh"
#include "ops/cuda/kernels.h"

namespace tandem::cuda {
namespace {

__device__ inline std::uint32_t different(const uint4& a, const uint4& b) {
  return (a.x ^ b.x) | (a.y ^ b.y) | (a.z ^ b.z) | (a.w ^ b.w);
}
__device__ inline std::uint32_t different(unsigned char a, unsigned char b) { return a ^ b; }

// Which piece holds the byte that differs; seldom asked.
__device__ void mark_piece(const void* byte, const BytesCopy* pieces, int num_pieces,
                           std::uint32_t* differ) {
  for (int i = 0; i < num_pieces; ++i) {
    const auto at = static_cast<const char*>(byte) - static_cast<const char*>(pieces[i].to);
    if (at >= 0 && at < pieces[i].bytes) atomicOr(differ + i, 1u);
  }
}

// W: 16 bytes, or one. A tile is what the block's threads take at once.
template <class W, int kBlock, int kAtOnce>
constexpr std::int64_t kCopyTile = sizeof(W) * kBlock* kAtOnce;
template <class W, int kBlock, int kAtOnce>
__global__ void __launch_bounds__(kBlock)
    copy_kernel(const BytesCopy* runs, const std::int32_t* tiles_begin, int num_runs,
                const BytesCopy* pieces, int num_pieces, std::uint32_t* differ) {
  const int index = find_piece(tiles_begin, num_runs);
  const BytesCopy run = runs[index];
  const std::int64_t tile = static_cast<std::int64_t>(blockIdx.x) - tiles_begin[index];
  const std::int64_t first = tile * kBlock * kAtOnce + threadIdx.x;
  const std::int64_t left = run.bytes / static_cast<std::int64_t>(sizeof(W)) - first;
  const W* from = static_cast<const W*>(run.from) + first;
  W* to = static_cast<W*>(run.to) + first;
  W v[kAtOnce];
#pragma unroll
  for (int j = 0; j < kAtOnce; ++j)
    if (j * kBlock < left) v[j] = __ldcs(from + j * kBlock);
#pragma unroll
  for (int j = 0; j < kAtOnce; ++j)
    if (j * kBlock < left) __stcg(to + j * kBlock, v[j]);
#pragma unroll
  for (int j = 0; j < kAtOnce; ++j)
    if (j * kBlock < left && different(v[j], __ldcg(to + j * kBlock)) != 0)
      mark_piece(to + j * kBlock, pieces, num_pieces, differ);
}

bool follows(const BytesCopy& a, const BytesCopy& b) {
  return static_cast<const char*>(a.from) + a.bytes == b.from &&
         static_cast<char*>(a.to) + a.bytes == b.to;
}

// Runs, pieces, where the runs' tiles begin, and room for an answer a piece: one block of bytes.
template <class W, int kBlock, int kAtOnce>
void copy_runs(const std::vector<BytesCopy>& runs, const BytesCopy* pieces, std::int64_t count,
               std::uint32_t* differ) {
  const std::size_t num_runs = runs.size(), n = static_cast<std::size_t>(count);
  const std::size_t begins_at = (num_runs + n) * sizeof(BytesCopy);
  const std::size_t differ_at = begins_at + num_runs * 4;
  std::vector<char> host(differ_at + n * 4);
  std::memcpy(host.data(), runs.data(), num_runs * sizeof(BytesCopy));
  std::memcpy(host.data() + num_runs * sizeof(BytesCopy), pieces, n * sizeof(BytesCopy));
  auto* begins = reinterpret_cast<std::int32_t*>(host.data() + begins_at);
  std::int64_t tiles = 0;
  for (std::size_t i = 0; i < num_runs; ++i) {
    begins[i] = static_cast<std::int32_t>(tiles);
    tiles += ceil_div(runs[i].bytes, kCopyTile<W, kBlock, kAtOnce>);
  }
  const Scratch memory(static_cast<std::int64_t>(host.size()));
  auto* on_device = memory.as<char>();
  CHECK_CUDA(
      cudaMemcpyAsync(on_device, host.data(), host.size(), cudaMemcpyHostToDevice, stream()));
  const auto* device_runs = reinterpret_cast<const BytesCopy*>(on_device);
  copy_kernel<W, kBlock, kAtOnce><<<static_cast<unsigned>(tiles), kBlock, 0, stream()>>>(
      device_runs, reinterpret_cast<const std::int32_t*>(on_device + begins_at),
      static_cast<int>(num_runs), device_runs + num_runs, static_cast<int>(n),
      reinterpret_cast<std::uint32_t*>(on_device + differ_at));
  CHECK_LAUNCH("copy_and_compare");
  CHECK_CUDA(
      cudaMemcpyAsync(differ, on_device + differ_at, n * 4, cudaMemcpyDeviceToHost, stream()));
  CHECK_CUDA(cudaStreamSynchronize(stream()));
}

}  // namespace

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
  if (wide)
    copy_runs<uint4, 512, 2>(runs, pieces, count, differ);
  else
    copy_runs<unsigned char, 256, 4>(runs, pieces, count, differ);
}

}  // namespace tandem::cuda
