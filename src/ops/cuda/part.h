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
inline constexpr int kCudaPartVersion = 10;

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

// How a training call attends. In exact mode forward reads blocks, and this is how backward goes.
enum class AttentionWay : std::uint8_t { cudnn, flash, plain };

// Weights of the norms over each query and key head; null: none.
struct HeadNorms {
  const void *q_weight = nullptr, *k_weight = nullptr;
  float eps = 0, offset = 0;
};
// See Kernels::rotary; rotary_dim 0: nothing is turned.
struct Rotation {
  const std::int32_t* positions = nullptr;
  const float *cos = nullptr, *sin = nullptr;
  std::int64_t rotary_dim = 0;
  bool interleaved = false;
};

struct BytesCopy {
  const void* from = nullptr;
  void* to = nullptr;
  std::int64_t bytes = 0;
};

// Rows of words of a tensor (checksum.h), pitch_words apart. The first word has index first_index
// in the whole of the tensor, or of the columns that the rows are; the others follow it.
struct WordsPiece {
  const void* data = nullptr;  // of this device, or imported from another
  void* copy_to = nullptr;     // the rows side by side; null: they are added up only
  std::int64_t rows = 0, row_words = 0, pitch_words = 0;
  std::int64_t first_index = 0;
};

// Where elements [begin, begin + count) of the flat parameter vector lie in a bf16 arena.
struct ArenaPiece {
  std::int64_t begin = 0, count = 0;
  bf16* to = nullptr;
};

// Device memory that goes to a process of a link or comes from it.
struct LinkPart {
  void* data = nullptr;
  std::int64_t bytes = 0;
  int peer = 0;
};
inline constexpr std::int64_t kLinkIdBytes = 128;

// The largest head that its attention kernels take. FlashInfer's take 64 and 128 in bf16, torch's
// FlashAttention (training) multiples of 8, cuDNN's (training in fast mode) multiples of 16 up to
// 128; for the rest there is a slow kernel.
inline constexpr std::int64_t kMaxGpuHeadDim = 256;

struct CudaPart {
  int version = 0;
  int device = 0;                    // CUDA's ordinal
  const char* device_name = "";      // "NVIDIA H200"
  std::int64_t device_bytes = 0;     // memory of the device
  const Kernels* kernels = nullptr;  // its pointers are device pointers

  // Exact mode: a row's forward result is the same bits whatever call it is in, so that trainer and
  // engine agree exactly (docs/exact-gpu.md). Off at first; to be set before any work.
  void (*set_exact)(bool exact) = nullptr;

  // Memory of the device in an address range of its own; zero-filled. Null if there is not enough.
  // shared: another process of the host may import it.
  void* (*allocate)(std::int64_t bytes, bool shared) = nullptr;
  void (*release)(void* memory) = nullptr;
  // A descriptor of shared memory, which the caller closes, and its size; -1: this driver has none.
  int (*export_memory)(void* memory, std::int64_t* bytes) = nullptr;
  // Another process's memory at an address of this one, until release; null where this device
  // cannot reach it.
  void* (*import_memory)(int descriptor, std::int64_t bytes) = nullptr;
  // Of what allocate gave: the physical memory goes back to the device while the addresses stay
  // reserved, and is taken again, zero-filled, at the same addresses (false: there is not enough).
  // Nobody may touch the range in between.
  void (*give_back)(void* memory) = nullptr;
  bool (*take_again)(void* memory) = nullptr;
  std::int64_t (*free_bytes)() = nullptr;  // of the device
  // Host memory to the device and back; both return when the copy is done.
  void (*write)(void* to, const void* host, std::int64_t bytes) = nullptr;
  void (*read)(void* host, const void* from, std::int64_t bytes) = nullptr;
  void (*zero)(void* memory, std::int64_t bytes) = nullptr;
  // Inside the device, in the order of the stream.
  void (*copy)(void* to, const void* from, std::int64_t bytes) = nullptr;
  // Copies all pieces and reads the targets back; done on return. differ[piece], the host's:
  // whether the target holds another bit than was read, 0 if not.
  void (*copy_and_compare)(const BytesCopy* pieces, std::int64_t count,
                           std::uint32_t* differ) = nullptr;
  // The same of pieces that were copied before and found to differ: which do. All, if none does any
  // more: then none is to be trusted.
  void (*find_differing)(const BytesCopy* pieces, std::int64_t count,
                         std::uint32_t* differ) = nullptr;
  // sums[2·piece], sums[2·piece + 1], the host's: the checksum (checksum.h) of each piece; of one
  // that is copied, of its target, read back. Done on return.
  void (*sum_words)(const WordsPiece* pieces, std::int64_t count, std::uint32_t* sums) = nullptr;

  // Kernels::adamw, and the rounded masters into a bf16 arena in the same pass. The pieces ascend
  // and cover the vector.
  void (*adamw_into)(const AdamWStep&, const float* grad, float* master, float* exp_avg,
                     float* exp_avg_sq, const ArenaPiece* pieces,
                     std::int64_t num_pieces) = nullptr;

