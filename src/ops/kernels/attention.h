// Attention over KV blocks of 16 positions, counted from position 0 of the sequence. One query row
// at a time: scores of 16 keys in 16 lanes, each a chain over head_dim; maximum; exponentials;
// their sum in lanes by position modulo 16; the output one chain over keys in ascending position.
// So a row's result depends on its query and its keys alone: prefill, decode, any chunking, paged
// or packed, give the same bits. The heads that share a KV head are computed together (`tile`
// rows).
#pragma once

#include <omp.h>

#include <limits>
#include <vector>

#include "ops/kernels/gemm.h"

namespace tandem::TD_ISA {

template <class E>
void write_kv(const AttentionShape& shape, const void* qkv, const KvWrite* writes,
              std::int64_t num_writes, void* k_blocks, void* v_blocks) {
  const E* in = static_cast<const E*>(qkv);
  E* kb = static_cast<E*>(k_blocks);
  E* vb = static_cast<E*>(v_blocks);
  const std::int64_t dim = shape.head_dim, padded = shape.padded_dim();
#pragma omp parallel for schedule(static)
  for (std::int64_t w = 0; w < num_writes; ++w) {
    const E* k = in + writes[w].row * shape.qkv_width() + shape.num_heads * dim;
    const E* v = k + shape.num_kv_heads * dim;
    const std::int64_t block = writes[w].slot / kBlockTokens,
                       offset = writes[w].slot % kBlockTokens;
    for (std::int64_t h = 0; h < shape.num_kv_heads; ++h) {
      E* kt = kb + block * shape.k_block_elements() + h * dim * kBlockTokens + offset;
      for (std::int64_t d = 0; d < dim; ++d) kt[d * kBlockTokens] = k[h * dim + d];
      E* vt = vb + block * shape.v_block_elements() + (h * kBlockTokens + offset) * padded;
      for (std::int64_t d = 0; d < dim; ++d) vt[d] = v[h * dim + d];
      for (std::int64_t d = dim; d < padded; ++d) assign(vt[d], 0.0f);
    }
  }
}

// f32 view of one block's matrix, or a widened copy.
inline const float* block_f32(const float* p, std::int64_t, float*) { return p; }
inline const float* block_f32(const bf16* p, std::int64_t count, float* scratch) {
  for (std::int64_t i = 0; i < count; i += 16) store(scratch + i, load(p + i));
  return scratch;
}

// Scores become probabilities before division: s[0..count) scaled, masked to [first, last].
// Returns the sum of exponentials.
inline float softmax_row(float* s, std::int64_t count, std::int64_t first, std::int64_t last,
                         float scale) {
  V16 top = set1(-std::numeric_limits<float>::infinity());
  for (std::int64_t j = 0; j < count; j += 16) {
    V16 v = load(s + j) * set1(scale);
    store(s + j, v);
    if (j < first || j + 15 > last)
      for (std::int64_t i = j; i < j + 16; ++i)
        if (i < first || i > last) s[i] = -std::numeric_limits<float>::infinity();
    top = max(load(s + j), top);
  }
  const V16 m = set1(max_lanes(top));
  V16 sum = zero();
  for (std::int64_t j = 0; j < count; j += 16) {
    const V16 e = exp(load(s + j) - m);
    store(s + j, e);
    sum = sum + e;
  }
  return sum_lanes(sum);
}

struct RowRange {  // keys of a query at position p under a window
  std::int64_t first, last, block_begin, block_end;
};
inline RowRange key_range(const AttentionShape& shape, std::int64_t p) {
  const std::int64_t first = shape.window > 0 ? std::max<std::int64_t>(0, p - shape.window + 1) : 0;
  return {first, p, first / kBlockTokens, p / kBlockTokens + 1};
}

template <class E>
void attention(const AttentionShape& shape, const void* qkv, const Segment* segments,
               std::int64_t num_segments, const void* k_blocks, const void* v_blocks, void* out) {
  const E* in = static_cast<const E*>(qkv);
  const E* kb = static_cast<const E*>(k_blocks);
  const E* vb = static_cast<const E*>(v_blocks);
  E* ye = static_cast<E*>(out);
  const std::int64_t dim = shape.head_dim, padded = shape.padded_dim();
  const std::int64_t group = shape.num_heads / shape.num_kv_heads;
#pragma omp parallel
  {
    std::vector<float> q(group * dim), s, kf(dim * kBlockTokens), vf(kBlockTokens * padded),
        acc_out(group * padded), total(group);
    std::int64_t task = 0;
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    for (std::int64_t g = 0; g < num_segments; ++g) {
      const Segment& seg = segments[g];
      for (std::int64_t i = 0; i < seg.num_rows * shape.num_kv_heads; ++i, ++task) {
        if (task % threads != thread) continue;
        const std::int64_t row = seg.row_begin + i / shape.num_kv_heads, h = i % shape.num_kv_heads;
        const RowRange keys = key_range(shape, seg.position_begin + i / shape.num_kv_heads);
        const std::int64_t base = keys.block_begin * kBlockTokens;
        const std::int64_t count = (keys.block_end - keys.block_begin) * kBlockTokens;
        const E* qe = in + row * shape.qkv_width() + h * group * dim;
        for (std::int64_t d = 0; d < group * dim; ++d) q[d] = to_float(qe[d]);
        s.resize(group * count);
        for (std::int64_t b = keys.block_begin; b < keys.block_end; ++b) {
          const float* kt =
              block_f32(kb + seg.blocks[b] * shape.k_block_elements() + h * dim * kBlockTokens,
                        dim * kBlockTokens, kf.data());
          for_row_tiles(group, [&](auto mr, std::int64_t r) {
            constexpr int MR = decltype(mr)::value;
            V16 acc[MR];
            for (auto& a : acc) a = zero();
            tile<MR>(q.data() + r * dim, dim, 1, kt, 16, dim, acc);
            for (int j = 0; j < MR; ++j)
              store(s.data() + (r + j) * count + b * kBlockTokens - base, acc[j]);
          });
        }
        std::fill(acc_out.begin(), acc_out.end(), 0.0f);
        for (std::int64_t r = 0; r < group; ++r)
          total[r] = softmax_row(s.data() + r * count, count, keys.first - base, keys.last - base,
                                 shape.scale);
        for (std::int64_t b = keys.block_begin; b < keys.block_end; ++b) {
          const float* v =
              block_f32(vb + seg.blocks[b] * shape.v_block_elements() + h * kBlockTokens * padded,
                        kBlockTokens * padded, vf.data());
          // Keys past the row's own position hold whatever an earlier owner left: stop before them.
          const std::int64_t valid = std::min(kBlockTokens, keys.last + 1 - b * kBlockTokens);
          for_row_tiles(group, [&](auto mr, std::int64_t r) {
            constexpr int MR = decltype(mr)::value;
            for (std::int64_t d = 0; d < padded; d += 16) {
              V16 acc[MR];
              for (int j = 0; j < MR; ++j) acc[j] = load(acc_out.data() + (r + j) * padded + d);
              tile<MR>(s.data() + r * count + b * kBlockTokens - base, count, 1, v + d, padded,
                       valid, acc);
              for (int j = 0; j < MR; ++j) store(acc_out.data() + (r + j) * padded + d, acc[j]);
            }
          });
        }
        E* y = ye + row * shape.num_heads * dim + h * group * dim;
        for (std::int64_t r = 0; r < group; ++r) {
          const V16 inv = set1(1.0f / total[r]);
          for (std::int64_t d = 0; d < dim; d += 16)
            store_tail(y + r * dim + d, load(acc_out.data() + r * padded + d) * inv, dim - d);
        }
      }
    }
  }
}

// Gradient of `attention` for whole sequences whose keys are rows of this call. For one query
// (head h, position p): P = softmax(scale·q·K), dV_j += P_j·dO, dP_j = dO·V_j,
// dS_j = P_j·(dP_j - Σ P·dP)·scale, dq += dS_j·K_j, dK_j += dS_j·q. Segments of one group share
// key rows, so a group and a KV head are one task; inside it queries come in ascending order.
template <class E>
class AttentionBackward {
 public:
  AttentionBackward(const AttentionShape& shape, const void* qkv, const void* dout, float* dqkv)
      : shape_(shape),
        qkv_(static_cast<const E*>(qkv)),
        dout_(static_cast<const E*>(dout)),
        dqkv_(dqkv),
        padded_(shape.padded_dim()) {}

