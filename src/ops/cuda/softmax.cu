// Log-softmax of f32 logits: log-probability of one id, entropy, gradient and sampling. The logits
// are read once: a warp takes a chunk of 1,024 and leaves its largest value and its sums relative
// to that; then one warp a row puts the chunks together in a fixed tree. Trainer and engine share
// both kernels, so a sampled token's log-probability is the same bits on both sides.
#include <cstring>
#include <vector>

#include "base/philox.h"
#include "ops/cuda/device.cuh"
#include "ops/cuda/kernels.h"

namespace tandem::cuda {
namespace {

constexpr int kChunk = 1024, kLaneItems = kChunk / 32;
constexpr int kWarps = 4;  // chunks a block

struct ChunkStats {
  float top;       // largest scaled logit
  float sum;       // of exp(z - top)
  float weighted;  // of exp(z - top)·(z - top)
  float bad;       // NaN when a logit is NaN or infinite, else 0
  std::int32_t top_id;
};

// Which row of the logits a row of results reads, and at which inverse temperature.
struct Uniform {
  float inv;
  __device__ std::int64_t row(std::int64_t i) const { return i; }
  __device__ float inverse(std::int64_t) const { return inv; }
};
struct Drawn {
  const SampleRow* draws;
  __device__ std::int64_t row(std::int64_t i) const { return draws[i].row; }
  __device__ float inverse(std::int64_t i) const {
    const double t = draws[i].temperature;
    return t == 0.0 ? 1.0f : 1.0f / static_cast<float>(t);
  }
};

// stats[row, chunk]; grid (chunks / kWarps, rows).
template <class Rows>
__global__ void chunk_stats(const float* logits, std::int64_t vocab, std::int64_t chunks, Rows rows,
                            ChunkStats* stats) {
  const std::int64_t chunk = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (chunk >= chunks) return;
  const std::int64_t row = blockIdx.y;
  const int lane = threadIdx.x % 32;
  const float* z = logits + rows.row(row) * vocab + chunk * kChunk;
  const float inv = rows.inverse(row);
  const std::int64_t left = vocab - chunk * kChunk;
  float v[kLaneItems];
  float top = -INFINITY, bad = 0;
  std::int32_t top_id = 0;
#pragma unroll
  for (int i = 0; i < kLaneItems; ++i) {
    const int at = i * 32 + lane;
    v[i] = at < left ? z[at] * inv : -INFINITY;
    if (at < left) bad += v[i] - v[i];
    if (v[i] > top) {
      top = v[i];
      top_id = at;
    }
  }
#pragma unroll
  for (int d = 16; d >= 1; d /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, top, d);
    const std::int32_t other_id = __shfl_xor_sync(0xffffffffu, top_id, d);
    if (other > top || (other == top && other_id < top_id)) {
      top = other;
      top_id = other_id;
    }
  }
  float sum = 0, weighted = 0;
#pragma unroll
  for (int i = 0; i < kLaneItems; ++i) {
    const float shifted = v[i] - top, p = expf(shifted);
    sum += p;
    weighted += p * fmaxf(shifted, -1e30f);
  }
  sum = warp_sum(sum);
  weighted = warp_sum(weighted);
  bad = warp_sum(bad);
  if (lane == 0)
    stats[row * chunks + chunk] = {top, sum, weighted, bad,
                                   static_cast<std::int32_t>(chunk * kChunk + top_id)};
}

struct RowStats {
  float top, sum, log_sum, mean;
  std::int32_t top_id;
};

// By one warp, the same in all lanes.
__device__ RowStats row_stats(const ChunkStats* stats, std::int64_t chunks) {
  const int lane = threadIdx.x % 32;
  RowStats r{-INFINITY, 0, 0, 0, 0};
  for (std::int64_t c = lane; c < chunks; c += 32)
    if (stats[c].top > r.top) {
      r.top = stats[c].top;
      r.top_id = stats[c].top_id;
    }
#pragma unroll
  for (int d = 16; d >= 1; d /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, r.top, d);
    const std::int32_t other_id = __shfl_xor_sync(0xffffffffu, r.top_id, d);
    if (other > r.top || (other == r.top && other_id < r.top_id)) {
      r.top = other;
      r.top_id = other_id;
    }
  }
  float sum = 0, weighted = 0, bad = 0;
  for (std::int64_t c = lane; c < chunks; c += 32) {
    const float shift = stats[c].top - r.top, scale = expf(shift);
    sum += stats[c].sum * scale;
    weighted += (stats[c].weighted + fmaxf(shift, -1e30f) * stats[c].sum) * scale;
    bad += stats[c].bad;
  }
  r.sum = warp_sum(sum);
  r.mean = warp_sum(weighted) / r.sum;
  r.log_sum = logf(r.sum) + warp_sum(bad);
  return r;
}

