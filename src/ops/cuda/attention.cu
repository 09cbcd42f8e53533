// Attention for any shape and element type: one warp a query row and head, keys in tiles of 32 that
// count from position 0 of the sequence, an online softmax in f32. Slow beside the matrix units,
// right everywhere: it serves what flash.cpp (training) and paged.cuh (rollout) have no instance
// for, and tests compare those with it. Gradients of keys are added by the key's row over its uses
// in a fixed order, without atomics.
#include "ops/cuda/attention.h"
#include "ops/cuda/device.cuh"
#include "ops/cuda/kernels.h"
#include "ops/cuda/plan.h"

namespace tandem::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kMaxDim = static_cast<int>(kMaxGpuHeadDim), kLaneDims = kMaxDim / 32;

struct Shape {
  std::int32_t heads, kv_heads, dim, width;  // width of a qkv row
  float scale;
  std::int32_t window;
};
Shape shape_of(const AttentionShape& s) {
  return {static_cast<std::int32_t>(s.num_heads),
          static_cast<std::int32_t>(s.num_kv_heads),
          static_cast<std::int32_t>(s.head_dim),
          static_cast<std::int32_t>(s.qkv_width()),
          s.scale,
          static_cast<std::int32_t>(s.window)};
}

// Where the key and the value of a position of a segment lie.
template <class E>
struct RowKeys {
  const E* qkv;
  const std::int32_t* keys;
  __device__ const E* k(const Shape& s, const PlannedSegment& seg, int position, int head) const {
    return qkv + static_cast<std::int64_t>(keys[seg.keys_begin + position]) * s.width +
           (s.heads + head) * s.dim;
  }
  __device__ const E* v(const Shape& s, const PlannedSegment& seg, int position, int head) const {
    return k(s, seg, position, head) + s.kv_heads * s.dim;
  }
};
template <class E>
struct BlockKeys {
  const E *k_blocks, *v_blocks;
  const std::int32_t* blocks;
  __device__ std::int64_t offset(const Shape& s, const PlannedSegment& seg, int position,
                                 int head) const {
    const std::int64_t block = blocks[seg.keys_begin + position / kBlockTokens];
    return ((block * kBlockTokens + position % kBlockTokens) * s.kv_heads + head) * s.dim;
  }
  __device__ const E* k(const Shape& s, const PlannedSegment& seg, int position, int head) const {
    return k_blocks + offset(s, seg, position, head);
  }
  __device__ const E* v(const Shape& s, const PlannedSegment& seg, int position, int head) const {
    return v_blocks + offset(s, seg, position, head);
  }
};

__device__ inline int first_key(const Shape& s, int position) {
  return s.window > 0 && position >= s.window ? position - s.window + 1 : 0;
}

template <class E>
__device__ inline float dot(const float* a, const E* b, int n) {
  float sum = 0;
  for (int d = 0; d < n; ++d) sum = fmaf(a[d], to_float(b[d]), sum);
  return sum;
}

