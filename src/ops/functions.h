// The model's operations on tensors, differentiable: shape checks in front of the kernels, and
// autograd around them. Activations are [rows, width], contiguous, f32 or bf16; a call without
// gradients takes the same kernels, so trainer and engine cannot differ.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "ops/kernels/kernels.h"
#include "ops/place.h"
#include "ops/weight.h"

namespace tandem {

Element element_of(const at::Tensor& x);  // Error for any dtype but float32 and bfloat16
at::ScalarType scalar_type(Element e);
Place place_of(const at::Tensor& x);
// int32 [ids.size()] on `place`. Error naming `what` if an id is outside [0, limit).
at::Tensor ids_tensor(const char* what, std::span<const std::int32_t> ids, std::int64_t limit,
                      Place place);

// The keys and values of one layer, and which rows of the call belong to which sequence. Pointers
// must stay valid until the backward pass of the call is done.
struct LayerKv {
  void* k_blocks = nullptr;
  void* v_blocks = nullptr;
  std::span<const KvWrite> writes;
  std::span<const Segment> segments;
  const AttentionPlan* plan = nullptr;  // of the segments and writes, where the place is cuda
};

// [ids.size(), cols] rows of an embedding matrix; ids as ids_tensor makes them. Rows of padding_id
// get no gradient from here, as in torch.nn.Embedding (-1: none).
at::Tensor embedding(const at::Tensor& ids, const WeightView& w, std::int64_t padding_id = -1);
// x·Wᵀ + bias: [rows, k] -> [rows, n]. bias may be null.
at::Tensor linear(const at::Tensor& x, const WeightView& w, const WeightView* bias);
// Root mean square norm over the last dimension (Zhang & Sennrich 2019).
at::Tensor rms_norm(const at::Tensor& x, const WeightView& w, float eps, float offset = 0.0f);
// x + delta, and its norm.
struct AddedNorm {
  at::Tensor sum, normed;
};
AddedNorm add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const WeightView& w, float eps,
                       float offset = 0.0f);
// Norm of every query and key head of qkv rows over head_dim; the values stay.
at::Tensor norm_heads(const at::Tensor& qkv, const AttentionShape& shape,
                      const WeightView& q_weight, const WeightView& k_weight, float eps,
                      float offset = 0.0f);
// cos and sin of a rotary embedding (Su et al. 2021): f32 [max_position, rotary_dim/2]. Pairs are
// (i, i + rotary_dim/2) as in most of Hugging Face, or (2i, 2i + 1) when interleaved.
struct RopeTable {
  at::Tensor cos, sin;
  bool interleaved = false;
};
// Turns the query and key heads of qkv rows, in place. positions: as ids_tensor makes them.
at::Tensor rotary(const at::Tensor& qkv, const AttentionShape& shape, const at::Tensor& positions,
                  const RopeTable& table);
// Writes K and V into their blocks, then attends: [rows, qkv_width] -> [rows, heads·head_dim].
at::Tensor attention(const at::Tensor& qkv, const AttentionShape& shape, const LayerKv& kv);
// The same of a call without gradients, from qkv rows that are not yet normed and turned: all that
// is done to them, the writes included, takes one pass. Only where is_rollout_call says so. No head
// norms: both null; no rotation: table null.
bool is_rollout_call(const at::Tensor& rows, const LayerKv& kv);
struct HeadNormWeights {
  const WeightView *q = nullptr, *k = nullptr;
  float eps = 0, offset = 0;
};
at::Tensor finish_qkv_and_attend(const at::Tensor& qkv, const AttentionShape& shape,
                                 const LayerKv& kv, const HeadNormWeights& norms,
                                 const at::Tensor& positions, const RopeTable* table);
// activation(gate)·up of [rows, 2·width] -> [rows, width].
at::Tensor gate_mul(const at::Tensor& gate_up, Activation activation);
// gate_mul(linear(x, w, bias)); of a rollout's call in one pass where that is faster. Training calls
// have the bits of the two operations whether they keep anything for backward or not.
at::Tensor linear_gate_mul(const at::Tensor& x, const WeightView& w, const WeightView* bias,
                           Activation activation, bool of_rollout);

// x·Wᵀ with its f32 sums kept, as logits are: [rows, k] -> f32 [rows, n]. No gradient.
at::Tensor linear_f32(const at::Tensor& x, const WeightView& w);

struct LogProbs {
  at::Tensor log_probs;  // f32 [rows]: log-probability of ids at the given temperature
  at::Tensor entropy;    // f32 [rows], or undefined when not asked for
};
// Head, log-softmax and gather in chunks of rows, so that [rows, vocabulary] never exists whole.
// log_probs and entropy lie where `hidden` does.
LogProbs head_log_probs(const at::Tensor& hidden, std::span<const std::int32_t> ids,
                        const WeightView& head, float temperature, bool with_entropy);

}  // namespace tandem
