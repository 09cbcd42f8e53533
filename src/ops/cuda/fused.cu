// Kernels that do in one pass what are several operations elsewhere: a residual addition and the
// norm of its result, and the norms of all query and key heads of qkv rows. f32 inside, each result
// rounded once; the norm reads the rounded sum, as the separate operations would.
#include "ops/cuda/device.cuh"
#include "ops/cuda/kernels.h"
#include "ops/cuda/plan.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 256;

// One block a row: sum = x + delta, y = norm(sum).
template <class E, int N>
__global__ void add_rms_norm_kernel(const E* x, const E* delta, const E* weight, float eps,
                                    float offset, E* sum, E* y, float* rstd, std::int64_t width) {
  __shared__ float shared[kThreads / 32];
  const std::int64_t base = static_cast<std::int64_t>(blockIdx.x) * width;
  next_may_start();
  previous_done();
  float squares = 0;
  for (std::int64_t i = threadIdx.x * N; i < width; i += kThreads * N) {
    float a[N], b[N];
    load<N>(x + base + i, a);
    load<N>(delta + base + i, b);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      a[j] = to_float(from_float<E>(a[j] + b[j]));
      squares += a[j] * a[j];
    }
    store<N>(sum + base + i, a);
  }
  squares = group_sum<kThreads / 32>(squares, shared);
  const float scale = 1.0f / sqrtf(squares / static_cast<float>(width) + eps);
  if (threadIdx.x == 0 && rstd) rstd[blockIdx.x] = scale;
  // Each thread reads what it wrote itself.
  for (std::int64_t i = threadIdx.x * N; i < width; i += kThreads * N) {
    float a[N], w[N];
    load<N>(sum + base + i, a);
    load<N>(weight + i, w);
#pragma unroll
    for (int j = 0; j < N; ++j) a[j] = a[j] * scale * (w[j] + offset);
    store<N>(y + base + i, a);
  }
}

// dx = d_sum + the norm's gradient; see rms_norm_dx in rowwise.cu.
template <class E, int N>
__global__ void add_rms_norm_dx_kernel(const E* dy, const E* d_sum, const E* x, const E* weight,
                                       float offset, const float* rstd, E* dx, std::int64_t width) {
  __shared__ float shared[kThreads / 32];
  const std::int64_t base = static_cast<std::int64_t>(blockIdx.x) * width;
  const float scale = rstd[blockIdx.x];
  float dot = 0;
  for (std::int64_t i = threadIdx.x * N; i < width; i += kThreads * N) {
    float v[N], w[N], d[N];
    load<N>(x + base + i, v);
    load<N>(weight + i, w);
    load<N>(dy + base + i, d);
#pragma unroll
    for (int j = 0; j < N; ++j) dot += d[j] * (w[j] + offset) * (v[j] * scale);
  }
  const float mean = group_sum<kThreads / 32>(dot, shared) / static_cast<float>(width);
  for (std::int64_t i = threadIdx.x * N; i < width; i += kThreads * N) {
    float v[N], w[N], d[N], s[N];
    load<N>(x + base + i, v);
    load<N>(weight + i, w);
    load<N>(dy + base + i, d);
    load<N>(d_sum + base + i, s);
#pragma unroll
    for (int j = 0; j < N; ++j)
      v[j] = s[j] + (d[j] * (w[j] + offset) - v[j] * scale * mean) * scale;
    store<N>(dx + base + i, v);
  }
}

struct Heads {
  int q, kv, dim;
  __device__ int count() const { return q + 2 * kv; }
  __device__ bool normed(int head) const { return head < q + kv; }
};

// 1/rms of a head, by one warp.
template <class E>
__device__ inline float head_scale(const E* x, int dim, float eps) {
  float squares = 0;
  for (int i = threadIdx.x % 32; i < dim; i += 32) {
    const float v = to_float(x[i]);
    squares = fmaf(v, v, squares);
  }
  return 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(dim) + eps);
}

