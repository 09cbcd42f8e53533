// Sums over rows, in an order that depends on the shape alone: a column is cut into fixed chunks of
// rows, each chunk added in ascending order by one thread, the chunks then in ascending order.
#include <vector>

#include "ops/cuda/device.cuh"
#include "ops/cuda/kernels.h"

namespace tandem::cuda {
namespace {

constexpr int kColumns = 32, kChunkRows = 64;

// One warp a chunk and 32 columns: partial[chunk, column].
template <class E, bool kNorm>
__global__ void column_chunks(const E* dy, const E* x, const float* rstd, float* partial,
                              std::int64_t rows, std::int64_t width) {
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  const std::int64_t chunk = static_cast<std::int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  const std::int64_t first = chunk * kChunkRows;
  if (c >= width || first >= rows) return;
  const std::int64_t last = first + kChunkRows < rows ? first + kChunkRows : rows;
  float sum = 0;
  for (std::int64_t r = first; r < last; ++r) {
    float d = to_float(dy[r * width + c]);
    if constexpr (kNorm) d *= to_float(x[r * width + c]) * rstd[r];
    sum += d;
  }
  partial[chunk * width + c] = sum;
}

// out[column] (+)= the chunks from blockIdx.y·kChunkRows on, one thread a column.
__global__ void add_chunks(const float* partial, float* out, std::int64_t chunks,
                           std::int64_t width, bool add) {
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * 128 + threadIdx.x;
  if (c >= width) return;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.y) * kChunkRows;
  const std::int64_t last = first + kChunkRows < chunks ? first + kChunkRows : chunks;
  float sum = 0;
  for (std::int64_t i = first; i < last; ++i) sum += partial[i * width + c];
  float* to = out + static_cast<std::int64_t>(blockIdx.y) * width + c;
  *to = add ? *to + sum : sum;
}

template <class E, bool kNorm>
void sum_columns(const void* dy, const void* x, const float* rstd, float* out, std::int64_t rows,
                 std::int64_t width) {
  if (rows == 0) return;
  std::int64_t chunks = ceil_div(rows, kChunkRows);
  const Scratch first(chunks * width * 4), second(ceil_div(chunks, kChunkRows) * width * 4);
  const dim3 threads(kColumns, 8);
  column_chunks<E, kNorm><<<dim3(static_cast<unsigned>(ceil_div(width, kColumns)),
                                 static_cast<unsigned>(ceil_div(chunks, threads.y))),
                            threads, 0, stream()>>>(
      static_cast<const E*>(dy), static_cast<const E*>(x), rstd, first.as<float>(), rows, width);
  float *from = first.as<float>(), *to = second.as<float>();
  while (true) {
    const std::int64_t next = ceil_div(chunks, kChunkRows);
    add_chunks<<<dim3(static_cast<unsigned>(ceil_div(width, 128)), static_cast<unsigned>(next)),
                 128, 0, stream()>>>(from, next == 1 ? out : to, chunks, width, next == 1);
    if (next == 1) break;
    chunks = next;
    std::swap(from, to);
  }
  CHECK_LAUNCH("sum_columns");
}

// One block a run of equal ids: its rows are added one after the other.
template <class E>
__global__ void add_rows_kernel(const E* dy, const std::int32_t* sorted, const std::int64_t* order,
                                std::int64_t skipped_id, float* dw, std::int64_t rows,
                                std::int64_t k) {
  const std::int64_t first = blockIdx.x;
  const std::int32_t id = sorted[first];
  if ((first > 0 && sorted[first - 1] == id) || id == skipped_id) return;
  float* g = dw + id * k;
  for (std::int64_t c = threadIdx.x; c < k; c += blockDim.x) {
    float sum = g[c];
    for (std::int64_t i = first; i < rows && sorted[i] == id; ++i)
      sum += to_float(dy[order[i] * k + c]);
    g[c] = sum;
  }
}

__global__ void sum_squares_kernel(const float* x, std::int64_t count, double* sums) {
  __shared__ double shared[256];
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kSumChunk;
  const std::int64_t end = begin + kSumChunk < count ? begin + kSumChunk : count;
  double sum = 0;
  for (std::int64_t i = begin + threadIdx.x; i < end; i += 256)
    sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  shared[threadIdx.x] = sum;
  __syncthreads();
  for (int d = 128; d >= 1; d /= 2) {
    if (static_cast<int>(threadIdx.x) < d) shared[threadIdx.x] += shared[threadIdx.x + d];
    __syncthreads();
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = shared[0];
}

}  // namespace

void bias_dw(Element e, const void* dy, float* db, std::int64_t rows, std::int64_t n) {
  with_element(e, [&](auto element) {
    sum_columns<decltype(element), false>(dy, nullptr, nullptr, db, rows, n);
  });
}

void rms_norm_dw(Element e, const void* dy, const void* x, const float* rstd, float* dw,
                 std::int64_t rows, std::int64_t width) {
  with_element(
      e, [&](auto element) { sum_columns<decltype(element), true>(dy, x, rstd, dw, rows, width); });
}

void add_rows(Element e, const void* dy, const std::int32_t* ids, std::int64_t skipped_id,
              float* dw, std::int64_t rows, std::int64_t k) {
  if (rows == 0) return;
  const Scratch sorted(rows * 4), order(rows * 8);
  sort_ids(ids, rows, sorted.as<std::int32_t>(), order.as<std::int64_t>());
  with_element(e, [&](auto element) {
    using E = decltype(element);
    add_rows_kernel<<<static_cast<unsigned>(rows), 256, 0, stream()>>>(
        static_cast<const E*>(dy), sorted.as<std::int32_t>(), order.as<std::int64_t>(), skipped_id,
        dw, rows, k);
  });
  CHECK_LAUNCH("add_rows");
}

void sum_squares(const float* x, std::int64_t count, double* sums) {
  const std::int64_t chunks = ceil_div(count, kSumChunk);
  if (chunks == 0) return;
  const Scratch out(chunks * 8);
  sum_squares_kernel<<<static_cast<unsigned>(chunks), 256, 0, stream()>>>(x, count,
                                                                          out.as<double>());
  CHECK_LAUNCH("sum_squares");
  CHECK_CUDA(cudaMemcpyAsync(sums, out.as<void>(), static_cast<std::size_t>(chunks) * 8,
                             cudaMemcpyDeviceToHost, stream()));
  CHECK_CUDA(cudaStreamSynchronize(stream()));
}

}  // namespace tandem::cuda