  // Links between the GPUs of several processes (NCCL). Rank 0 makes the id and hands it to the
  // others. All processes call the same operations in the same order. After an error a link is of
  // no use. in_stream: a link for link_all_gather, else one for the rest.
  void (*new_link_id)(char* id) = nullptr;
  void* (*open_link)(const char* id, int rank, int size, double timeout_seconds,
                     bool in_stream) = nullptr;
  void (*close_link)(void* link) = nullptr;
  // Begins to move parts, after the work of this thread's stream so far and beside what comes
  // later; returns a number to wait for. Parts between two ranks pair up in order; those of a
  // broadcast reach all others' of equal lengths.
  std::int64_t (*link_exchange)(void* link, const LinkPart* sends, std::int64_t num_sends,
                                const LinkPart* receives, std::int64_t num_receives,
                                double timeout_seconds) = nullptr;
  std::int64_t (*link_broadcast)(void* link, const LinkPart* parts, std::int64_t num_parts,
                                 int root, double timeout_seconds) = nullptr;
  // Until that (and what began before it) is done; an error names it.
  void (*link_wait)(void* link, std::int64_t number, double timeout_seconds) = nullptr;
  // all = the `bytes` of rank 0, 1, …, in the order of this thread's stream, as a kernel would; may
  // be captured into a graph.
  void (*link_all_gather)(void* link, const void* mine, void* all, std::int64_t bytes) = nullptr;
  // Until this thread's stream has done its work, gathers included; an error where a peer is gone.
  void (*link_settle)(void* link, double timeout_seconds) = nullptr;

  // Kernels::linear of rows of a matrix that has whole_n of them in all: in exact mode the bits are
  // those of the product with the whole.
  void (*linear_cut)(Element, const void* x, const void* w, const void* bias, void* y,
                     bool y_is_f32, std::int64_t rows, std::int64_t n, std::int64_t k,
                     std::int64_t whole_n) = nullptr;
  // Kernels::gate_mul of Kernels::linear (n columns, of which y has half) in one pass, to the
  // rounding of its sums' order; false, and nothing done, where that would not be faster.
  bool (*linear_gated)(Element, Activation, const void* x, const void* w, const void* bias, void* y,
                       std::int64_t rows, std::int64_t n, std::int64_t k) = nullptr;

  AttentionPlan* (*plan_attention)(Element, const AttentionShape&, const AttentionCall&) = nullptr;
  void (*free_plan)(AttentionPlan*) = nullptr;
  // A plan for `rows` sequences of one row each and up to `pages` KV blocks in all, which update
  // fills anew at the same addresses, so that a captured graph reads each step's. Before an update
  // the step of the update before the last must be done.
  AttentionPlan* (*reserve_plan)(std::int64_t rows, std::int64_t pages) = nullptr;
  void (*update_plan)(AttentionPlan*, Element, const AttentionShape&,
                      const AttentionCall&) = nullptr;
  // Of a call whose every row is written once, and that keeps nothing for backward: norms and
  // rotation of queries and keys, and the writes of keys and values, in one pass over the qkv rows
  // and in place. The bits are those of norm_heads, rotary and attention's own writes.
  void (*finish_qkv)(Element, const AttentionShape&, const AttentionPlan*, void* qkv,
                     const HeadNorms&, const Rotation&, void* k_blocks, void* v_blocks) = nullptr;
  // out[rows, num_heads·head_dim] from qkv[rows, qkv_width]. Segments with key_rows read keys and
  // values from those rows; others write theirs into the layer's blocks first (unless that is done:
  // kv_written) and read the blocks.
  // log_sum_exp: f32 [num_heads · rows] for attention_backward of the same plan, or null; its order
  // is that of the way taken.
  void (*attention)(Element, const AttentionShape&, const AttentionPlan*, const void* qkv,
                    void* k_blocks, void* v_blocks, bool kv_written, void* out,
                    float* log_sum_exp) = nullptr;
  // dqkv from dout, by forward's way; only for plans whose segments have key_rows.
  void (*attention_backward)(Element, const AttentionShape&, const AttentionPlan*, const void* qkv,
                             const void* out, const void* dout, const float* log_sum_exp,
                             void* dqkv) = nullptr;
  // The way of the forward call that was made with this plan and a shape of this window.
  AttentionWay (*attention_way)(const AttentionPlan*, std::int64_t window) = nullptr;
  bool has_cudnn_attention = false;  // built in
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

  // tokens[i] = last[sources[i]], and sources[i] = -1, where sources[i] is not negative: so that it
  // may run again. On the device.
  void (*feed_tokens)(std::int32_t* tokens, std::int32_t* sources, const std::int32_t* last,
                      std::int64_t rows) = nullptr;

  // A mark notes how far this thread's stream has come when it is set; waiting for it waits for the
  // work before it alone.
  void* (*new_mark)() = nullptr;
  void (*set_mark)(void* mark) = nullptr;
  void (*wait_for_mark)(void* mark) = nullptr;
  void (*free_mark)(void* mark) = nullptr;

  // Waits for the device's work of this thread's stream.
  void (*synchronize)() = nullptr;
};

}  // namespace tandem

// Starts the device for this process and sets this thread's stream. Null: `error` says why.
extern "C" const tandem::CudaPart* tandem_cuda_part(int device, char* error,
                                                    std::int64_t error_bytes);