template <class E, class Keys>
__global__ void forward_kernel(Shape s, Keys keys, const E* qkv, const PlannedSegment* segments,
                               const std::int32_t* row_segment, E* out, float* log_sum_exp,
                               std::int32_t rows) {
  __shared__ float queries[kWarps][kMaxDim];
  const int lane = threadIdx.x % 32;
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (index >= static_cast<std::int64_t>(rows) * s.heads) return;
  const int row = static_cast<int>(index / s.heads), head = static_cast<int>(index % s.heads);
  const int kv_head = head / (s.heads / s.kv_heads);
  const PlannedSegment seg = segments[row_segment[row]];
  const int position = seg.position_begin + row - seg.row_begin;
  float* q = queries[threadIdx.x / 32];
  for (int d = lane; d < s.dim; d += 32)
    q[d] = to_float(qkv[static_cast<std::int64_t>(row) * s.width + head * s.dim + d]);
  __syncwarp();

  float top = -INFINITY, sum = 0, acc[kLaneDims] = {};
  const int first = first_key(s, position);
  for (int base = first / 32 * 32; base <= position; base += 32) {
    const int key = base + lane;
    const bool seen = key >= first && key <= position;
    const float score = seen ? dot(q, keys.k(s, seg, key, kv_head), s.dim) * s.scale : -INFINITY;
    const float next = fmaxf(top, warp_max(score));
    const float keep = expf(top - next), p = seen ? expf(score - next) : 0.0f;
    sum = sum * keep + warp_sum(p);
    top = next;
#pragma unroll
    for (int j = 0; j < kLaneDims; ++j) acc[j] *= keep;
    const int end = min(32, position - base + 1);
    for (int i = max(0, first - base); i < end; ++i) {
      const float weight = __shfl_sync(0xffffffffu, p, i);
      const E* v = keys.v(s, seg, base + i, kv_head);
#pragma unroll
      for (int j = 0; j < kLaneDims; ++j)
        if (j * 32 + lane < s.dim) acc[j] = fmaf(weight, to_float(v[j * 32 + lane]), acc[j]);
    }
  }
  E* to = out + (static_cast<std::int64_t>(row) * s.heads + head) * s.dim;
#pragma unroll
  for (int j = 0; j < kLaneDims; ++j)
    if (j * 32 + lane < s.dim) to[j * 32 + lane] = from_float<E>(acc[j] / sum);
  if (log_sum_exp && lane == 0)
    log_sum_exp[static_cast<std::int64_t>(head) * rows + row] = top + logf(sum);
}

// dq of a row and head, and Σ dout·out of it for the keys' gradients.
template <class E>
__global__ void query_gradient_kernel(Shape s, RowKeys<E> keys, const PlannedSegment* segments,
                                      const std::int32_t* row_segment, const E* out, const E* dout,
                                      const float* log_sum_exp, float* out_dots, E* dqkv,
                                      std::int32_t rows) {
  __shared__ float queries[kWarps][kMaxDim], gradients[kWarps][kMaxDim];
  const int lane = threadIdx.x % 32;
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (index >= static_cast<std::int64_t>(rows) * s.heads) return;
  const int row = static_cast<int>(index / s.heads), head = static_cast<int>(index % s.heads);
  const int kv_head = head / (s.heads / s.kv_heads);
  const PlannedSegment seg = segments[row_segment[row]];
  const int position = seg.position_begin + row - seg.row_begin;
  float *q = queries[threadIdx.x / 32], *g = gradients[threadIdx.x / 32];
  const std::int64_t at = (static_cast<std::int64_t>(row) * s.heads + head) * s.dim;
  float own = 0;
  for (int d = lane; d < s.dim; d += 32) {
    q[d] = to_float(keys.qkv[static_cast<std::int64_t>(row) * s.width + head * s.dim + d]);
    g[d] = to_float(dout[at + d]);
    own += g[d] * to_float(out[at + d]);
  }
  __syncwarp();
  own = warp_sum(own);
  const std::int64_t stat = static_cast<std::int64_t>(head) * rows + row;
  if (lane == 0) out_dots[stat] = own;
  const float lse = log_sum_exp[stat];
  // In the order in which the keys' products are added below: where a row sees one key alone its
  // output is that key's value, and the gradient of its query is exactly 0.
  const float in_order = dot(g, out + at, s.dim);

  float acc[kLaneDims] = {};
  const int first = first_key(s, position);
  for (int base = first / 32 * 32; base <= position; base += 32) {
    const int key = base + lane;
    float d_score = 0;
    if (key >= first && key <= position) {
      const float p = expf(dot(q, keys.k(s, seg, key, kv_head), s.dim) * s.scale - lse);
      d_score = p * (dot(g, keys.v(s, seg, key, kv_head), s.dim) - in_order) * s.scale;
    }
    const int end = min(32, position - base + 1);
    for (int i = max(0, first - base); i < end; ++i) {
      const float weight = __shfl_sync(0xffffffffu, d_score, i);
      const E* k = keys.k(s, seg, base + i, kv_head);
#pragma unroll
      for (int j = 0; j < kLaneDims; ++j)
        if (j * 32 + lane < s.dim) acc[j] = fmaf(weight, to_float(k[j * 32 + lane]), acc[j]);
    }
  }
  E* to = dqkv + static_cast<std::int64_t>(row) * s.width + head * s.dim;
#pragma unroll
  for (int j = 0; j < kLaneDims; ++j)
    if (j * 32 + lane < s.dim) to[j * 32 + lane] = from_float<E>(acc[j]);
}