  void segment(const Segment& seg, std::int64_t h) {
    const std::int64_t keys = seg.position_begin + seg.num_rows;
    load_keys(seg, h, keys);
    for (std::int64_t i = 0; i < seg.num_rows; ++i)
      for (std::int64_t r = 0; r < shape_.num_heads / shape_.num_kv_heads; ++r)
        query(seg, h * (shape_.num_heads / shape_.num_kv_heads) + r, i);
    store_keys(seg, h, keys);
  }

 private:
  // Keys and values of one KV head: transposed per block for the dot products, row-major for the
  // updates; gradients accumulate row-major and are added to dqkv at the end.
  void load_keys(const Segment& seg, std::int64_t h, std::int64_t keys) {
    const std::int64_t dim = shape_.head_dim, slots = round_up(keys, 16);
    kt_.assign(slots * dim, 0.0f);
    vt_.assign(slots * dim, 0.0f);
    k_.assign(slots * padded_, 0.0f);
    dk_.assign(slots * padded_, 0.0f);
    dv_.assign(slots * padded_, 0.0f);
    s_.resize(slots);
    dp_.resize(slots);
    q_.assign(padded_, 0.0f);
    do_.assign(padded_, 0.0f);
    dq_.assign(padded_, 0.0f);
    for (std::int64_t j = 0; j < keys; ++j) {
      const E* k = qkv_ + seg.key_rows[j] * shape_.qkv_width() + (shape_.num_heads + h) * dim;
      const E* v = k + shape_.num_kv_heads * dim;
      for (std::int64_t d = 0; d < dim; ++d) {
        k_[j * padded_ + d] = to_float(k[d]);
        kt_[j / 16 * 16 * dim + d * 16 + j % 16] = to_float(k[d]);
        vt_[j / 16 * 16 * dim + d * 16 + j % 16] = to_float(v[d]);
      }
    }
  }