__global__ void gather_kernel(const float* logits, std::int64_t vocab, std::int64_t chunks,
                              const ChunkStats* stats, const std::int32_t* ids, float inv,
                              float* log_probs, float* log_sum_exp, float* entropy,
                              std::int64_t rows) {
  const std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (r >= rows) return;
  const RowStats s = row_stats(stats + r * chunks, chunks);
  if (threadIdx.x % 32 != 0) return;
  log_probs[r] = (logits[r * vocab + ids[r]] * inv - s.top) - s.log_sum;
  if (log_sum_exp) log_sum_exp[r] = s.top + s.log_sum;
  if (entropy) entropy[r] = s.log_sum - s.mean;
}

// Of the lanes up to this one.
__device__ inline double warp_prefix(double x) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const double other = __shfl_up_sync(0xffffffffu, x, d);
    if (static_cast<int>(threadIdx.x % 32) >= d) x += other;
  }
  return x;
}

// Inverse transform, as on the CPU: the first token at which the running sum passes u·sum, u keyed
// by (seed, sample id, position, training or evaluation). By one warp; the token in all lanes.
__device__ std::int32_t draw(const float* z, std::int64_t vocab, float inv, const RowStats& s,
                             const ChunkStats* stats, std::int64_t chunks, const SampleRow& row) {
  const int lane = threadIdx.x % 32;
  const std::uint64_t high = row.position | (row.evaluation ? std::uint64_t{1} << 63 : 0);
  const auto words = Philox4x32::words(row.sample_id, high, row.seed);
  const double target = uniform_double(words[0], words[1]) * static_cast<double>(s.sum);
  // The chunk: prefix sums of 32 at a time. Should rounding leave the whole sum short of the
  // target, it is the last one with mass.
  double before = 0.0, before_last = 0.0;
  std::int64_t c = -1, last_chunk = 0;
  for (std::int64_t base = 0; base < chunks && c < 0; base += 32) {
    const std::int64_t at = base + lane;
    const float mass = at < chunks ? stats[at].sum * expf(stats[at].top - s.top) : 0.0f;
    const double prefix = warp_prefix(mass);
    const unsigned has = __ballot_sync(0xffffffffu, mass > 0.0f);
    const unsigned past = __ballot_sync(0xffffffffu, mass > 0.0f && before + prefix > target);
    const int chosen = past ? __ffs(past) - 1 : 31 - __clz(has);
    const double ahead = __shfl_sync(0xffffffffu, prefix - static_cast<double>(mass), chosen & 31);
    if (past) {
      c = base + chosen;
      before += ahead;
    } else {
      if (has) {
        last_chunk = base + chosen;
        before_last = before + ahead;
      }
      before += __shfl_sync(0xffffffffu, prefix, 31);
    }
  }
  if (c < 0) {
    c = last_chunk;
    before = before_last;
  }
  const std::int64_t left = vocab - c * kChunk;
  const float* chunk = z + c * kChunk;
  float values[kLaneItems];
#pragma unroll
  for (int i = 0; i < kLaneItems; ++i)
    values[i] = i * 32 + lane < left ? chunk[i * 32 + lane] : -INFINITY;
  std::int32_t last = 0;
#pragma unroll
  for (int i = 0; i < kLaneItems; ++i) {
    const float e = i * 32 + lane < left ? expf(values[i] * inv - s.top) : 0.0f;
    const double prefix = warp_prefix(e);
    const unsigned has = __ballot_sync(0xffffffffu, e > 0.0f);
    const unsigned past = __ballot_sync(0xffffffffu, e > 0.0f && before + prefix > target);
    if (past) return static_cast<std::int32_t>(c * kChunk + i * 32 + __ffs(past) - 1);
    if (has) last = static_cast<std::int32_t>(c * kChunk + i * 32 + 31 - __clz(has));
    before += __shfl_sync(0xffffffffu, prefix, 31);
  }
  return last;  // rounding left the running sum short: the chunk's last token with mass
}