// dk and dv of a row as a key: over its uses, their rows and the heads that share the kv head.
template <class E>
__global__ void key_gradient_kernel(Shape s, const E* qkv, const PlannedSegment* segments,
                                    const std::int32_t* uses_begin, const KeyUse* uses,
                                    const E* dout, const float* log_sum_exp, const float* out_dots,
                                    E* dqkv, std::int32_t rows) {
  const int lane = threadIdx.x % 32;
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (index >= static_cast<std::int64_t>(rows) * s.kv_heads) return;
  const int row = static_cast<int>(index / s.kv_heads);
  const int kv_head = static_cast<int>(index % s.kv_heads), group = s.heads / s.kv_heads;
  const E* k_row = qkv + static_cast<std::int64_t>(row) * s.width + (s.heads + kv_head) * s.dim;
  const E* v_row = k_row + s.kv_heads * s.dim;
  float k[kLaneDims], v[kLaneDims], dk[kLaneDims] = {}, dv[kLaneDims] = {};
#pragma unroll
  for (int j = 0; j < kLaneDims; ++j) {
    const bool live = j * 32 + lane < s.dim;
    k[j] = live ? to_float(k_row[j * 32 + lane]) : 0.0f;
    v[j] = live ? to_float(v_row[j * 32 + lane]) : 0.0f;
  }
  for (int u = uses_begin[row]; u < uses_begin[row + 1]; ++u) {
    const PlannedSegment seg = segments[uses[u].segment];
    const int key = uses[u].position, end = seg.position_begin + seg.num_rows;
    const int last = s.window > 0 ? min(end, key + s.window) : end;
    for (int p = max(key, seg.position_begin); p < last; ++p) {
      const std::int64_t r = seg.row_begin + p - seg.position_begin;
      for (int h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        const E* q = qkv + r * s.width + h * s.dim;
        const E* g = dout + (r * s.heads + h) * s.dim;
        float qv[kLaneDims], gv[kLaneDims], score = 0, d_weight = 0;
#pragma unroll
        for (int j = 0; j < kLaneDims; ++j) {
          const bool live = j * 32 + lane < s.dim;
          qv[j] = live ? to_float(q[j * 32 + lane]) : 0.0f;
          gv[j] = live ? to_float(g[j * 32 + lane]) : 0.0f;
          score += qv[j] * k[j];
          d_weight += gv[j] * v[j];
        }
        const std::int64_t stat = static_cast<std::int64_t>(h) * rows + r;
        const float weight = expf(warp_sum(score) * s.scale - log_sum_exp[stat]);
        const float d_score = weight * (warp_sum(d_weight) - out_dots[stat]) * s.scale;
#pragma unroll
        for (int j = 0; j < kLaneDims; ++j) {
          dk[j] += d_score * qv[j];
          dv[j] += weight * gv[j];
        }
      }
    }
  }
  E* to = dqkv + static_cast<std::int64_t>(row) * s.width + (s.heads + kv_head) * s.dim;
#pragma unroll
  for (int j = 0; j < kLaneDims; ++j)
    if (j * 32 + lane < s.dim) {
      to[j * 32 + lane] = from_float<E>(dk[j]);
      to[s.kv_heads * s.dim + j * 32 + lane] = from_float<E>(dv[j]);
    }
}

