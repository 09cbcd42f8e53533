// The table of kernels on raw pointers: for the CPU one filled table per instruction set, chosen
// once at start by cpuid (or by --cpu-kernels), for a GPU the one that libtandem_cuda.so brings
// (cuda/part.h), whose pointers are device pointers. No torch here.
//
// On the CPU, the invariant everything else stands on: a row's result never depends on how many
// rows a call has, on its neighbours or on the number of threads. Every sum over the inner
// dimension has one fixed shape: chains of fused multiply-adds in ascending order (GEMM, attention)
// or sixteen lanes by element index modulo 16, added in one fixed tree (norms, softmax). Threads
// cut rows and columns of the result, never a sum. AVX2 and AVX-512 tables give the same bits;
// `portable` has no FMA and therefore bits of its own, and so have the bf16 products of
// `avx512bf16`.
//
// Layouts: on a GPU every matrix is row-major. On the CPU a matrix W[n, k] used as y = x·Wᵀ is
// stored in panels of 16 rows:
//   f32:  W[n/16][k][n%16]
//   bf16: W[n/16][k/2][n%16][k%2]   (pairs along k, what bf16 dot products read)
// padded with zero rows to a multiple of 16 (and one zero k for odd k in bf16).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tandem {

struct bf16 {
  std::uint16_t bits;
};

enum class Element : std::uint8_t { f32, bf16 };
// Whose memory a pointer means, and so whose kernels compute on it.
enum class Place : std::uint8_t { cpu, cuda };
enum class Activation : std::uint8_t { silu, gelu_tanh };

inline constexpr std::int64_t kPanel = 16;        // rows of W in one panel
inline constexpr std::int64_t kBlockTokens = 16;  // positions in one KV block

inline std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

// Rows of one sequence in a call. Its keys lie at positions [0, position_begin + num_rows).
struct Segment {
  std::int64_t row_begin = 0;
  std::int64_t num_rows = 0;
  std::int64_t position_begin = 0;
  const std::int32_t* blocks = nullptr;  // block of positions [16·i, 16·i + 16)
  std::int64_t num_blocks = 0;
  const std::int32_t* key_rows = nullptr;  // training only: row of this call that holds each key
  std::int64_t group = 0;                  // training only: segments that share keys share a group
};

// Row `row` of a call stores its key and value at slot = block · 16 + offset.
struct KvWrite {
  std::int64_t row = 0;
  std::int64_t slot = 0;
};

struct AttentionShape {
  std::int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
  float scale = 1.0f;
  std::int64_t window = 0;  // 0: all earlier keys; w: keys at positions > p - w

  std::int64_t qkv_width() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
  std::int64_t padded_dim() const { return round_up(head_dim, 16); }
  // One block of one layer: K as [kv_head][head_dim][16], V as [kv_head][16][padded_dim].
  std::int64_t k_block_elements() const { return num_kv_heads * head_dim * kBlockTokens; }
  std::int64_t v_block_elements() const { return num_kv_heads * kBlockTokens * padded_dim(); }
};

// One token to draw.
struct SampleRow {
  std::int64_t row = 0;      // of the logits; several draws may share one
  double temperature = 1.0;  // 0: greedy, log-probability then at temperature 1
  std::uint64_t seed = 0, sample_id = 0, position = 0;
  bool evaluation = false;
};

struct AdamWStep {
  float lr = 0, beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, weight_decay = 0;
  float bias_correction1 = 1, bias_correction2 = 1;  // 1 - beta^t
  float grad_scale = 1;                              // clip coefficient
};

// x, y, dy, dx of element type E: [rows, width] row-major, leading dimension = width. Where the
// place is cuda, write_panels, read_panels, write_kv, attention and attention_backward are null:
// rows are copied, and attention goes through the plans of cuda/part.h.
struct Kernels {
  const char* name;
  Place place;

  // y[m, n] = sum_k x[m, k]·W[n, k] (+ bias[n]); y in E, or f32 when y_is_f32.
  void (*linear)(Element, const void* x, const void* w, const void* bias, void* y, bool y_is_f32,
                 std::int64_t rows, std::int64_t n, std::int64_t k);
  // dx[m, k] = sum_n dy[m, n]·W[n, k]; dy in E or f32, dx in E.
  void (*linear_dx)(Element, const void* dy, bool dy_is_f32, const void* w, void* dx,
                    std::int64_t rows, std::int64_t n, std::int64_t k);
  // dw[n, k] (row-major f32) += sum_m dy[m, n]·x[m, k], or = when not accumulate.
  void (*linear_dw)(Element, const void* dy, bool dy_is_f32, const void* x, float* dw,
                    bool accumulate, std::int64_t rows, std::int64_t n, std::int64_t k);
  // db[n] += sum_m dy[m, n].
  void (*bias_dw)(Element, const void* dy, float* db, std::int64_t rows, std::int64_t n);
  // Panels from and to row-major f32: rows [row_begin, row_begin + rows) of a storage of k columns.
  void (*write_panels)(Element, void* w, std::int64_t k, std::int64_t row_begin, std::int64_t rows,
                       const float* source);
  void (*read_panels)(Element, const void* w, std::int64_t k, std::int64_t row_begin,
                      std::int64_t rows, float* target);
  // y[r, :] = row ids[r] of a panelled matrix.
  void (*gather_rows)(Element, const void* w, std::int64_t k, const std::int32_t* ids,
                      std::int64_t rows, void* y);
  // dw[ids[r], :] += dy[r, :] in the order of rows; rows of skipped_id are left out (-1: none).
  void (*add_rows)(Element, const void* dy, const std::int32_t* ids, std::int64_t skipped_id,
                   float* dw, std::int64_t rows, std::int64_t k);

