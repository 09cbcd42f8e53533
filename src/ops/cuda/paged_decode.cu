// Paged attention of sequences that run one row each, for fast mode: bound by reading keys and
// values, so nothing passes through shared memory on its way to the tensor cores. A block takes one
// key head of one work item; its warps take pages in turn, each with a softmax of its own, and are
// put together in a fixed order at the end.
//
// The tensor cores sum over k in any order that both operands share, and columns may be any order
// that the result's reader knows. So fragments are what 16-byte loads give: of keys, lane (g, t)
// (g = lane/4, t = lane%4) holds elements 32j + 8t + [0, 8) of key g, and queries likewise; of
// values it holds elements 64j + 8g + [0, 8) of keys 2t, 2t+1, 2t+8, 2t+9, whose halves are paired.
// Queries of a group past its number are zero.
#include "ops/cuda/device.cuh"
#include "ops/cuda/paged.h"

namespace tandem::cuda {
namespace {

constexpr int kWarps = 4, kPage = static_cast<int>(kBlockTokens);
constexpr int kMaxGroup = 8;  // queries of a group: the upper half of a tile's 16 rows
static_assert(kPage == 16);

struct Work {
  const bf16_t *qkv, *k_blocks, *v_blocks;
  bf16_t* out;  // rows, or partial rows
  float* sums;  // log2 of the sums of partial rows, or null
  const std::int32_t *request, *key_chunk, *partial_begin, *chunk_keys, *settled, *page_begin,
      *last_page_keys, *pages;
  const bool* valid;
  int heads, kv_heads;
  std::int64_t width;  // of a qkv row
  float scale;         // of scores to base 2
};

__device__ inline uint4 load16(const bf16_t* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
__device__ inline std::uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
__device__ inline std::uint32_t packed(float low, float high) {
  const __nv_bfloat162 p = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(p);
}
// c[16, 8] += a[16, 16]·b[16, 8].
__device__ inline void multiply(float (&c)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                                std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <int kDim>
struct Keys {
  uint4 part[2][kDim / 32];  // of keys g and 8 + g of a page
  // `left`: keys of the page that there are; past them the last one is read.
  __device__ void load(const bf16_t* page, int stride, int left) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const bf16_t* key = page + min(8 * b + g, left - 1) * stride + t * 8;
#pragma unroll
      for (int j = 0; j < kDim / 32; ++j) part[b][j] = load16(key + j * 32);
    }
  }
};

template <int kDim>
struct Values {
  uint4 part[2][2][kDim / 64];  // of keys 2t + 8b + e
  __device__ void load(const bf16_t* page, int stride, int left) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bf16_t* key = page + min(2 * t + 8 * b + e, left - 1) * stride + g * 8;
#pragma unroll
        for (int j = 0; j < kDim / 64; ++j) part[b][e][j] = load16(key + j * 64);
      }
  }
};

// What a warp has seen of its pages: of query g the largest score and this lane's share of the sum,
// and o[m][2r + c]: of query 2t + c the element that its lanes g hold at place m + r·kDim/16.
template <int kDim>
struct State {
  float top = -INFINITY, sum = 0, o[kDim / 16][4] = {};

  // scores[b][c]: of key 2t + 8b + c, to base 2.
  __device__ void add(float (&scores)[2][2], const Values<kDim>& values) {
    float most = fmaxf(fmaxf(scores[0][0], scores[0][1]), fmaxf(scores[1][0], scores[1][1]));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    most = fmaxf(most, top);
    const float before = exp2f(top - most);
    top = most;
    float p[2][2];
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int c = 0; c < 2; ++c) p[b][c] = exp2f(scores[b][c] - most);
    sum = sum * before + ((p[0][0] + p[0][1]) + (p[1][0] + p[1][1]));
    const std::uint32_t b0 = packed(p[0][0], p[0][1]), b1 = packed(p[1][0], p[1][1]);
    const int t = threadIdx.x % 4;
    const float scale[2] = {__shfl_sync(0xffffffffu, before, 8 * t),
                            __shfl_sync(0xffffffffu, before, 8 * t + 4)};
    // Elements at place `at` of keys 2t + 8b and the next.
    const auto pair = [&](int b, int at) {
      return __byte_perm(word(values.part[b][0][at / 8], at % 8 / 2),
                         word(values.part[b][1][at / 8], at % 8 / 2), at % 2 ? 0x7632 : 0x5410);
    };
#pragma unroll
    for (int m = 0; m < kDim / 16; ++m) {
#pragma unroll
      for (int c = 0; c < 4; ++c) o[m][c] *= scale[c % 2];
      const int far = m + kDim / 16;
      multiply(o[m], pair(0, m), pair(0, far), pair(1, m), pair(1, far), b0, b1);
    }
  }
};

