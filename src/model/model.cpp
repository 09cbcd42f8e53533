// The transformer: embedding, layers, last norm, head; and what tensor parallelism adds to each.
#include "model/model.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace tandem {
namespace {

AttentionShape shape_of(const ModelConfig& c, std::int64_t tp_size) {
  return {.num_heads = c.num_heads / tp_size,
          .num_kv_heads = c.num_kv_heads / tp_size,
          .head_dim = c.head_dim,
          .scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim)),
          .window = 0};
}

}  // namespace

Model::Model(const ModelConfig& config, Arena& arena, Group* tensor_parallel, float* grads)
    : config_(config), arena_(arena), group_(tensor_parallel) {
  const std::int64_t tp_size = group_ ? group_->size() : 1;
  shape_ = shape_of(config, tp_size);
  for (const ArenaStorage& s : arena.layout().storages)
    views_.push_back(std::make_unique<WeightView>(
        WeightView{.name = s.name.c_str(),
                   .data = arena.storage_data(static_cast<std::int64_t>(views_.size())),
                   .element = arena.layout().element,
                   .place = arena.place(),
                   .rows = s.matrix ? s.rows : 1,
                   .cols = s.matrix ? s.cols : s.rows * s.cols,
                   .grad = nullptr,
                   .version = arena.version_address()}));
  set_grads(grads);
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    const std::string p = fmt::format("layers.{}.", l);
    Layer layer{.input_norm = view(p + "input_norm"),
                .qkv = view(p + "qkv"),
                .qkv_bias = config.qkv_bias ? view(p + "qkv_bias") : nullptr,
                .q_norm = config.qk_norm ? view(p + "q_norm") : nullptr,
                .k_norm = config.qk_norm ? view(p + "k_norm") : nullptr,
                .o = view(p + "o"),
                .o_bias = config.o_bias ? view(p + "o_bias") : nullptr,
                .post_norm = view(p + "post_norm"),
                .gate_up = view(p + "gate_up"),
                .gate_up_bias = config.mlp_bias ? view(p + "gate_up_bias") : nullptr,
                .down = view(p + "down"),
                .down_bias = config.mlp_bias ? view(p + "down_bias") : nullptr,
                .kv = {},
                .shape = shape_};
    layer.shape.window = config.sliding_windows[l];
    layers_.push_back(layer);
  }
  embed_ = view("embed");
  norm_ = view("norm");
  head_ = config.tie_word_embeddings ? embed_ : view("head");

  const auto freq = inv_freq(config.rope, config.head_dim);
  const auto half = static_cast<std::int64_t>(freq.size());
  cos_ = at::empty({config.max_position_embeddings, half}, at::dtype(at::kFloat));
  sin_ = at::empty_like(cos_);
  const auto factor = static_cast<float>(config.rope.attention_factor);
  for (std::int64_t p = 0; p < config.max_position_embeddings; ++p)
    for (std::int64_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(p) * freq[i];
      cos_.data_ptr<float>()[p * half + i] = std::cos(angle) * factor;
      sin_.data_ptr<float>()[p * half + i] = std::sin(angle) * factor;
    }
  cos_ = cos_.to(device_of(place()));
  sin_ = sin_.to(device_of(place()));
}

const WeightView* Model::view(const std::string& name) {
  return views_[arena_.storage_index(name)].get();
}

void Model::rebind() {
  for (std::size_t i = 0; i < views_.size(); ++i)
    views_[i]->data = arena_.storage_data(static_cast<std::int64_t>(i));
}

void Model::set_grads(float* grads) {
  TD_CHECK(!grads || !group_ || group_->size() == 1,
           "model: gradients with {} tensor-parallel ranks are not built yet", group_->size());
  for (std::size_t i = 0; i < views_.size(); ++i) {
    views_[i]->grad = grads ? grads + arena_.layout().storages[i].flat_begin : nullptr;
    views_[i]->fresh = grads != nullptr;
  }
}

void Model::finish_grads() {
  for (auto& v : views_) {
    if (v->fresh) zero_memory(v->place, v->grad, v->rows * v->cols * 4);
    v->fresh = false;
  }
}

// [rows, n/size] of every rank, side by side: [rows, n].
at::Tensor Model::gather_columns(const at::Tensor& local) {
  if (!group_ || group_->size() == 1) return local;
  TD_CHECK(!at::GradMode::is_enabled(), "model: a forward over {} ranks runs without gradients",
           group_->size());
  const auto all = at::empty({group_->size(), local.size(0), local.size(1)}, local.options());
  group_->all_gather({static_cast<const std::byte*>(local.data_ptr()), local.nbytes()},
                     {static_cast<std::byte*>(all.data_ptr()), all.nbytes()});
  return all.permute({1, 0, 2}).reshape({local.size(0), group_->size() * local.size(1)});
}

