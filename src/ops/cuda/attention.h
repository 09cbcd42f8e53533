// The ways to compute attention (cudnn.cpp, flash.cpp, paged.cuh, attention.cu); part.cpp chooses
// between them.
#pragma once

#include <vector>

#include "ops/cuda/plan.h"

namespace tandem::cuda {

// attention.cu: any shape up to kMaxGpuHeadDim, either element type, slow.
void write_kv(Element, const AttentionShape&, const AttentionPlan&, const void* qkv, void* k_blocks,
              void* v_blocks);
void plain_attention(Element, const AttentionShape&, const AttentionPlan&, const void* qkv,
                     const void* k_blocks, const void* v_blocks, void* out, float* log_sum_exp);
void plain_attention_backward(Element, const AttentionShape&, const AttentionPlan&, const void* qkv,
                              const void* out, const void* dout, const float* log_sum_exp,
                              void* dqkv);

// key_rows.cu: log-sum-exp [rows, heads] to base 2 -> [heads, rows] to base e.
void natural_by_head(const float* base2, float* natural, std::int64_t rows, std::int64_t heads);
// key_rows.cu: keys and values [total_keys, 2, kv_heads, head_dim] from the rows of a training
// call, and their gradients added back by row in the order of uses. bf16.
void gather_keys(const AttentionShape&, const AttentionPlan&, const void* qkv, void* keys_values);
void add_key_gradients(const AttentionShape&, const AttentionPlan&, const void* d_keys,
                       const void* d_values, void* dqkv);

// flash.cpp: FlashAttention-2 of libtorch_cuda, for bf16 training calls.
bool flash_takes(Element, const AttentionShape&, const AttentionPlan&);
void flash_attention(const AttentionShape&, const AttentionPlan&, const void* qkv, void* out,
                     float* log_sum_exp);
void flash_attention_backward(const AttentionShape&, const AttentionPlan&, const void* qkv,
                              const void* out, const void* dout, const float* log_sum_exp,
                              void* dqkv);

// cudnn.cpp: cuDNN's kernels, for bf16 training calls of fast mode that need not repeat; its
// log_sum_exp is [rows, heads]. cudnn_offsets: what plan.ragged holds.
std::vector<std::int32_t> cudnn_offsets(const AttentionShape&, bool own_rows,
                                        const std::vector<std::int32_t>& cum_rows,
                                        const std::vector<std::int32_t>& cum_keys);
bool cudnn_is_built_in();
bool cudnn_takes(Element, const AttentionShape&, const AttentionPlan&);
void cudnn_attention(const AttentionShape&, const AttentionPlan&, const void* qkv, void* out,
                     float* log_sum_exp);
void cudnn_attention_backward(const AttentionShape&, const AttentionPlan&, const void* qkv,
                              const void* out, const void* dout, const float* log_sum_exp,
                              void* dqkv);

}  // namespace tandem::cuda