template <class E>
__global__ void write_kv_kernel(Shape s, const E* qkv, const KvWrite* writes, std::int64_t count,
                                E* k_blocks, E* v_blocks) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int width = s.kv_heads * s.dim;
  const KvWrite w = writes[i / width];
  const std::int64_t c = i % width, from = w.row * s.width + s.heads * s.dim + c;
  k_blocks[w.slot * width + c] = qkv[from];
  v_blocks[w.slot * width + c] = qkv[from + width];
}

unsigned warp_blocks(std::int64_t warps) { return static_cast<unsigned>(ceil_div(warps, kWarps)); }

}  // namespace

void write_kv(Element e, const AttentionShape& shape, const AttentionPlan& plan, const void* qkv,
              void* k_blocks, void* v_blocks) {
  const std::int64_t count = plan.num_writes * shape.num_kv_heads * shape.head_dim;
  if (count == 0) return;
  with_element(e, [&](auto element) {
    using E = decltype(element);
    write_kv_kernel<<<static_cast<unsigned>(ceil_div(count, 256)), 256, 0, stream()>>>(
        shape_of(shape), static_cast<const E*>(qkv), plan.writes, count, static_cast<E*>(k_blocks),
        static_cast<E*>(v_blocks));
  });
  CHECK_LAUNCH("write_kv");
}

void plain_attention(Element e, const AttentionShape& shape, const AttentionPlan& plan,
                     const void* qkv, const void* k_blocks, const void* v_blocks, void* out,
                     float* log_sum_exp) {
  const unsigned blocks = warp_blocks(plan.rows * shape.num_heads);
  if (blocks == 0) return;
  const auto rows = static_cast<std::int32_t>(plan.rows);
  with_element(e, [&](auto element) {
    using E = decltype(element);
    const auto* from = static_cast<const E*>(qkv);
    auto* to = static_cast<E*>(out);
    if (!k_blocks)
      forward_kernel<E><<<blocks, kWarps * 32, 0, stream()>>>(
          shape_of(shape), RowKeys<E>{from, plan.keys}, from, plan.segments, plan.row_segment, to,
          log_sum_exp, rows);
    else
      forward_kernel<E><<<blocks, kWarps * 32, 0, stream()>>>(
          shape_of(shape),
          BlockKeys<E>{static_cast<const E*>(k_blocks), static_cast<const E*>(v_blocks),
                       plan.blocks},
          from, plan.block_segments, plan.row_segment, to, log_sum_exp, rows);
  });
  CHECK_LAUNCH("attention");
}

void plain_attention_backward(Element e, const AttentionShape& shape, const AttentionPlan& plan,
                              const void* qkv, const void* out, const void* dout,
                              const float* log_sum_exp, void* dqkv) {
  if (plan.rows == 0) return;
  const Scratch out_dots(plan.rows * shape.num_heads * 4);
  const auto rows = static_cast<std::int32_t>(plan.rows);
  with_element(e, [&](auto element) {
    using E = decltype(element);
    query_gradient_kernel<E>
        <<<warp_blocks(plan.rows * shape.num_heads), kWarps * 32, 0, stream()>>>(
            shape_of(shape), RowKeys<E>{static_cast<const E*>(qkv), plan.keys}, plan.segments,
            plan.row_segment, static_cast<const E*>(out), static_cast<const E*>(dout), log_sum_exp,
            out_dots.as<float>(), static_cast<E*>(dqkv), rows);
    key_gradient_kernel<E>
        <<<warp_blocks(plan.rows * shape.num_kv_heads), kWarps * 32, 0, stream()>>>(
            shape_of(shape), static_cast<const E*>(qkv), plan.segments, plan.uses_begin, plan.uses,
            static_cast<const E*>(dout), log_sum_exp, out_dots.as<float>(), static_cast<E*>(dqkv),
            rows);
  });
  CHECK_LAUNCH("attention_backward");
}

}  // namespace tandem::cuda
