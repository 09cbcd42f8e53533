// The transformer: embedding, layers, last norm, head; and what tensor parallelism adds to each.
#include "model/model.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/check.h"

namespace tandem {
namespace {

AttentionShape shape_of(const ModelConfig& c, std::int64_t tp_size) {
  return {.num_heads = c.num_heads / tp_size,
          .num_kv_heads = std::max<std::int64_t>(1, c.num_kv_heads / tp_size),
          .head_dim = c.head_dim,
          .scale = 1.0f / std::sqrt(static_cast<float>(
                              c.query_pre_attn_scalar.value_or(static_cast<double>(c.head_dim)))),
          .window = 0};
}

RopeTable rope_table(const RopeConfig& rope, const std::vector<float>& freq, std::int64_t positions,
                     at::Device device) {
  const auto half = static_cast<std::int64_t>(freq.size());
  const auto f32 = at::dtype(at::kFloat);
  RopeTable table{.cos = at::empty({positions, half}, f32),
                  .sin = at::empty({positions, half}, f32),
                  .interleaved = rope.interleaved};
  auto *cos = table.cos.data_ptr<float>(), *sin = table.sin.data_ptr<float>();
  const auto factor = static_cast<float>(rope.attention_factor);
  for (std::int64_t p = 0; p < positions; ++p)
    for (std::int64_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(p) * freq[i];
      cos[p * half + i] = std::cos(angle) * factor;
      sin[p * half + i] = std::sin(angle) * factor;
    }
  table.cos = table.cos.to(device);
  table.sin = table.sin.to(device);
  return table;
}

}  // namespace

Model::Model(const ModelConfig& config, Arena& arena, Group* tensor_parallel, float* grads,
             Link* link)
    : config_(config), arena_(arena), group_(tensor_parallel), link_(link) {
  TD_CHECK(place() == Place::cpu || config.head_dim <= kMaxGpuHeadDim,
           "--device cuda: heads of {} elements found (config.json, head_dim), the kernels take at "
           "most {}; use --device cpu",
           config.head_dim, kMaxGpuHeadDim);
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
                   .whole_rows = s.matrix && s.whole_rows != s.rows ? s.whole_rows : 0,
                   .grad = nullptr,
                   .version = arena.version_address()}));
  set_grads(grads);
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    const std::string p = fmt::format("layers.{}.", l);
    Layer layer{.before_attention = find_view(p + "before_attention_norm"),
                .qkv = view(p + "qkv"),
                .qkv_bias = find_view(p + "qkv_bias"),
                .q_norm = find_view(p + "q_norm"),
                .k_norm = find_view(p + "k_norm"),
                .o = view(p + "o"),
                .o_bias = find_view(p + "o_bias"),
                .after_attention = find_view(p + "after_attention_norm"),
                .before_mlp = find_view(p + "before_mlp_norm"),
                .gate_up = view(p + "gate_up"),
                .gate_up_bias = find_view(p + "gate_up_bias"),
                .down = view(p + "down"),
                .down_bias = find_view(p + "down_bias"),
                .after_mlp = find_view(p + "after_mlp_norm"),
                .rope = config.layers[l].rope,
                .kv = {},
                .shape = shape_};
    layer.shape.window = config.layers[l].window;
    layers_.push_back(layer);
  }
  embed_ = view("embed");
  norm_ = view("norm");
  head_ = config.tie_word_embeddings ? embed_ : view("head");
  // Hugging Face keeps this factor in the weights' type.
  embedding_scale_ =
      at::scalar_tensor(config.embedding_scale, at::dtype(scalar_type(element()))).item<double>();
  longest_sequence_ = config.max_position_embeddings;
  // A GPU's captured steps hold the tables' addresses, so there they are whole from the start.
  make_ropes(place() == Place::cpu ? 1 : config.max_position_embeddings);
}

void Model::set_longest_sequence(std::int64_t tokens) {
  longest_sequence_ = tokens;
  if (config_.has_longrope()) make_ropes(rope_positions_);
}

