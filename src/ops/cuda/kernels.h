// The functions of the CUDA table, by file; part.cpp puts them together.
#pragma once

#include "ops/cuda/part.h"
#include "ops/kernels/kernels.h"

namespace tandem::cuda {

// gemm.cpp
void linear(Element, const void* x, const void* w, const void* bias, void* y, bool y_is_f32,
            std::int64_t rows, std::int64_t n, std::int64_t k);
void linear_cut(Element, const void* x, const void* w, const void* bias, void* y, bool y_is_f32,
                std::int64_t rows, std::int64_t n, std::int64_t k, std::int64_t whole_n);
bool linear_gated(Element, Activation, const void* x, const void* w, const void* bias, void* y,
                  std::int64_t rows, std::int64_t n, std::int64_t k);
void linear_dx(Element, const void* dy, bool dy_is_f32, const void* w, void* dx, std::int64_t rows,
               std::int64_t n, std::int64_t k);
void linear_dw(Element, const void* dy, bool dy_is_f32, const void* x, float* dw, bool accumulate,
               std::int64_t rows, std::int64_t n, std::int64_t k);

// rowwise.cu
void fill_rows(Element, const void* row, void* y, bool y_is_f32, std::int64_t rows,
               std::int64_t width);
void gather_rows(Element, const void* w, std::int64_t k, const std::int32_t* ids, std::int64_t rows,
                 void* y);
void rms_norm(Element, const void* x, const void* weight, float eps, float offset, void* y,
              float* rstd, std::int64_t rows, std::int64_t width);
void rms_norm_dx(Element, const void* dy, const void* x, const void* weight, float offset,
                 const float* rstd, void* dx, std::int64_t rows, std::int64_t width);
void rotary(Element, void* x, std::int64_t row_stride, std::int64_t heads, std::int64_t head_dim,
            std::int64_t rotary_dim, bool interleaved, const std::int32_t* positions,
            const float* cos, const float* sin, int direction, std::int64_t rows);
void feed_tokens(std::int32_t* tokens, std::int32_t* sources, const std::int32_t* last,
                 std::int64_t rows);
void gate_mul(Element, Activation, const void* x, void* y, std::int64_t rows, std::int64_t width);
void gate_mul_dx(Element, Activation, const void* dy, const void* x, void* dx, std::int64_t rows,
                 std::int64_t width);
void to_f32(const bf16* x, float* y, std::int64_t count);
void to_bf16(const float* x, bf16* y, std::int64_t count);

// reduce.cu
void bias_dw(Element, const void* dy, float* db, std::int64_t rows, std::int64_t n);
void rms_norm_dw(Element, const void* dy, const void* x, const float* rstd, float* dw,
                 std::int64_t rows, std::int64_t width);
void add_rows(Element, const void* dy, const std::int32_t* ids, std::int64_t skipped_id, float* dw,
              std::int64_t rows, std::int64_t k);
void sum_squares(const float* x, std::int64_t count, double* sums);
// part.cpp: `order` such that ids[order[·]] ascend, equal ids in the order of rows; device memory.
void sort_ids(const std::int32_t* ids, std::int64_t rows, std::int32_t* sorted,
              std::int64_t* order);

// fused.cu
void add_rms_norm(Element, const void* x, const void* delta, const void* weight, float eps,
                  float offset, void* sum, void* y, float* rstd, std::int64_t rows,
                  std::int64_t width);
void add_rms_norm_dx(Element, const void* dy, const void* d_sum, const void* x, const void* weight,
                     float offset, const float* rstd, void* dx, std::int64_t rows,
                     std::int64_t width);
void norm_heads(Element, const AttentionShape&, const void* qkv, const void* q_weight,
                const void* k_weight, float eps, float offset, void* y, float* rstd,
                std::int64_t rows);
void finish_qkv(Element, const AttentionShape&, const AttentionPlan*, void* qkv, const HeadNorms&,
                const Rotation&, void* k_blocks, void* v_blocks);
void norm_heads_dx(Element, const AttentionShape&, const void* dy, const void* qkv,
                   const void* q_weight, const void* k_weight, float offset, const float* rstd,
                   void* dx, std::int64_t rows);
void norm_heads_dw(Element, const AttentionShape&, const void* dy, const void* qkv,
                   const float* rstd, bool keys, float* dw, std::int64_t rows);

// softmax.cu
void log_softmax_gather(const float* logits, const std::int32_t* ids, float temperature,
                        float* log_probs, float* log_sum_exp, float* entropy, std::int64_t rows,
                        std::int64_t vocab);
void log_softmax_backward(float* logits, const std::int32_t* ids, float temperature,
                          const float* log_sum_exp, const float* entropy, const float* d_log_prob,
                          const float* d_entropy, std::int64_t rows, std::int64_t vocab);
void log_softmax_gradient(const float* logits, const std::int32_t* ids, float temperature,
                          const float* log_sum_exp, const float* entropy, const float* d_log_prob,
                          const float* d_entropy, std::int64_t rows, std::int64_t vocab, bf16* out);
void sample(const float* logits, std::int64_t vocab, const SampleRow* draws, std::int64_t num_draws,
            std::int32_t* tokens, float* log_probs);
void sample_on_device(const float* logits, std::int64_t vocab, const SampleRow* draws,
                      std::int64_t num_draws, std::int32_t* tokens, float* log_probs);

// copy.cu
void copy_and_compare(const BytesCopy* pieces, std::int64_t count, std::uint32_t* differ);
void find_differing(const BytesCopy* pieces, std::int64_t count, std::uint32_t* differ);

// sums.cu
void sum_words(const WordsPiece* pieces, std::int64_t count, std::uint32_t* sums);

// optimizer.cu
void add_f32(float* x, const float* y, std::int64_t count);
void copy_f32(const float* x, float* y, std::int64_t count);
void adamw(const AdamWStep&, const float* grad, float* master, float* exp_avg, float* exp_avg_sq,
           std::int64_t count);

void adamw_into(const AdamWStep&, const float* grad, float* master, float* exp_avg,
                float* exp_avg_sq, const ArenaPiece* pieces, std::int64_t num_pieces);

// attention.cu
AttentionPlan* plan_attention(Element, const AttentionShape&, const AttentionCall&);
void free_plan(AttentionPlan* plan);
AttentionPlan* reserve_plan(std::int64_t rows, std::int64_t pages);
void update_plan(AttentionPlan* plan, Element, const AttentionShape&, const AttentionCall&);
void attention(Element, const AttentionShape&, const AttentionPlan*, const void* qkv,
               void* k_blocks, void* v_blocks, bool kv_written, void* out, float* log_sum_exp);
void attention_backward(Element, const AttentionShape&, const AttentionPlan*, const void* qkv,
                        const void* out, const void* dout, const float* log_sum_exp, void* dqkv);

}  // namespace tandem::cuda
