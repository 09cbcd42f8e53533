// Copies of weights on the device that are read back, and checksums of weights, many pieces in one
// launch. A block takes a tile of a piece. A copying thread compares what it stored with what it
// read, while it still lies in the L2 cache; the checksum is that of ops/kernels/checksum.h, whose
// sums have no order, so atomics add them.
#include <algorithm>
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

// W: 16 bytes, or one.
template <class W>
__global__ void copy_kernel(const BytesCopy* pieces, const std::int32_t* tiles_begin,
                            int num_pieces, std::uint32_t* differ) {
  constexpr int kAtOnce = 4;
  constexpr std::int64_t kTile = kTileBytes / sizeof(W);
  const int index = find_piece(tiles_begin, num_pieces);
  const BytesCopy piece = pieces[index];
  const std::int64_t count = piece.bytes / static_cast<std::int64_t>(sizeof(W));
  const std::int64_t begin = (static_cast<std::int64_t>(blockIdx.x) - tiles_begin[index]) * kTile;
  const std::int64_t end = begin + kTile < count ? begin + kTile : count;
  const auto* from = static_cast<const W*>(piece.from);
  auto* to = static_cast<W*>(piece.to);
  std::uint32_t found = 0;
  for (std::int64_t base = begin + threadIdx.x; base < end; base += kThreads * kAtOnce) {
    W v[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (base + j * kThreads < end) v[j] = __ldcs(from + base + j * kThreads);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (base + j * kThreads < end) __stcg(to + base + j * kThreads, v[j]);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (base + j * kThreads < end) found |= different(v[j], __ldcg(to + base + j * kThreads));
  }
  if (found != 0) atomicOr(differ + index, 1u);
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

void copy_and_compare(const BytesCopy* pieces, std::int64_t count, std::uint32_t* differ) {
  std::fill_n(differ, count, 0u);
  const bool wide = std::all_of(pieces, pieces + count, [](const BytesCopy& p) {
    return p.bytes % 16 == 0 && aligned16(p.from) && aligned16(p.to);
  });
  Work<BytesCopy> work(pieces, count, [](const BytesCopy& p) { return p.bytes; });
  work.run(1, differ, [&](unsigned blocks, auto... arguments) {
    if (wide)
      copy_kernel<uint4><<<blocks, kThreads, 0, stream()>>>(arguments...);
    else
      copy_kernel<unsigned char><<<blocks, kThreads, 0, stream()>>>(arguments...);
    CHECK_LAUNCH("copy_and_compare");
  });
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