void Model::make_ropes(std::int64_t positions) {
  constexpr std::uint64_t kLeast = 4096;
  const auto rounded = static_cast<std::int64_t>(
      std::bit_ceil(std::max(static_cast<std::uint64_t>(positions), kLeast)));
  rope_positions_ = std::min(rounded, config_.max_position_embeddings);
  ropes_.clear();
  for (const RopeConfig& rope : config_.ropes)
    ropes_.push_back(rope_table(rope, inv_freq(rope, config_.head_dim, longest_sequence_),
                                rope_positions_, device_of(place())));
}

const WeightView* Model::view(const std::string& name) {
  return views_[arena_.storage_index(name)].get();
}

const WeightView* Model::find_view(const std::string& name) {
  for (const auto& v : views_)
    if (name == v->name) return v.get();
  return nullptr;
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

at::Tensor Model::gather(const at::Tensor& local) {
  TD_CHECK(!at::GradMode::is_enabled(), "model: a forward over {} ranks runs without gradients",
           group_->size());
  const std::vector<std::int64_t> shape{group_->size(), local.size(0), local.size(1)};
  if (link_) {
    const auto all = at::empty(shape, local.options());
    link_->gather(local.data_ptr(), all.data_ptr(), static_cast<std::int64_t>(local.nbytes()));
    return all;
  }
  const auto mine = local.cpu();
  const auto all = at::empty(shape, mine.options());
  group_->all_gather({static_cast<const std::byte*>(mine.data_ptr()), mine.nbytes()},
                     {static_cast<std::byte*>(all.data_ptr()), all.nbytes()});
  return all.to(local.device());
}

// [rows, n/size] of every rank, side by side: [rows, n].
at::Tensor Model::gather_columns(const at::Tensor& local) {
  if (is_alone()) return local;
  return gather(local).permute({1, 0, 2}).reshape({local.size(0), group_->size() * local.size(1)});
}

at::Tensor Model::linear_after_cut(const at::Tensor& local, const WeightView& w,
                                   const WeightView* bias) {
  if (is_alone() || arena_.layout().rule == ShardRule::exact)
    return gather_columns(linear(gather_columns(local), w, bias));
  const auto parts = gather(linear_f32(local, w));  // [ranks, rows, n], each of its inputs
  at::Tensor sum = parts[0];
  for (std::int64_t r = 1; r < parts.size(0); ++r) sum.add_(parts[r]);
  if (bias)
    sum.add_(at::from_blob(const_cast<void*>(bias->data), {bias->cols},
                           at::dtype(scalar_type(bias->element)).device(device_of(place()))));
  return sum.to(scalar_type(element()));
}

// Each rank looks up the row that every id would have if it were its own; the owner's is taken. So
// ids may lie on the device alone, and every bit is the table's.
at::Tensor Model::embed_on_gpus(const at::Tensor& tokens) {
  const auto ids = tokens.to(at::kLong);
  const auto owner = ids.floor_divide(embed_->rows);
  const auto local = (ids - owner * embed_->rows).to(at::kInt);
  const auto all = gather(embedding(local, *embed_));  // [ranks, rows, hidden]
  const std::int64_t rows = tokens.size(0);
  return all.flatten(0, 1).index_select(0, owner * rows + at::arange(rows, ids.options()));
}

at::Tensor Model::embed(std::span<const TokenId> tokens) {
  // Hugging Face models name the padding token to nn.Embedding, which then keeps its row's gradient
  // at 0; chat models often use a token of every turn for it, so this shows.
  if (is_alone())
    return embedding(ids_tensor("token id", tokens, embed_->rows, place()), *embed_,
                     config_.pad_id ? *config_.pad_id : -1);
  if (place() == Place::cuda)
    return embed_on_gpus(ids_tensor("token id", tokens, config_.vocab_size, place()));
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

at::Tensor Model::norm(const at::Tensor& x, const WeightView* weight) {
  if (!weight) return x;
  return rms_norm(x, *weight, static_cast<float>(config_.rms_norm_eps),
                  static_cast<float>(config_.norm_offset));
}

// Norms of queries and keys, head by head or over the projections of all ranks.
at::Tensor Model::norm_queries_and_keys(const Layer& l, const at::Tensor& qkv) {
  if (!l.q_norm) return qkv;
  if (config_.qk_norm == QkNorm::head)
    return norm_heads(qkv, shape_, *l.q_norm, *l.k_norm, static_cast<float>(config_.rms_norm_eps),
                      static_cast<float>(config_.norm_offset));
  const std::int64_t q = shape_.num_heads * shape_.head_dim;
  const std::int64_t kv = shape_.num_kv_heads * shape_.head_dim;
  // `copies`: ranks that hold the same columns.
  const auto part = [&](std::int64_t begin, std::int64_t width, std::int64_t copies,
                        const WeightView* w) {
    auto all = gather_columns(qkv.narrow(1, begin, width).contiguous());
    if (copies > 1)
      all = all.reshape({all.size(0), -1, copies, width}).select(2, 0).flatten(1).contiguous();
    all = norm(all, w);
    return group_ ? all.narrow(1, group_->rank() / copies * width, width) : all;
  };
  const std::int64_t ranks = group_ ? group_->size() : 1;
  const std::int64_t copies = std::max<std::int64_t>(1, ranks / config_.num_kv_heads);
  return at::cat(
      {part(0, q, 1, l.q_norm), part(q, kv, copies, l.k_norm), qkv.narrow(1, q + kv, kv)}, 1);
}

AddedNorm Model::add_norm(const Residual& r, const WeightView* weight, float perturbation) {
  if (r.delta.defined() && weight)
    return add_rms_norm(r.x, r.delta, *weight, static_cast<float>(config_.rms_norm_eps),
                        static_cast<float>(config_.norm_offset) + perturbation);
  const auto sum = r.delta.defined() ? r.x + r.delta : r.x;
  return {sum, norm(sum, weight)};
}

at::Tensor Model::attend(const Layer& l, at::Tensor qkv, const at::Tensor& positions) {
  const bool by_head = l.q_norm && config_.qk_norm == QkNorm::head;
  const bool one_pass = is_rollout_call(qkv, l.kv);
  if (!one_pass || !by_head) qkv = norm_queries_and_keys(l, qkv);
  if (one_pass)
    return finish_qkv_and_attend(qkv, l.shape, l.kv,
                                 {.q = by_head ? l.q_norm : nullptr,
                                  .k = by_head ? l.k_norm : nullptr,
                                  .eps = static_cast<float>(config_.rms_norm_eps),
                                  .offset = static_cast<float>(config_.norm_offset)},
                                 positions, l.rope != kNoRope ? &ropes_[l.rope] : nullptr);
  if (l.rope != kNoRope) qkv = rotary(qkv, l.shape, positions, ropes_[l.rope]);
  return attention(qkv, l.shape, l.kv);
}

// Whatever of a layer reads weights in backward runs after delta's gradient is known, and
// everything of the layers above it before.
void Model::need_for_backward(std::int64_t layer, const Residual& left) {
  if (!left.delta.requires_grad()) return;
  left.delta.register_hook([this, layer](const at::Tensor&) { gather_->need(layer); });
}

Model::Residual Model::run_layer(std::int64_t layer, const Residual& before,
                                 const at::Tensor& positions) {
  Layer& l = layers_[layer];
  if (gather_) gather_->need(layer);
  const auto in = add_norm(before, l.before_attention);
  const auto mixed = attend(l, linear(in.normed, *l.qkv, l.qkv_bias), positions);
  const auto middle = add_norm(
      {in.sum, norm(linear_after_cut(mixed, *l.o, l.o_bias), l.after_attention)}, l.before_mlp);
  const auto act = linear_gate_mul(middle.normed, *l.gate_up, l.gate_up_bias, config_.activation,
                                   is_rollout_call(middle.normed, l.kv));
  const Residual left{middle.sum, norm(linear_after_cut(act, *l.down, l.down_bias), l.after_mlp)};
  if (gather_) need_for_backward(layer, left);
  return left;
}

Model::Residual Model::run_range(LayerRange range, Residual r, const at::Tensor& positions) {
  for (std::int64_t i = range.begin; i < range.end; ++i) r = run_layer(i, r, positions);
  return r;
}

std::vector<std::int64_t> Model::layer_order(bool with_backward) const {
  std::vector<std::int64_t> order;
  const auto up = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) order.push_back(i);
  };
  const auto down = [&](std::int64_t end, std::int64_t begin) {
    for (std::int64_t i = end; i-- > begin;) order.push_back(i);
  };
  up(0, config_.num_layers);
  if (!with_backward) return order;
  std::int64_t left = config_.num_layers;
  for (auto range = recompute_.rbegin(); range != recompute_.rend(); ++range) {
    down(left, range->end);
    up(range->begin, range->end);
    down(range->end, range->begin);
    left = range->begin;
  }
  down(left, 0);
  return order;
}