// A block a row, a warp one head after the other: norm of query and key heads, copy of value heads.
template <class E>
__global__ void norm_heads_kernel(Heads heads, const E* x, const E* q_weight, const E* k_weight,
                                  float eps, float offset, E* y, float* rstd) {
  const int lane = threadIdx.x % 32;
  const std::int64_t row = blockIdx.x;
  for (int head = threadIdx.x / 32; head < heads.count(); head += kThreads / 32) {
    const std::int64_t base = (row * heads.count() + head) * heads.dim;
    if (!heads.normed(head)) {
      for (int i = lane; i < heads.dim; i += 32) y[base + i] = x[base + i];
      continue;
    }
    const E* weight = head < heads.q ? q_weight : k_weight;
    const float scale = head_scale(x + base, heads.dim, eps);
    if (lane == 0 && rstd) rstd[row * (heads.q + heads.kv) + head] = scale;
    for (int i = lane; i < heads.dim; i += 32)
      y[base + i] = from_float<E>(to_float(x[base + i]) * scale * (to_float(weight[i]) + offset));
  }
}

// A warp a head of a written row: norm (if there are weights), rotation, and keys and values into
// their blocks; queries stay in their rows.
template <class E, bool kInterleaved>
__global__ void finish_qkv_kernel(Heads heads, E* qkv, const KvWrite* writes, std::int64_t rows,
                                  const E* q_weight, const E* k_weight, float eps, float offset,
                                  const std::int32_t* positions, const float* cos, const float* sin,
                                  int half, E* k_blocks, E* v_blocks) {
  __shared__ float shared[kThreads / 32][kMaxGpuHeadDim];
  const int lane = threadIdx.x % 32;
  const std::int64_t index =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  next_may_start();
  previous_done();
  if (index >= rows * heads.count()) return;
  const int head = static_cast<int>(index % heads.count());
  const KvWrite write = writes[index / heads.count()];
  E* x = qkv + (write.row * heads.count() + head) * heads.dim;
  if (!heads.normed(head)) {
    E* to = v_blocks + (write.slot * heads.kv + head - heads.q - heads.kv) * heads.dim;
    for (int i = lane; i < heads.dim; i += 32) to[i] = x[i];
    return;
  }
  float* v = shared[threadIdx.x / 32];
  if (q_weight) {
    const E* weight = head < heads.q ? q_weight : k_weight;
    const float scale = head_scale(x, heads.dim, eps);
    for (int i = lane; i < heads.dim; i += 32)
      v[i] = to_float(from_float<E>(to_float(x[i]) * scale * (to_float(weight[i]) + offset)));
  } else {
    for (int i = lane; i < heads.dim; i += 32) v[i] = to_float(x[i]);
  }
  __syncwarp();
  E* to = head < heads.q ? x : k_blocks + (write.slot * heads.kv + head - heads.q) * heads.dim;
  const std::int64_t table = static_cast<std::int64_t>(positions[write.row]) * half;
  for (int i = lane; i < half; i += 32) {
    const int low = kInterleaved ? 2 * i : i, high = kInterleaved ? low + 1 : i + half;
    float a = v[low], b = v[high];
    turn(a, b, cos[table + i], sin[table + i]);
    to[low] = from_float<E>(a);
    to[high] = from_float<E>(b);
  }
  for (int i = 2 * half + lane; i < heads.dim; i += 32) to[i] = from_float<E>(v[i]);
}