template <int kDim>
__global__ void __launch_bounds__(kWarps * 32, 3) decode_kernel(Work w) {
  __shared__ float tops[kWarps][kMaxGroup], sums[kWarps][kMaxGroup];
  __shared__ __align__(16) float outs[kWarps][kMaxGroup][kDim];
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int item = blockIdx.x / w.kv_heads, head = blockIdx.x % w.kv_heads;
  const int group = w.heads / w.kv_heads;
  // The work list came by a copy before this step's kernels; settled keys are older than the step.
  const bool cut = w.sums != nullptr;  // else an item is a sequence
  const bool valid = !cut || w.valid[item];
  const int request = cut ? w.request[item] : item, chunk = cut ? w.key_chunk[item] : 0;
  const int first_page = w.page_begin[request], pages = w.page_begin[request + 1] - first_page;
  const int length = (pages - 1) * kPage + w.last_page_keys[request];
  const int begin = chunk * w.chunk_keys[0];
  const int end = length - begin > w.chunk_keys[0] ? begin + w.chunk_keys[0] : length;
  const int stride = w.kv_heads * kDim;
  const auto page_at = [&](int page) {
    return (static_cast<std::int64_t>(w.pages[first_page + page]) * kPage * w.kv_heads + head) *
           kDim;
  };
  int page = begin / kPage + warp;
  const bool any = valid && page * kPage < end, early = any && page + 1 < pages && w.settled[0] != 0;
  Keys<kDim> keys;
  std::int64_t at = any ? page_at(page) : 0;
  if (early) keys.load(w.k_blocks + at, stride, kPage);
  next_may_start();
  previous_done();
  if (!valid) return;
  if (any && !early) keys.load(w.k_blocks + at, stride, end - page * kPage);
  uint4 query[kDim / 32];
#pragma unroll
  for (int j = 0; j < kDim / 32; ++j)
    query[j] = g < group
                   ? load16(w.qkv + request * w.width + (head * group + g) * kDim + j * 32 + t * 8)
                   : uint4{0, 0, 0, 0};
  State<kDim> state;
  for (; page * kPage < end; page += kWarps) {
    const int left = end - page * kPage;
    Values<kDim> values;
    values.load(w.v_blocks + at, stride, left);
    float products[2][4] = {};  // the lower half is of no query
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int j = 0; j < kDim / 32; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          multiply(products[b], word(query[j], 2 * h), 0, word(query[j], 2 * h + 1), 0,
                   word(keys.part[b][j], 2 * h), word(keys.part[b][j], 2 * h + 1));
    const int next = page + kWarps;
    if (next * kPage < end) {
      at = page_at(next);
      keys.load(w.k_blocks + at, stride, end - next * kPage);
    }
    float scores[2][2];
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        scores[b][c] = 2 * t + 8 * b + c < left ? products[b][c] * w.scale : -INFINITY;
    state.add(scores, values);
  }
  state.sum += __shfl_xor_sync(0xffffffffu, state.sum, 1);
  state.sum += __shfl_xor_sync(0xffffffffu, state.sum, 2);
  if (t == 0) {
    tops[warp][g] = state.top;
    sums[warp][g] = state.sum;
  }
#pragma unroll
  for (int c = 0; c < 2; ++c)
#pragma unroll
    for (int at = 0; at < kDim / 8; at += 4) {
      const int m = at % (kDim / 16), from = 2 * (at / (kDim / 16)) + c;
      *reinterpret_cast<float4*>(&outs[warp][2 * t + c][at / 8 * 64 + 8 * g + at % 8]) = {
          state.o[m][from], state.o[m + 1][from], state.o[m + 2][from], state.o[m + 3][from]};
    }
  __syncthreads();
  const std::int64_t row = cut ? w.partial_begin[request] + chunk : request;
  for (int i = threadIdx.x * 4; i < group * kDim; i += kWarps * 32 * 4) {
    const int query_row = i / kDim, column = i % kDim;
    float top = -INFINITY, sum = 0, value[4] = {};
#pragma unroll
    for (int k = 0; k < kWarps; ++k) top = fmaxf(top, tops[k][query_row]);
#pragma unroll
    for (int k = 0; k < kWarps; ++k) {
      const float weight = exp2f(tops[k][query_row] - top);
      sum += sums[k][query_row] * weight;
#pragma unroll
      for (int c = 0; c < 4; ++c) value[c] += outs[k][query_row][column + c] * weight;
    }
    const std::int64_t to = row * w.heads + head * group + query_row;
#pragma unroll
    for (int c = 0; c < 4; ++c) value[c] /= sum;
    store<4>(w.out + to * kDim + column, value);
    if (cut && column == 0) w.sums[to] = top + log2f(sum);
  }
}

}  // namespace

bool decode_takes(const AttentionShape& s, const PagedCall& call) {
  return !exact_mode() && call.rows == call.segments && s.window == 0 && !call.log2_sum_exp &&
         s.num_heads / s.num_kv_heads <= kMaxGroup && s.qkv_width() % 8 == 0 &&
         aligned16(call.qkv) && aligned16(call.k_blocks) && aligned16(call.v_blocks);
}

void decode_attention(const AttentionShape& s, const PagedCall& call, void* out, float* sums) {
  const PagedWork& p = call.work;
  const Work work{.qkv = static_cast<const bf16_t*>(call.qkv),
                  .k_blocks = static_cast<const bf16_t*>(call.k_blocks),
                  .v_blocks = static_cast<const bf16_t*>(call.v_blocks),
                  .out = static_cast<bf16_t*>(out),
                  .sums = sums,
                  .request = p.request,
                  .key_chunk = p.key_chunk,
                  .partial_begin = p.partial_begin,
                  .chunk_keys = p.chunk_keys,
                  .settled = p.settled,
                  .page_begin = p.page_begin,
                  .last_page_keys = p.last_page_keys,
                  .pages = p.pages,
                  .valid = p.valid,
                  .heads = static_cast<int>(s.num_heads),
                  .kv_heads = static_cast<int>(s.num_kv_heads),
                  .width = s.qkv_width(),
                  .scale = s.scale * 1.44269504f};
  const auto kernel = s.head_dim == 64 ? &decode_kernel<64> : &decode_kernel<128>;
  chained(kernel, (sums ? p.items : call.segments) * s.num_kv_heads, kWarps * 32, work);
}

}  // namespace tandem::cuda
