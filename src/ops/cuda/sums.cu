// Checksums of weights, many pieces in one launch, and copies that are added up as they go: from
// this device, or from the memory of another one over NVLink, which such a read fills. What counts
// of a copy is read back from the target while it lies in the L2 cache, so the sum is that of what
// arrived. The checksum is that of ops/kernels/checksum.h, whose sums have no order, so atomics add
// them. A block takes a tile of a piece.
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "ops/cuda/device.cuh"
#include "ops/cuda/kernels.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;
constexpr std::int64_t kTileWords = 16384;
constexpr std::uint32_t kIndexKey = 0x9e3779b1u;

struct Sums {
  std::uint32_t a = 0, b = 0;
  __device__ void add(std::uint32_t key, std::uint32_t bits) {
    const std::uint32_t t = (bits + key) * ((key >> 15 ^ key << 17) | 1u);
    a += t;
    b += (t ^ t >> 16) * 0x85ebca6bu;
  }
  __device__ void add(std::uint32_t key, const uint4& v) {
    add(key, v.x);
    add(key + kIndexKey, v.y);
    add(key + 2 * kIndexKey, v.z);
    add(key + 3 * kIndexKey, v.w);
  }
};

// kWide: four words an access. kPitched: rows of a piece do not follow each other.
template <bool kWide, bool kPitched>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const WordsPiece* pieces, const std::int32_t* tiles_begin, int num_pieces,
               std::uint32_t* sums) {
  using W = std::conditional_t<kWide, uint4, std::uint32_t>;
  constexpr int kWords = sizeof(W) / 4;
  const int index = find_piece(tiles_begin, num_pieces);
  const WordsPiece piece = pieces[index];
  const std::int64_t total = piece.rows * piece.row_words / kWords;
  const std::int64_t begin =
      (static_cast<std::int64_t>(blockIdx.x) - tiles_begin[index]) * (kTileWords / kWords);
  const std::int64_t end =
      begin + kTileWords / kWords < total ? begin + kTileWords / kWords : total;
  const auto* from = static_cast<const W*>(piece.data);
  auto* to = static_cast<W*>(piece.copy_to);
  const std::int64_t width = piece.row_words / kWords, pitch = piece.pitch_words / kWords;
  Sums found;
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads * kAtOnce) {
    W v[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const std::int64_t at = i + j * kThreads;
      if (at < end) v[j] = __ldcs(from + (kPitched ? at / width * pitch + at % width : at));
    }
    if (to) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (i + j * kThreads < end) __stcg(to + i + j * kThreads, v[j]);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (i + j * kThreads < end) v[j] = __ldcg(to + i + j * kThreads);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const std::int64_t at = i + j * kThreads;
      if (at < end)
        found.add(static_cast<std::uint32_t>(piece.first_index + at * kWords) * kIndexKey, v[j]);
    }
  }
  __shared__ std::uint32_t both[2];
  if (threadIdx.x < 2) both[threadIdx.x] = 0;
  __syncthreads();
  const std::uint32_t a = __reduce_add_sync(0xffffffffu, found.a);
  const std::uint32_t b = __reduce_add_sync(0xffffffffu, found.b);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&both[0], a);
    atomicAdd(&both[1], b);
  }
  __syncthreads();
  if (threadIdx.x < 2) atomicAdd(sums + 2 * index + threadIdx.x, both[threadIdx.x]);
}

bool is_wide(const WordsPiece& p) {
  return p.row_words % 4 == 0 && p.pitch_words % 4 == 0 && aligned16(p.data) &&
         aligned16(p.copy_to);
}

}  // namespace

void sum_words(const WordsPiece* pieces, std::int64_t count, std::uint32_t* sums) {
  std::fill_n(sums, 2 * count, 0u);
  if (count == 0) return;
  bool wide = true, pitched = false;
  const auto n = static_cast<std::size_t>(count);
  // Pieces, where their tiles begin, and room for two sums a piece: one block of bytes.
  const std::size_t begins_at = n * sizeof(WordsPiece), sums_at = begins_at + n * 4;
  std::vector<char> host(sums_at + n * 8);
  std::memcpy(host.data(), pieces, n * sizeof(WordsPiece));
  auto* begins = reinterpret_cast<std::int32_t*>(host.data() + begins_at);
  std::int64_t tiles = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const WordsPiece& p = pieces[i];
    wide = wide && is_wide(p);
    pitched = pitched || (p.rows > 1 && p.pitch_words != p.row_words);
    begins[i] = static_cast<std::int32_t>(tiles);
    tiles += ceil_div(p.rows * p.row_words, kTileWords);
  }
  if (tiles == 0) return;
  const Scratch memory(static_cast<std::int64_t>(host.size()));
  auto* on_device = memory.as<char>();
  CHECK_CUDA(
      cudaMemcpyAsync(on_device, host.data(), host.size(), cudaMemcpyHostToDevice, stream()));
  const auto kernel = wide ? (pitched ? &sum_kernel<true, true> : &sum_kernel<true, false>)
                           : (pitched ? &sum_kernel<false, true> : &sum_kernel<false, false>);
  kernel<<<static_cast<unsigned>(tiles), kThreads, 0, stream()>>>(
      reinterpret_cast<const WordsPiece*>(on_device),
      reinterpret_cast<const std::int32_t*>(on_device + begins_at), static_cast<int>(n),
      reinterpret_cast<std::uint32_t*>(on_device + sums_at));
  CHECK_LAUNCH("sum_words");
  CHECK_CUDA(cudaMemcpyAsync(sums, on_device + sums_at, n * 8, cudaMemcpyDeviceToHost, stream()));
  CHECK_CUDA(cudaStreamSynchronize(stream()));
}

}  // namespace tandem::cuda
