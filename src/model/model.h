// The transformer, defined once for trainer and engine from a Hugging Face config, over an arena's
// weights and tensor-parallel linear layers. A forward call takes tokens, positions and an
// attention context; whether it records gradients is the caller's grad mode, nothing else differs.
//
// Over ranks the arena's ShardRule decides. exact: every linear layer is cut by output columns and
// its result gathered, so no sum is cut and n ranks give the bits of one. row_parallel: o and down
// cut their sums, which differ from one rank's by rounding; the ranks' parts are added in the order
// of ranks, so a row's bits depend on the number of ranks and on nothing else. Gradients need tp
// size 1 here.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "comm/group.h"
#include "data/sample.h"
#include "model/arena.h"
#include "model/attention.h"
#include "model/hf_config.h"
#include "model/layer_gather.h"
#include "model/link.h"
#include "ops/functions.h"

namespace tandem {

// Layers [begin, end).
struct LayerRange {
  std::int64_t begin = 0, end = 0;
};

class Model {
 public:
  // `grads`: f32 of arena.layout().flat_elements, or null for a model that is only read. The arena,
  // the group (null: one rank), on GPUs the link of its ranks too, and `grads` must outlive the
  // model. Ranks on a GPU without a link, as two on one GPU are, gather through host memory.
  Model(const ModelConfig& config, Arena& arena, Group* tensor_parallel, float* grads,
        Link* link = nullptr);

  const ModelConfig& config() const { return config_; }
  const AttentionShape& attention_shape() const { return shape_; }  // of this rank's heads
  Element element() const { return arena_.layout().element; }
  Place place() const { return arena_.place(); }  // where tensors and gradients lie

  // Hidden states after the last norm: [tokens.size(), hidden]. The context and what it points to
  // must live until backward is done; on a GPU the call fills in its plan.
  at::Tensor forward(std::span<const TokenId> tokens, std::span<const std::int32_t> positions,
                     AttentionContext& context);
  // The same with tokens and positions as ids_tensor makes them, on a GPU or for one rank; the
  // context holds its plan already where the place is cuda.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& positions,
                     const AttentionContext& context);
  // f32 logits [rows.size(), vocab] of the given rows of `hidden`.
  at::Tensor logits(const at::Tensor& hidden, std::span<const std::int64_t> rows);
  at::Tensor logits(const at::Tensor& hidden);  // of all rows
  // Whether a call on a GPU can be captured into a graph.
  bool can_be_captured() const { return is_alone() || link_; }
  // Until the calls so far are done on this rank's GPU. Error where another rank of the model is
  // gone; without other ranks nothing.
  void settle() const {
    if (link_) link_->settle();
  }
  const WeightView& head() const { return *head_; }
  // The longest sequence that this model will be asked for, at first max_position_embeddings. It
  // decides between long rope's short and long factors, for all sequences alike, and nothing else;
  // so trainer and engine must be told the same number. Not between a forward and its backward.
  void set_longest_sequence(std::int64_t tokens);
  // Directs all gradients to a flat buffer of flat_elements; its old content is replaced by the
  // first gradient that is written. Null: no gradients.
  void set_grads(float* grads);
  // Recompute by layer (activation checkpointing, Chen et al. 2016): a forward with gradients keeps
  // the input of each range alone, and backward runs the range again by the same kernels on the
  // same values, so no bit changes. Ranges ascend and do not overlap; other layers keep everything.
  void set_recompute(std::vector<LayerRange> ranges) { recompute_ = std::move(ranges); }
  // Layers are needed from there before they run, forward and backward; null: the arena holds all.
  // Forwards are then parts of its passes, each in layer_order().
  void set_gather(LayerGather* gather) { gather_ = gather; }
  // The layers of a forward, and of its backward if it has one, in the order in which they run.
  std::vector<std::int64_t> layer_order(bool with_backward) const;
  // After the arena's memory was swapped: reads the weights' addresses anew.
  void rebind();
  // Makes the last norm wrong by 2^-20, so that tests see what a difference of kernels looks like.
  void perturb() { perturbation_ = 0x1p-20f; }
  // Zeroes what no backward has written since set_grads.
  void finish_grads();

 private:
  struct Layer {
    // Null where the config has none.
    const WeightView *before_attention, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias,
        *after_attention, *before_mlp, *gate_up, *gate_up_bias, *down, *down_bias, *after_mlp;
    std::int64_t rope;  // index into ropes_, or kNoRope
    LayerKv kv;
    AttentionShape shape;  // with this layer's window
  };
  const WeightView* view(const std::string& name);       // Error if there is none
  const WeightView* find_view(const std::string& name);  // null if there is none
  void make_ropes(std::int64_t positions);               // at least so many
  at::Tensor embed(std::span<const TokenId> tokens);
  at::Tensor embed_on_gpus(const at::Tensor& tokens);
  at::Tensor norm(const at::Tensor& x, const WeightView* weight);
  at::Tensor norm_queries_and_keys(const Layer& layer, const at::Tensor& qkv);
  at::Tensor run_layers(const at::Tensor& embedded, const at::Tensor& positions,
                        const AttentionContext& context);
  bool is_alone() const { return !group_ || group_->size() == 1; }
  at::Tensor gather(const at::Tensor& local);  // of every rank: [ranks, rows, width]
  at::Tensor gather_columns(const at::Tensor& local);
  // A linear layer whose input [rows, k/size] is cut over ranks; the result is whole on each.
  at::Tensor linear_after_cut(const at::Tensor& local, const WeightView& w, const WeightView* bias);
  // What a layer leaves: x + delta, not yet added, so that the next norm adds in its pass.
  struct Residual {
    at::Tensor x, delta;  // delta undefined: x alone
  };
  AddedNorm add_norm(const Residual& r, const WeightView* weight, float perturbation = 0.0f);
  // Norms, rotation, KV writes and attention of the rows that the product with qkv gave.
  at::Tensor attend(const Layer& layer, at::Tensor qkv, const at::Tensor& positions);
  Residual run_layer(std::int64_t layer, const Residual& before, const at::Tensor& positions);
  // Its weights are there now, and will be when backward comes to what it leaves.
  void need_for_backward(std::int64_t layer, const Residual& left);
  Residual run_range(LayerRange range, Residual r, const at::Tensor& positions);
  at::Tensor run_recomputed(LayerRange range, const Residual& r, const at::Tensor& positions);
  struct Recomputed;  // the autograd function of a range

  ModelConfig config_;
  Arena& arena_;
  Group* group_;
  LayerGather* gather_ = nullptr;
  Link* link_;
  AttentionShape shape_;
  std::vector<std::unique_ptr<WeightView>> views_;  // one per storage, at stable addresses
  std::vector<Layer> layers_;
  std::vector<LayerRange> recompute_;
  const WeightView *embed_ = nullptr, *norm_ = nullptr, *head_ = nullptr;
  float perturbation_ = 0.0f;
  double embedding_scale_ = 1.0;
  std::int64_t longest_sequence_ = 0;
  // Tables of the first rope_positions_ positions: on the CPU they grow with the positions that
  // come, since a context of 131,072 would fill hundreds of MB that few runs read.
  std::int64_t rope_positions_ = 0;
  std::vector<RopeTable> ropes_;
};

}  // namespace tandem
