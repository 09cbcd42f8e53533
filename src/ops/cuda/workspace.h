// What training attention on a GPU takes beside its inputs and outputs, from shapes alone. The
// choice of a way (cudnn.cpp) and the estimate of a run's memory (trainer/memory.cpp) both go by
// it. The accumulators are those of sdpa_backward in cuDNN's front end 1.16, in f32: queries'
// gradients as far apart as qkv rows, and for grouped heads keys' and values' gradients of every
// query head; of mha_varlen_bwd in torch 2.11, which takes the latter in bf16.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "ops/kernels/kernels.h"

namespace tandem {

// A backward that wants more from cuDNN goes through FlashAttention-2, which takes about half.
inline constexpr std::int64_t kMaxCudnnWorkspace = std::int64_t{4} << 30;

// Rows or keys of a call as cuDNN's plans are built for: rounded up by less than an eighth, so that
// calls of about a length share a plan, eight between a power of two and the next.
inline std::int64_t rounded_total(std::int64_t n) {
  const std::int64_t least = std::max<std::int64_t>(n, 128);
  return round_up(least,
                  static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(least))) / 8);
}

// Of a key and its value, the elements of their gradients for each query head; 0 if key heads are
// not grouped, since then they are added up where they go.
inline std::int64_t gradients_by_query_head(const AttentionShape& s) {
  return s.num_heads == s.num_kv_heads ? 0 : 2 * s.num_heads * s.head_dim;
}

// Bytes. rows, keys: of all segments.
inline std::int64_t cudnn_workspace(const AttentionShape& s, std::int64_t rows, std::int64_t keys) {
  return 4 * rounded_total(rows) * (s.qkv_width() + s.num_heads) +
         4 * rounded_total(keys) * gradients_by_query_head(s);
}
inline std::int64_t flash_workspace(const AttentionShape& s, std::int64_t rows, std::int64_t keys) {
  return 4 * rows * s.num_heads * (s.head_dim + 1) + 2 * keys * gradients_by_query_head(s);
}

}  // namespace tandem