__global__ void sample_kernel(const float* logits, std::int64_t vocab, std::int64_t chunks,
                              const ChunkStats* stats, const SampleRow* draws,
                              std::int64_t num_draws, std::int32_t* tokens, float* log_probs) {
  const std::int64_t d = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (d >= num_draws) return;
  const SampleRow row = draws[d];
  const float* z = logits + row.row * vocab;
  const float inv = Drawn{draws}.inverse(d);
  const RowStats s = row_stats(stats + d * chunks, chunks);
  const std::int32_t id =
      row.temperature == 0.0 ? s.top_id : draw(z, vocab, inv, s, stats + d * chunks, chunks, row);
  if (threadIdx.x % 32 != 0) return;
  tokens[d] = id;
  log_probs[d] = (z[id] * inv - s.top) - s.log_sum;
}

// d logit_j = (d_log_prob·(1[j = id] - p_j) - d_entropy·p_j·(log p_j + H)) / T; out may be logits.
// A thread takes four logits, N side by side, a block kChunk of a row.
template <class Y, int N>
__global__ void backward_kernel(const float* logits, std::int64_t vocab, const std::int32_t* ids,
                                float inv, const float* log_sum_exp, const float* entropy,
                                const float* d_log_prob, const float* d_entropy, Y* out) {
  const std::int64_t r = blockIdx.y;
  const float* z = logits + r * vocab;
  const float lse = log_sum_exp[r], dp = d_log_prob[r];
  const float dh = d_entropy ? d_entropy[r] : 0.0f, h = entropy ? entropy[r] : 0.0f;
  const std::int32_t id = ids[r];
#pragma unroll
  for (int part = 0; part < 4 / N; ++part) {
    const std::int64_t at =
        static_cast<std::int64_t>(blockIdx.x) * kChunk + part * (kChunk / 4 * N) + threadIdx.x * N;
    if (at >= vocab) break;
    float v[N];
    load<N>(z + at, v);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float log_p = v[j] * inv - lse, p = expf(log_p);
      float g = -dp * p;
      if (d_entropy) g -= dh * p * (fmaxf(log_p, -1e30f) + h);
      if (at + j == id) g += dp;
      v[j] = g * inv;
    }
    store<N>(out + r * vocab + at, v);
  }
}

template <class Rows>
void fill_stats(const float* logits, std::int64_t vocab, std::int64_t chunks, Rows rows,
                std::int64_t count, ChunkStats* stats) {
  chunk_stats<<<dim3(static_cast<unsigned>(ceil_div(chunks, kWarps)), static_cast<unsigned>(count)),
                kWarps * 32, 0, stream()>>>(logits, vocab, chunks, rows, stats);
  CHECK_LAUNCH("chunk_stats");
}

// The rows of a grid's second dimension.
constexpr std::int64_t kMaxRows = 65535;

}  // namespace

void log_softmax_gather(const float* logits, const std::int32_t* ids, float temperature,
                        float* log_probs, float* log_sum_exp, float* entropy, std::int64_t rows,
                        std::int64_t vocab) {
  const float inv = 1.0f / temperature;
  const std::int64_t chunks = ceil_div(vocab, kChunk);
  for (std::int64_t first = 0; first < rows; first += kMaxRows) {
    const std::int64_t n = std::min(kMaxRows, rows - first);
    const Scratch stats(n * chunks * static_cast<std::int64_t>(sizeof(ChunkStats)));
    const float* z = logits + first * vocab;
    fill_stats(z, vocab, chunks, Uniform{inv}, n, stats.as<ChunkStats>());
    gather_kernel<<<static_cast<unsigned>(ceil_div(n, kWarps)), kWarps * 32, 0, stream()>>>(
        z, vocab, chunks, stats.as<ChunkStats>(), ids + first, inv, log_probs + first,
        log_sum_exp ? log_sum_exp + first : nullptr, entropy ? entropy + first : nullptr, n);
    CHECK_LAUNCH("log_softmax_gather");
  }
}