at::Tensor Model::embed(std::span<const TokenId> tokens) {
  // Hugging Face models name the padding token to nn.Embedding, which then keeps its row's gradient
  // at 0; chat models often use a token of every turn for it, so this shows.
  if (!group_ || group_->size() == 1)
    return embedding(ids_tensor("token id", tokens, embed_->rows, place()), *embed_,
                     config_.pad_id ? *config_.pad_id : -1);
  // Each rank looks up the ids of its own rows; the others' rows are zero, so the sum is exact.
  const auto first = static_cast<TokenId>(group_->rank() * embed_->rows);
  std::vector<TokenId> local(tokens.begin(), tokens.end());
  std::vector<std::int64_t> absent;
  for (std::size_t i = 0; i < local.size(); ++i) {
    TD_CHECK(local[i] >= 0 && local[i] < config_.vocab_size, "token id: {} is outside [0, {})",
             local[i], config_.vocab_size);
    const bool mine = local[i] >= first && local[i] < first + embed_->rows;
    if (!mine) absent.push_back(static_cast<std::int64_t>(i));
    local[i] = mine ? local[i] - first : 0;
  }
  auto x = embedding(ids_tensor("token id", local, embed_->rows, place()), *embed_).to(at::kFloat);
  for (std::int64_t row : absent) x[row].zero_();
  group_->all_reduce_sum(std::span<float>(x.data_ptr<float>(), x.numel()));
  return x.to(scalar_type(element()));
}

// RMS norm of every query and key head over head_dim.
at::Tensor Model::norm_heads(const Layer& l, const at::Tensor& qkv) {
  if (!l.q_norm) return qkv;
  const auto eps = static_cast<float>(config_.rms_norm_eps);
  const std::int64_t rows = qkv.size(0), dim = shape_.head_dim;
  const std::int64_t q = shape_.num_heads * dim, kv = shape_.num_kv_heads * dim;
  auto part = [&](std::int64_t begin, std::int64_t width, const WeightView& w) {
    const auto heads = qkv.narrow(1, begin, width).reshape({-1, dim}).contiguous();
    return rms_norm(heads, w, eps).reshape({rows, width});
  };
  return at::cat({part(0, q, *l.q_norm), part(q, kv, *l.k_norm), qkv.narrow(1, q + kv, kv)}, 1);
}

at::Tensor Model::run_layer(Layer& l, const at::Tensor& x, const at::Tensor& positions) {
  const auto eps = static_cast<float>(config_.rms_norm_eps);
  auto h = rms_norm(x, *l.input_norm, eps);
  auto qkv = rotary(norm_heads(l, linear(h, *l.qkv, l.qkv_bias)), shape_, positions, cos_, sin_);
  auto mixed = gather_columns(attention(qkv, l.shape, l.kv));
  auto y = x + gather_columns(linear(mixed, *l.o, l.o_bias));
  h = rms_norm(y, *l.post_norm, eps);
  auto act = gather_columns(silu_mul(linear(h, *l.gate_up, l.gate_up_bias)));
  return y + gather_columns(linear(act, *l.down, l.down_bias));
}

at::Tensor Model::forward(std::span<const TokenId> tokens, std::span<const std::int32_t> positions,
                          AttentionContext& context) {
  if (place() == Place::cuda)
    context.plan.reset(cuda_part().plan_attention(
        element(), shape_,
        {.segments = context.segments.data(),
         .num_segments = static_cast<std::int64_t>(context.segments.size()),
         .writes = context.writes.data(),
         .num_writes = static_cast<std::int64_t>(context.writes.size()),
         .rows = static_cast<std::int64_t>(tokens.size())}));
  auto x = embed(tokens);
  const auto at_positions = ids_tensor("position", positions, cos_.size(0), place());
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const auto index = static_cast<std::int64_t>(i);
    layers_[i].kv = {.k_blocks = context.pool->k_blocks(index),
                     .v_blocks = context.pool->v_blocks(index),
                     .writes = context.writes,
                     .segments = context.segments,
                     .plan = context.plan.get()};
    x = run_layer(layers_[i], x, at_positions);
  }
  return rms_norm(x, *norm_, static_cast<float>(config_.rms_norm_eps), norm_offset_);
}

at::Tensor Model::logits(const at::Tensor& hidden, std::span<const std::int64_t> rows) {
  const auto index = at::empty({static_cast<std::int64_t>(rows.size())}, at::dtype(at::kLong));
  std::copy(rows.begin(), rows.end(), index.data_ptr<std::int64_t>());
  const auto picked = hidden.index_select(0, index.to(hidden.device()));
  if (!group_ || group_->size() == 1) return tandem::logits(picked, *head_);
  return gather_columns(tandem::logits(picked, *head_));
}

}  // namespace tandem
