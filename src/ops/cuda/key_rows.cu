// Keys and values of a training call as FlashAttention and cuDNN want them, one segment after the
// other, and the way back: segments that share a prompt read its rows' keys several times.
#include "ops/cuda/attention.h"
#include "ops/cuda/device.cuh"

namespace tandem::cuda {
namespace {

// One block a key, its threads over the width of keys and values; rows are a multiple of 16 bytes.
__global__ void gather_kernel(const std::int32_t* keys, const bf16_t* qkv, std::int64_t row_width,
                              std::int64_t first, int width, bf16_t* out) {
  const std::int64_t key = blockIdx.x;
  const bf16_t* from = qkv + keys[key] * row_width + first;
  bf16_t* to = out + key * width;
  for (int c = threadIdx.x * 8; c < width; c += blockDim.x * 8)
    *reinterpret_cast<Pack<bf16_t, 8>*>(to + c) =
        *reinterpret_cast<const Pack<bf16_t, 8>*>(from + c);
}

// One block a row: d_keys and d_values [total_keys, width] of its uses, added in their order.
__global__ void add_kernel(const PlannedSegment* segments, const std::int32_t* uses_begin,
                           const KeyUse* uses, const bf16_t* d_keys, const bf16_t* d_values,
                           std::int64_t row_width, std::int64_t first, int width, bf16_t* dqkv) {
  const std::int64_t row = blockIdx.x;
  for (int c = threadIdx.x * 8; c < 2 * width; c += blockDim.x * 8) {
    const bf16_t* from = c < width ? d_keys + c : d_values + c - width;
    float sum[8] = {};
    for (int u = uses_begin[row]; u < uses_begin[row + 1]; ++u) {
      const std::int64_t key = segments[uses[u].segment].keys_begin + uses[u].position;
      float part[8];
      load<8>(from + key * width, part);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] += part[j];
    }
    store<8>(dqkv + row * row_width + first + c, sum);
  }
}

__global__ void natural_kernel(const float* base2, float* natural, std::int64_t rows,
                               std::int64_t heads) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (i < rows * heads)
    natural[i % heads * rows + i / heads] = base2[i] * 0.693147180559945309f;  // ln 2
}

}  // namespace

void natural_by_head(const float* base2, float* natural, std::int64_t rows, std::int64_t heads) {
  natural_kernel<<<static_cast<unsigned>(ceil_div(rows * heads, 256)), 256, 0, stream()>>>(
      base2, natural, rows, heads);
  CHECK_LAUNCH("natural_by_head");
}

void gather_keys(const AttentionShape& s, const AttentionPlan& plan, const void* qkv,
                 void* keys_values) {
  gather_kernel<<<static_cast<unsigned>(plan.total_keys), 128, 0, stream()>>>(
      plan.keys, static_cast<const bf16_t*>(qkv), s.qkv_width(), s.num_heads * s.head_dim,
      static_cast<int>(2 * s.num_kv_heads * s.head_dim), static_cast<bf16_t*>(keys_values));
  CHECK_LAUNCH("gather_keys");
}

void add_key_gradients(const AttentionShape& s, const AttentionPlan& plan, const void* d_keys,
                       const void* d_values, void* dqkv) {
  add_kernel<<<static_cast<unsigned>(plan.rows), 128, 0, stream()>>>(
      plan.segments, plan.uses_begin, plan.uses, static_cast<const bf16_t*>(d_keys),
      static_cast<const bf16_t*>(d_values), s.qkv_width(), s.num_heads * s.head_dim,
      static_cast<int>(s.num_kv_heads * s.head_dim), static_cast<bf16_t*>(dqkv));
  CHECK_LAUNCH("add_key_gradients");
}

}  // namespace tandem::cuda