template <class Y>
void backward(const float* logits, const std::int32_t* ids, float temperature,
              const float* log_sum_exp, const float* entropy, const float* d_log_prob,
              const float* d_entropy, std::int64_t rows, std::int64_t vocab, Y* out) {
  for (std::int64_t first = 0; first < rows; first += kMaxRows) {
    const std::int64_t n = std::min(kMaxRows, rows - first);
    const bool wide = vocab % 4 == 0 && aligned16(logits) && aligned16(out);
    const auto kernel = wide ? &backward_kernel<Y, 4> : &backward_kernel<Y, 1>;
    kernel<<<dim3(static_cast<unsigned>(ceil_div(vocab, kChunk)), static_cast<unsigned>(n)),
             kChunk / 4, 0, stream()>>>(
        logits + first * vocab, vocab, ids + first, 1.0f / temperature, log_sum_exp + first,
        entropy ? entropy + first : nullptr, d_log_prob + first,
        d_entropy ? d_entropy + first : nullptr, out + first * vocab);
    CHECK_LAUNCH("log_softmax_backward");
  }
}

void log_softmax_backward(float* logits, const std::int32_t* ids, float temperature,
                          const float* log_sum_exp, const float* entropy, const float* d_log_prob,
                          const float* d_entropy, std::int64_t rows, std::int64_t vocab) {
  backward(logits, ids, temperature, log_sum_exp, entropy, d_log_prob, d_entropy, rows, vocab,
           logits);
}

void log_softmax_gradient(const float* logits, const std::int32_t* ids, float temperature,
                          const float* log_sum_exp, const float* entropy, const float* d_log_prob,
                          const float* d_entropy, std::int64_t rows, std::int64_t vocab,
                          bf16* out) {
  backward(logits, ids, temperature, log_sum_exp, entropy, d_log_prob, d_entropy, rows, vocab,
           reinterpret_cast<bf16_t*>(out));
}

void sample_on_device(const float* logits, std::int64_t vocab, const SampleRow* draws,
                      std::int64_t num_draws, std::int32_t* tokens, float* log_probs) {
  const std::int64_t chunks = ceil_div(vocab, kChunk);
  const Scratch stats(num_draws * chunks * static_cast<std::int64_t>(sizeof(ChunkStats)));
  for (std::int64_t first = 0; first < num_draws; first += kMaxRows)
    fill_stats(logits, vocab, chunks, Drawn{draws + first}, std::min(kMaxRows, num_draws - first),
               stats.as<ChunkStats>() + first * chunks);
  sample_kernel<<<static_cast<unsigned>(ceil_div(num_draws, kWarps)), kWarps * 32, 0, stream()>>>(
      logits, vocab, chunks, stats.as<ChunkStats>(), draws, num_draws, tokens, log_probs);
  CHECK_LAUNCH("sample");
}

void sample(const float* logits, std::int64_t vocab, const SampleRow* draws, std::int64_t num_draws,
            std::int32_t* tokens, float* log_probs) {
  if (num_draws == 0) return;
  const auto draw_bytes = static_cast<std::size_t>(num_draws) * sizeof(SampleRow);
  const auto value_bytes = static_cast<std::size_t>(num_draws) * 4;
  const Scratch on_device(static_cast<std::int64_t>(draw_bytes + 2 * value_bytes));
  auto* rows = on_device.as<SampleRow>();
  auto* ids = reinterpret_cast<std::int32_t*>(rows + num_draws);
  auto* values = reinterpret_cast<float*>(ids + num_draws);
  CHECK_CUDA(cudaMemcpyAsync(rows, draws, draw_bytes, cudaMemcpyHostToDevice, stream()));
  sample_on_device(logits, vocab, rows, num_draws, ids, values);
  std::vector<std::byte> back(2 * value_bytes);
  CHECK_CUDA(cudaMemcpyAsync(back.data(), ids, back.size(), cudaMemcpyDeviceToHost, stream()));
  CHECK_CUDA(cudaStreamSynchronize(stream()));
  std::memcpy(tokens, back.data(), value_bytes);
  std::memcpy(log_probs, back.data() + value_bytes, value_bytes);
}

}  // namespace tandem::cuda