// Each layer writes its keys and values before it reads them, so running it again needs nothing but
// its input, the positions and the context.
struct Model::Recomputed : torch::autograd::Function<Model::Recomputed> {
  using Context = torch::autograd::AutogradContext;
  static at::Tensor run(Model* model, LayerRange range, const at::Tensor& x,
                        const at::Tensor& positions) {
    const Residual r = model->run_range(range, {x, {}}, positions);
    return r.delta.defined() ? r.x + r.delta : r.x;
  }
  static at::Tensor forward(Context* ctx, const at::Tensor& x, const at::Tensor& positions,
                            Model* model, std::int64_t begin, std::int64_t end) {
    ctx->saved_data["model"] = reinterpret_cast<std::int64_t>(model);
    ctx->saved_data["begin"] = begin;
    ctx->saved_data["end"] = end;
    ctx->save_for_backward({x, positions});
    return run(model, {begin, end}, x, positions);
  }
  static torch::autograd::variable_list backward(Context* ctx,
                                                 torch::autograd::variable_list grads) {
    auto* model = reinterpret_cast<Model*>(ctx->saved_data.at("model").toInt());
    const LayerRange range{ctx->saved_data.at("begin").toInt(), ctx->saved_data.at("end").toInt()};
    const auto saved = ctx->get_saved_variables();
    const auto x = saved[0].detach().requires_grad_(true);
    const c10::AutoGradMode with_gradient(true);
    run(model, range, x, saved[1]).backward(grads[0]);
    return {x.grad(), at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

at::Tensor Model::run_recomputed(LayerRange range, const Residual& r, const at::Tensor& positions) {
  const at::Tensor x = r.delta.defined() ? r.x + r.delta : r.x;
  return Recomputed::apply(x, positions, this, range.begin, range.end);
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
  if (place() == Place::cpu && !positions.empty())
    if (const auto last = *std::max_element(positions.begin(), positions.end());
        last >= rope_positions_)
      make_ropes(last + 1);
  return run_layers(embed(tokens),
                    ids_tensor("position", positions, config_.max_position_embeddings, place()),
                    context);
}

at::Tensor Model::forward(const at::Tensor& tokens, const at::Tensor& positions,
                          const AttentionContext& context) {
  return run_layers(is_alone() ? embedding(tokens, *embed_, config_.pad_id ? *config_.pad_id : -1)
                               : embed_on_gpus(tokens),
                    positions, context);
}

at::Tensor Model::run_layers(const at::Tensor& embedded, const at::Tensor& positions,
                             const AttentionContext& context) {
  const bool scaled = config_.embedding_scale != 1.0;
  Residual r{scaled ? embedded * embedding_scale_ : embedded, at::Tensor()};
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const auto index = static_cast<std::int64_t>(i);
    layers_[i].kv = {.k_blocks = context.pool->k_blocks(index),
                     .v_blocks = context.pool->v_blocks(index),
                     .writes = context.writes,
                     .segments = context.segments,
                     .plan = context.plan.get()};
  }
  std::int64_t done = 0;
  if (at::GradMode::is_enabled())
    for (const LayerRange& range : recompute_) {
      r = run_range({done, range.begin}, r, positions);
      r = {run_recomputed(range, r, positions), {}};
      done = range.end;
    }
  r = run_range({done, config_.num_layers}, r, positions);
  return add_norm(r, norm_, perturbation_).normed;
}

at::Tensor Model::logits(const at::Tensor& hidden, std::span<const std::int64_t> rows) {
  const auto index = at::empty({static_cast<std::int64_t>(rows.size())}, at::dtype(at::kLong));
  std::copy(rows.begin(), rows.end(), index.data_ptr<std::int64_t>());
  const auto picked = hidden.index_select(0, index.to(hidden.device()));
  return logits(picked);
}

at::Tensor Model::logits(const at::Tensor& hidden) {
  return gather_columns(linear_f32(hidden, *head_));
}

}  // namespace tandem
