// Copies of weights on the device that are read back, and checksums of weights, many pieces in one
// launch. A block takes a tile. A copying thread compares what it stored with what it read, while
// it still lies in the L2 cache. Memory works best when the tiles under way lie close together, so
// a tile is what a block takes at once (measured: bench/results/gpu-2026-11-30.md); pieces that
// follow each other at both ends are one run. The checksum is that of ops/kernels/checksum.h, whose
// sums have no order, so atomics add them.
#include <algorithm>
#include <cstring>
#include <vector>

#include "ops/cuda/device.cuh"
#include "ops/cuda/kernels.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kTileBytes = 65536;
constexpr std::uint32_t kIndexKey = 0x9e3779b1u;

// The piece of this block: the last one that begins at its tile or before it.
__device__ inline int find_piece(const std::int32_t* tiles_begin, int num_pieces) {
  int low = 0, high = num_pieces;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (tiles_begin[middle] <= static_cast<std::int32_t>(blockIdx.x) ? low : high) = middle;
  }
  return low;
}

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

struct Sums {
  std::uint32_t a = 0, b = 0;
  __device__ void add(std::uint32_t key, std::uint32_t bits) {
    const std::uint32_t t = (bits + key) * ((key >> 15 ^ key << 17) | 1u);
    a += t;
    b += (t ^ t >> 16) * 0x85ebca6bu;
  }
};

// kWide: four words at a time.
template <bool kWide>
__global__ void checksum_kernel(const WordsPiece* pieces, const std::int32_t* tiles_begin,
                                int num_pieces, std::uint32_t* sums) {
  constexpr std::int64_t kTile = kTileBytes / 4;
  constexpr int kStep = kWide ? 4 : 1;
  const int index = find_piece(tiles_begin, num_pieces);
  const WordsPiece piece = pieces[index];
  const std::int64_t begin = (static_cast<std::int64_t>(blockIdx.x) - tiles_begin[index]) * kTile;
  const std::int64_t end = begin + kTile < piece.count ? begin + kTile : piece.count;
  const auto* data = static_cast<const std::uint32_t*>(piece.data);
  Sums found;
#pragma unroll 4
  for (std::int64_t i = begin + threadIdx.x * kStep; i < end; i += kThreads * kStep) {
    const std::uint32_t key = static_cast<std::uint32_t>(piece.first_index + i) * kIndexKey;
    if constexpr (kWide) {
      const uint4 v = *reinterpret_cast<const uint4*>(data + i);
      found.add(key, v.x);
      found.add(key + kIndexKey, v.y);
      found.add(key + 2 * kIndexKey, v.z);
      found.add(key + 3 * kIndexKey, v.w);
    } else {
      found.add(key, data[i]);
    }
  }
  const std::uint32_t a = __reduce_add_sync(0xffffffffu, found.a);
  const std::uint32_t b = __reduce_add_sync(0xffffffffu, found.b);
  if (threadIdx.x % 32 != 0) return;
  atomicAdd(sums + 2 * index, a);
  atomicAdd(sums + 2 * index + 1, b);
}

// The pieces that are not empty and where their tiles begin, for a kernel that leaves some words a
// piece.
template <class P>
class Work {
 public:
  template <class F>
  Work(const P* all, std::int64_t count, F&& bytes_of) {
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t bytes = bytes_of(all[i]);
      if (bytes == 0) continue;
      which_.push_back(i);
      pieces_.push_back(all[i]);
      begins_.push_back(static_cast<std::int32_t>(tiles_));
      tiles_ += ceil_div(bytes, kTileBytes);
    }
  }
  // launch(blocks, pieces, begins, count, words); the words of piece i come to out[i·words], those
  // of an empty one are 0.
  template <class F>
  void run(std::int64_t words, std::uint32_t* out, F&& launch) {
    if (pieces_.empty()) return;
    const std::size_t n = pieces_.size(), piece_bytes = n * sizeof(P), begin_bytes = n * 4;
    std::vector<std::uint32_t> found(n * static_cast<std::size_t>(words));
    const Scratch memory(static_cast<std::int64_t>(piece_bytes + begin_bytes + found.size() * 4));
    auto* on_device = memory.as<P>();
    auto* begins = reinterpret_cast<std::int32_t*>(on_device + n);
    auto* results = reinterpret_cast<std::uint32_t*>(begins + n);
    CHECK_CUDA(
        cudaMemcpyAsync(on_device, pieces_.data(), piece_bytes, cudaMemcpyHostToDevice, stream()));
    CHECK_CUDA(
        cudaMemcpyAsync(begins, begins_.data(), begin_bytes, cudaMemcpyHostToDevice, stream()));
    CHECK_CUDA(cudaMemsetAsync(results, 0, found.size() * 4, stream()));
    launch(static_cast<unsigned>(tiles_), on_device, begins, static_cast<int>(n), results);
    CHECK_CUDA(
        cudaMemcpyAsync(found.data(), results, found.size() * 4, cudaMemcpyDeviceToHost, stream()));
    CHECK_CUDA(cudaStreamSynchronize(stream()));
    for (std::size_t i = 0; i < n; ++i)
      std::copy_n(found.data() + i * static_cast<std::size_t>(words), words,
                  out + which_[i] * words);
  }

 private:
  std::vector<std::int64_t> which_;
  std::vector<P> pieces_;
  std::vector<std::int32_t> begins_;
  std::int64_t tiles_ = 0;
};

}  // namespace

namespace {

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

void checksum_words(const WordsPiece* pieces, std::int64_t count, std::uint32_t* sums) {
  std::fill_n(sums, 2 * count, 0u);
  const bool wide = std::all_of(pieces, pieces + count, [](const WordsPiece& p) {
    return p.count % 4 == 0 && aligned16(p.data);
  });
  Work<WordsPiece> work(pieces, count, [](const WordsPiece& p) { return p.count * 4; });
  work.run(2, sums, [&](unsigned blocks, auto... arguments) {
    const auto kernel = wide ? &checksum_kernel<true> : &checksum_kernel<false>;
    kernel<<<blocks, kThreads, 0, stream()>>>(arguments...);
    CHECK_LAUNCH("checksum_words");
  });
}

}  // namespace tandem::cuda