// A block a row, a warp one head after the other, a lane N elements at a time.
template <class E, int N>
__global__ void norm_heads_dx_kernel(Heads heads, const E* dy, const E* x, const E* q_weight,
                                     const E* k_weight, float offset, const float* rstd, E* dx) {
  const int first = threadIdx.x % 32 * N;
  const std::int64_t row = blockIdx.x;
  for (int head = threadIdx.x / 32; head < heads.count(); head += kThreads / 32) {
    const std::int64_t base = (row * heads.count() + head) * heads.dim;
    float d[N], v[N], w[N];
    if (!heads.normed(head)) {
      for (int i = first; i < heads.dim; i += 32 * N) {
        load<N>(dy + base + i, d);
        store<N>(dx + base + i, d);
      }
      continue;
    }
    const E* weight = head < heads.q ? q_weight : k_weight;
    const float scale = rstd[row * (heads.q + heads.kv) + head];
    const auto load_all = [&](int i) {
      load<N>(dy + base + i, d);
      load<N>(x + base + i, v);
      load<N>(weight + i, w);
#pragma unroll
      for (int j = 0; j < N; ++j) d[j] *= w[j] + offset;
    };
    float dot = 0;
    for (int i = first; i < heads.dim; i += 32 * N) {
      load_all(i);
#pragma unroll
      for (int j = 0; j < N; ++j) dot += d[j] * v[j] * scale;
    }
    const float mean = warp_sum(dot) / static_cast<float>(heads.dim);
    for (int i = first; i < heads.dim; i += 32 * N) {
      load_all(i);
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] = (d[j] - v[j] * scale * mean) * scale;
      store<N>(dx + base + i, v);
    }
  }
}

// Partial sums of the weights' gradients: a warp takes 64 rows of one head and 32 columns.
constexpr int kChunkRows = 64;
template <class E>
__global__ void norm_heads_dw_kernel(Heads heads, int first_head, int num_heads, const E* dy,
                                     const E* x, const float* rstd, float* partial,
                                     std::int64_t rows) {
  const int column = blockIdx.x * 32 + threadIdx.x, head = first_head + blockIdx.y;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.z) * kChunkRows;
  if (column >= heads.dim) return;
  const std::int64_t last = first + kChunkRows < rows ? first + kChunkRows : rows;
  float sum = 0;
  for (std::int64_t r = first; r < last; ++r) {
    const std::int64_t at = (r * heads.count() + head) * heads.dim + column;
    sum += to_float(dy[at]) * to_float(x[at]) * rstd[r * (heads.q + heads.kv) + head];
  }
  partial[(static_cast<std::int64_t>(blockIdx.z) * num_heads + blockIdx.y) * heads.dim + column] =
      sum;
}

Heads heads_of(const AttentionShape& s) {
  return {static_cast<int>(s.num_heads), static_cast<int>(s.num_kv_heads),
          static_cast<int>(s.head_dim)};
}
unsigned head_blocks(const AttentionShape& s, std::int64_t rows) {
  return static_cast<unsigned>(ceil_div(rows * (s.num_heads + 2 * s.num_kv_heads), kThreads / 32));
}

}  // namespace

void add_rms_norm(Element e, const void* x, const void* delta, const void* weight, float eps,
                  float offset, void* sum, void* y, float* rstd, std::int64_t rows,
                  std::int64_t width) {
  if (rows == 0) return;
  with_element(e, [&](auto element) {
    using E = decltype(element);
    with_pack<E>(width, {x, delta, weight, sum, y}, [&](auto n) {
      chained(&add_rms_norm_kernel<E, n>, rows, kThreads, static_cast<const E*>(x),
              static_cast<const E*>(delta), static_cast<const E*>(weight), eps, offset,
              static_cast<E*>(sum), static_cast<E*>(y), rstd, width);
    });
  });
}

void add_rms_norm_dx(Element e, const void* dy, const void* d_sum, const void* x,
                     const void* weight, float offset, const float* rstd, void* dx,
                     std::int64_t rows, std::int64_t width) {
  if (rows == 0) return;
  with_element(e, [&](auto element) {
    using E = decltype(element);
    with_pack<E>(width, {dy, d_sum, x, weight, dx}, [&](auto n) {
      add_rms_norm_dx_kernel<E, n><<<static_cast<unsigned>(rows), kThreads, 0, stream()>>>(
          static_cast<const E*>(dy), static_cast<const E*>(d_sum), static_cast<const E*>(x),
          static_cast<const E*>(weight), offset, rstd, static_cast<E*>(dx), width);
    });
  });
  CHECK_LAUNCH("add_rms_norm_dx");
}