  // y = x·rsqrt(mean(x²) + eps)·(weight + offset); rstd[rows] is kept for backward when not null.
  void (*rms_norm)(Element, const void* x, const void* weight, float eps, float offset, void* y,
                   float* rstd, std::int64_t rows, std::int64_t width);
  void (*rms_norm_dx)(Element, const void* dy, const void* x, const void* weight, float offset,
                      const float* rstd, void* dx, std::int64_t rows, std::int64_t width);
  void (*rms_norm_dw)(Element, const void* dy, const void* x, const float* rstd, float* dw,
                      std::int64_t rows, std::int64_t width);
  // Rotates pairs (i, i + rotary_dim/2), or (2i, 2i + 1) when interleaved, of each of the first
  // `heads` heads of a row, in place; elements from rotary_dim on stay as they are.
  // cos/sin: [max_position, rotary_dim/2] f32; direction -1 undoes it (backward).
  void (*rotary)(Element, void* x, std::int64_t row_stride, std::int64_t heads,
                 std::int64_t head_dim, std::int64_t rotary_dim, bool interleaved,
                 const std::int32_t* positions, const float* cos, const float* sin, int direction,
                 std::int64_t rows);
  // y = activation(gate)·up, x = [gate | up] of 2·width columns.
  void (*gate_mul)(Element, Activation, const void* x, void* y, std::int64_t rows,
                   std::int64_t width);
  void (*gate_mul_dx)(Element, Activation, const void* dy, const void* x, void* dx,
                      std::int64_t rows, std::int64_t width);
  void (*to_f32)(const bf16* x, float* y, std::int64_t count);
  void (*to_bf16)(const float* x, bf16* y, std::int64_t count);

  // K and V of qkv rows into their blocks of one layer.
  void (*write_kv)(Element, const AttentionShape&, const void* qkv, const KvWrite* writes,
                   std::int64_t num_writes, void* k_blocks, void* v_blocks);
  // out[rows, num_heads·head_dim] from q of qkv[rows, qkv_width] and the blocks of one layer.
  void (*attention)(Element, const AttentionShape&, const void* qkv, const Segment* segments,
                    std::int64_t num_segments, const void* k_blocks, const void* v_blocks,
                    void* out);
  // dqkv from dout; keys and values are read from the qkv rows by Segment::key_rows.
  void (*attention_backward)(Element, const AttentionShape&, const void* qkv, const void* dout,
                             const Segment* segments, std::int64_t num_segments, void* dqkv,
                             std::int64_t rows);

  // logits[rows, vocab] f32, scaled by 1/temperature: log-probability of ids[r], log-sum-exp of
  // the scaled logits and (when not null) entropy of each row.
  void (*log_softmax_gather)(const float* logits, const std::int32_t* ids, float temperature,
                             float* log_probs, float* log_sum_exp, float* entropy,
                             std::int64_t rows, std::int64_t vocab);
  // In place: logits become their gradient, given d_log_prob[rows] and d_entropy[rows] (or null).
  void (*log_softmax_backward)(float* logits, const std::int32_t* ids, float temperature,
                               const float* log_sum_exp, const float* entropy,
                               const float* d_log_prob, const float* d_entropy, std::int64_t rows,
                               std::int64_t vocab);
  // One token a draw and its log-probability, computed as log_softmax_gather does. draws, tokens
  // and log_probs are the host's, whatever the place.
  void (*sample)(const float* logits, std::int64_t vocab, const SampleRow* draws,
                 std::int64_t num_draws, std::int32_t* tokens, float* log_probs);

  // Adds the checksum (checksum.h) of rows of panels, or of row-major elements, to sums[2]; the
  // first row is row first_row of its whole tensor.
  void (*checksum_panels)(Element, const void* w, std::int64_t k, std::int64_t row_begin,
                          std::int64_t rows, std::int64_t first_row, std::uint32_t* sums);
  void (*checksum_flat)(Element, const void* x, std::int64_t rows, std::int64_t cols,
                        std::int64_t first_row, std::uint32_t* sums);
  // Whole panels of `rows` rows (rounded up) from one place to another, and the checksum of those
  // rows in the same pass. Both begin at a panel and are 32-byte aligned.
  void (*copy_panels)(Element, const void* from, void* to, std::int64_t k, std::int64_t rows,
                      std::int64_t first_row, std::uint32_t* sums);

  // Sum of squares in double over chunks of 65,536 elements: sums[ceil(count/65536)], the host's.
  void (*sum_squares)(const float* x, std::int64_t count, double* sums);
  void (*add_f32)(float* x, const float* y, std::int64_t count);  // x += y
  void (*copy_f32)(const float* x, float* y, std::int64_t count);
  // Decoupled weight decay (Loshchilov & Hutter 2019), as torch.optim.AdamW orders it.
  void (*adamw)(const AdamWStep&, const float* grad, float* master, float* exp_avg,
                float* exp_avg_sq, std::int64_t count);
};

// The CPU tables that this build holds and this processor runs, fastest last.
const Kernels* kernels_by_name(std::string_view name);  // nullptr: unknown or not runnable here
// The CPU table in use; `auto` until select_kernels is called.
const Kernels& kernels();
// name: auto, portable, avx2, avx512, avx512bf16. Throws std::invalid_argument naming what can be
// had here.
void select_kernels(std::string_view name);

inline constexpr std::int64_t kSumChunk = 65536;

}  // namespace tandem