  void query(const Segment& seg, std::int64_t head, std::int64_t i) {
    const std::int64_t dim = shape_.head_dim, row = seg.row_begin + i;
    const RowRange keys = key_range(shape_, seg.position_begin + i);
    const E* q = qkv_ + row * shape_.qkv_width() + head * dim;
    const E* d_out = dout_ + row * shape_.num_heads * dim + head * dim;
    for (std::int64_t d = 0; d < dim; ++d) {
      q_[d] = to_float(q[d]);
      do_[d] = to_float(d_out[d]);
    }
    for (std::int64_t b = keys.block_begin; b < keys.block_end; ++b) {
      V16 score[1] = {zero()}, dot[1] = {zero()};
      tile<1>(q_.data(), 0, 1, kt_.data() + b * 16 * dim, 16, dim, score);
      tile<1>(do_.data(), 0, 1, vt_.data() + b * 16 * dim, 16, dim, dot);
      store(s_.data() + b * 16, score[0]);
      store(dp_.data() + b * 16, dot[0]);
    }
    const std::int64_t base = keys.block_begin * 16;
    const std::int64_t count = (keys.block_end - keys.block_begin) * 16;
    const float sum =
        softmax_row(s_.data() + base, count, keys.first - base, keys.last - base, shape_.scale);
    const V16 inv = set1(1.0f / sum);
    V16 weighted = zero();
    for (std::int64_t j = base; j < base + count; j += 16) {
      const V16 p = load(s_.data() + j) * inv;
      store(s_.data() + j, p);
      weighted = fma(p, load(dp_.data() + j), weighted);
    }
    const float mean = sum_lanes(weighted);
    for (std::int64_t d = 0; d < padded_; d += 16) {
      const V16 qv = load(q_.data() + d), dov = load(do_.data() + d);
      V16 dq = zero();
      for (std::int64_t j = keys.first; j <= keys.last; ++j) {
        const V16 ds = set1(s_[j] * (dp_[j] - mean) * shape_.scale);
        float* dk = dk_.data() + j * padded_ + d;
        float* dv = dv_.data() + j * padded_ + d;
        dq = fma(ds, load(k_.data() + j * padded_ + d), dq);
        store(dk, fma(ds, qv, load(dk)));
        store(dv, fma(set1(s_[j]), dov, load(dv)));
      }
      store(dq_.data() + d, dq);
    }
    float* out = dqkv_ + row * shape_.qkv_width() + head * dim;
    for (std::int64_t d = 0; d < dim; ++d) out[d] = dq_[d];
  }

  void store_keys(const Segment& seg, std::int64_t h, std::int64_t keys) {
    const std::int64_t dim = shape_.head_dim;
    for (std::int64_t j = 0; j < keys; ++j) {
      float* k = dqkv_ + seg.key_rows[j] * shape_.qkv_width() + (shape_.num_heads + h) * dim;
      float* v = k + shape_.num_kv_heads * dim;
      for (std::int64_t d = 0; d < dim; ++d) {
        k[d] += dk_[j * padded_ + d];
        v[d] += dv_[j * padded_ + d];
      }
    }
  }

  const AttentionShape& shape_;
  const E* qkv_;
  const E* dout_;
  float* dqkv_;
  std::int64_t padded_;
  std::vector<float> kt_, vt_, k_, dk_, dv_, s_, dp_, q_, do_, dq_;
};

template <class E>
void attention_backward(const AttentionShape& shape, const void* qkv, const void* dout,
                        const Segment* segments, std::int64_t num_segments, void* dqkv,
                        std::int64_t rows) {
  std::vector<float> wide;
  float* grad = static_cast<float*>(dqkv);
  if constexpr (sizeof(E) == 2) {
    wide.resize(rows * shape.qkv_width());
    grad = wide.data();
  }
  std::fill(grad, grad + rows * shape.qkv_width(), 0.0f);
  std::vector<std::int64_t> starts;  // first segment of each group
  for (std::int64_t g = 0; g < num_segments; ++g)
    if (g == 0 || segments[g].group != segments[g - 1].group) starts.push_back(g);
  starts.push_back(num_segments);
  const std::int64_t tasks = static_cast<std::int64_t>(starts.size() - 1) * shape.num_kv_heads;
#pragma omp parallel
  {
    AttentionBackward<E> backward(shape, qkv, dout, grad);
#pragma omp for schedule(dynamic)
    for (std::int64_t t = 0; t < tasks; ++t) {
      const std::int64_t g = t / shape.num_kv_heads, h = t % shape.num_kv_heads;
      for (std::int64_t i = starts[g]; i < starts[g + 1]; ++i) backward.segment(segments[i], h);
    }
  }
  if constexpr (sizeof(E) == 2) {
    bf16* out = static_cast<bf16*>(dqkv);
    const std::int64_t count = rows * shape.qkv_width();
    for (std::int64_t i = 0; i < count; i += 16)
      store_tail(out + i, load_tail(grad + i, count - i), count - i);
  }
}

}  // namespace tandem::TD_ISA