void norm_heads(Element e, const AttentionShape& s, const void* qkv, const void* q_weight,
                const void* k_weight, float eps, float offset, void* y, float* rstd,
                std::int64_t rows) {
  if (rows == 0) return;
  with_element(e, [&](auto element) {
    using E = decltype(element);
    norm_heads_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream()>>>(
        heads_of(s), static_cast<const E*>(qkv), static_cast<const E*>(q_weight),
        static_cast<const E*>(k_weight), eps, offset, static_cast<E*>(y), rstd);
  });
  CHECK_LAUNCH("norm_heads");
}

void finish_qkv(Element e, const AttentionShape& s, const AttentionPlan* plan, void* qkv,
                const HeadNorms& norms, const Rotation& r, void* k_blocks, void* v_blocks) {
  const std::int64_t rows = plan->num_writes;
  if (rows == 0) return;
  with_element(e, [&](auto element) {
    using E = decltype(element);
    const auto kernel = r.interleaved ? &finish_qkv_kernel<E, true> : &finish_qkv_kernel<E, false>;
    chained(kernel, head_blocks(s, rows), kThreads, heads_of(s), static_cast<E*>(qkv), plan->writes,
            rows, static_cast<const E*>(norms.q_weight), static_cast<const E*>(norms.k_weight),
            norms.eps, norms.offset, r.positions, r.cos, r.sin, r.rotary_dim / 2,
            static_cast<E*>(k_blocks), static_cast<E*>(v_blocks));
  });
}

void norm_heads_dx(Element e, const AttentionShape& s, const void* dy, const void* qkv,
                   const void* q_weight, const void* k_weight, float offset, const float* rstd,
                   void* dx, std::int64_t rows) {
  if (rows == 0) return;
  with_element(e, [&](auto element) {
    using E = decltype(element);
    const bool whole = s.head_dim % 128 == 0 && aligned16(dy) && aligned16(qkv) &&
                       aligned16(q_weight) && aligned16(k_weight) && aligned16(dx);
    const auto kernel = whole ? &norm_heads_dx_kernel<E, 4> : &norm_heads_dx_kernel<E, 1>;
    kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream()>>>(
        heads_of(s), static_cast<const E*>(dy), static_cast<const E*>(qkv),
        static_cast<const E*>(q_weight), static_cast<const E*>(k_weight), offset, rstd,
        static_cast<E*>(dx));
  });
  CHECK_LAUNCH("norm_heads_dx");
}

void norm_heads_dw(Element e, const AttentionShape& s, const void* dy, const void* qkv,
                   const float* rstd, bool keys, float* dw, std::int64_t rows) {
  if (rows == 0) return;
  const auto first = static_cast<int>(keys ? s.num_heads : 0);
  const auto count = static_cast<int>(keys ? s.num_kv_heads : s.num_heads);
  const std::int64_t chunks = ceil_div(rows, kChunkRows);
  const Scratch partial(chunks * count * s.head_dim * 4);
  with_element(e, [&](auto element) {
    using E = decltype(element);
    norm_heads_dw_kernel<<<dim3(static_cast<unsigned>(ceil_div(s.head_dim, 32)),
                                static_cast<unsigned>(count), static_cast<unsigned>(chunks)),
                           32, 0, stream()>>>(heads_of(s), first, count, static_cast<const E*>(dy),
                                              static_cast<const E*>(qkv), rstd, partial.as<float>(),
                                              rows);
  });
  CHECK_LAUNCH("norm_heads_dw");
  bias_dw(Element::f32, partial.as<float>(), dw, chunks * count, s.head_dim);
}

}  // namespace tandem::cuda
