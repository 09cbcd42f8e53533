// The face of libtandem_cuda.so, the part of Tandem that computes on NVIDIA GPUs. The program is
// built without it and loads it when a run wants a GPU (ops/place.h); what crosses the border is
// this one table of functions, built by the same compiler from the same tree.
//
// All work of a thread goes to the stream that is current in torch for that thread, so torch's own
// operations and these kernels keep their order. A CUDA error is thrown as std::runtime_error with
// the call's name.
#pragma once

#include <cstdint>

#include "ops/kernels/kernels.h"

namespace tandem {

// Counts changes of this header; the loader refuses a part of another version.
inline constexpr int kCudaPartVersion = 5;

// The rows of one forward call, as the host describes them.
struct AttentionCall {
  const Segment* segments = nullptr;
  std::int64_t num_segments = 0;
  const KvWrite* writes = nullptr;
  std::int64_t num_writes = 0;
  std::int64_t rows = 0;
};

// The same on the device, with what the attention kernels need besides; made once a call and used
// by all of its layers, and by its backward pass. Defined in the part.
struct AttentionPlan;

struct CudaPart {
  int version = 0;
  int device = 0;                    // CUDA's ordinal
  const char* device_name = "";      // "NVIDIA H200"
  std::int64_t device_bytes = 0;     // memory of the device
  const Kernels* kernels = nullptr;  // its pointers are device pointers

  // Exact mode: a row's forward result is the same bits whatever call it is in, so that trainer and
  // engine agree exactly (docs/exact-gpu.md). Off at first; to be set before any work.
  void (*set_exact)(bool exact) = nullptr;

  // Memory of the device; zero-filled. Null if there is not enough.
  void* (*allocate)(std::int64_t bytes) = nullptr;
  void (*release)(void* memory) = nullptr;
  // Host memory to the device and back; both return when the copy is done.
  void (*write)(void* to, const void* host, std::int64_t bytes) = nullptr;
  void (*read)(void* host, const void* from, std::int64_t bytes) = nullptr;
  void (*zero)(void* memory, std::int64_t bytes) = nullptr;

  AttentionPlan* (*plan_attention)(Element, const AttentionShape&, const AttentionCall&) = nullptr;
  void (*free_plan)(AttentionPlan*) = nullptr;
  // A plan for `rows` sequences of one row each and up to `pages` KV blocks in all, which update
  // fills anew at the same addresses, so that a captured graph reads each step's.
  AttentionPlan* (*reserve_plan)(std::int64_t rows, std::int64_t pages) = nullptr;
  void (*update_plan)(AttentionPlan*, Element, const AttentionShape&,
                      const AttentionCall&) = nullptr;
  // out[rows, num_heads·head_dim] from qkv[rows, qkv_width]. Segments with key_rows read keys and
  // values from those rows; others write theirs into the layer's blocks first and read the blocks.
  // log_sum_exp: f32 [num_heads, rows] for backward, or null.
  void (*attention)(Element, const AttentionShape&, const AttentionPlan*, const void* qkv,
                    void* k_blocks, void* v_blocks, void* out, float* log_sum_exp) = nullptr;
  // dqkv from dout; only for plans whose segments have key_rows.
  void (*attention_backward)(Element, const AttentionShape&, const AttentionPlan*, const void* qkv,
                             const void* out, const void* dout, const float* log_sum_exp,
                             void* dqkv) = nullptr;
  // sum = x + delta and y = rms_norm(sum) in one pass; backward: dx = d_sum + the norm's gradient.
  void (*add_rms_norm)(Element, const void* x, const void* delta, const void* weight, float eps,
                       float offset, void* sum, void* y, float* rstd, std::int64_t rows,
                       std::int64_t width) = nullptr;
  void (*add_rms_norm_dx)(Element, const void* dy, const void* d_sum, const void* sum,
                          const void* weight, float offset, const float* rstd, void* dx,
                          std::int64_t rows, std::int64_t width) = nullptr;
  // rms_norm of every query and key head of qkv rows, values copied; rstd [rows, heads + kv_heads].
  void (*norm_heads)(Element, const AttentionShape&, const void* qkv, const void* q_weight,
                     const void* k_weight, float eps, float offset, void* y, float* rstd,
                     std::int64_t rows) = nullptr;
  void (*norm_heads_dx)(Element, const AttentionShape&, const void* dy, const void* qkv,
                        const void* q_weight, const void* k_weight, float offset, const float* rstd,
                        void* dx, std::int64_t rows) = nullptr;
  // dw += the gradient of the query heads' weight, or of the key heads'.
  void (*norm_heads_dw)(Element, const AttentionShape&, const void* dy, const void* qkv,
                        const float* rstd, bool keys, float* dw, std::int64_t rows) = nullptr;

  // log_softmax_backward into a matrix of its own, rounded.
  void (*log_softmax_gradient)(const float* logits, const std::int32_t* ids, float temperature,
                               const float* log_sum_exp, const float* entropy,
                               const float* d_log_prob, const float* d_entropy, std::int64_t rows,
                               std::int64_t vocab, bf16* out) = nullptr;

  // `sample` with draws, tokens and log_probs on the device.
  void (*sample_on_device)(const float* logits, std::int64_t vocab, const SampleRow* draws,
                           std::int64_t num_draws, std::int32_t* tokens,
                           float* log_probs) = nullptr;

  // Between begin and end the thread's work is recorded instead of run; memory that it allocates
  // belongs to the graph. All graphs share one pool, so only one runs at a time.
  void* (*begin_graph)() = nullptr;
  void (*end_graph)(void* graph) = nullptr;
  void (*run_graph)(void* graph) = nullptr;
  void (*free_graph)(void* graph) = nullptr;

  // Waits for the device's work of this thread's stream.
  void (*synchronize)() = nullptr;
};

}  // namespace tandem

// Starts the device for this process and sets this thread's stream. Null: `error` says why.
extern "C" const tandem::CudaPart* tandem_cuda_part(int device, char* error,
                                                    std::int64_t error_bytes);
