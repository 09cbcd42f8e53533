// The one place that knows the Hugging Face names of weights; families change them by features.
#include "model/parameters.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/check.h"

namespace tandem {
namespace {

constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";

struct Module {
  std::string name;
  std::int64_t rows = 0, kv_head_rows = 0;
};
using Modules = std::vector<Module>;

// The weights of one layer.
class LayerWeights {
 public:
  LayerWeights(const ModelConfig& config, std::int64_t layer, std::vector<ModelWeight>& out)
      : c_(config),
        own_(fmt::format("layers.{}.", layer)),
        hf_(fmt::format("model.layers.{}.", layer)),
        out_(out) {}

  void add() {
    const std::string self = "self_attn.", mlp = "mlp.";
    norm("before_attention_norm", c_.norms.before_attention, c_.hidden_size);
    linear("qkv", c_.hidden_size,
           {{self + "q_proj", c_.q_rows()},
            {self + "k_proj", c_.kv_rows(), c_.head_dim},
            {self + "v_proj", c_.kv_rows(), c_.head_dim}},
           c_.qkv_bias, c_.fused_qkv ? self + "qkv_proj" : "");
    if (c_.qk_norm != QkNorm::none) {
      const bool whole = c_.qk_norm == QkNorm::projection;
      norm("q_norm", self + "q_norm", whole ? c_.q_rows() : c_.head_dim);
      norm("k_norm", self + "k_norm", whole ? c_.kv_rows() : c_.head_dim);
    }
    linear("o", c_.q_rows(), {{self + "o_proj", c_.hidden_size}}, c_.o_bias, "", true);
    norm("after_attention_norm", c_.norms.after_attention, c_.hidden_size);
    norm("before_mlp_norm", c_.norms.before_mlp, c_.hidden_size);
    linear("gate_up", c_.hidden_size,
           {{mlp + "gate_proj", c_.intermediate_size}, {mlp + "up_proj", c_.intermediate_size}},
           c_.mlp_bias, c_.fused_gate_up ? mlp + "gate_up_proj" : "");
    linear("down", c_.intermediate_size, {{mlp + "down_proj", c_.hidden_size}}, c_.mlp_bias, "",
           true);
    norm("after_mlp_norm", c_.norms.after_mlp, c_.hidden_size);
  }

 private:
  void norm(const char* name, const std::string& module, std::int64_t width) {
    if (module.empty()) return;
    out_.push_back({.name = own_ + name,
                    .kind = WeightKind::vector,
                    .cols = width,
                    .parts = {{hf_ + module + ".weight", 1, 0, 1}}});
  }

  // One matrix of modules one under the other, and its biases. `fused`: the one Hugging Face module
  // that holds them all; empty: each has its own name.
  void linear(const std::string& name, std::int64_t cols, const Modules& modules, bool bias,
              const std::string& fused = "", bool after_cut = false) {
    const auto parts = [&](const char* tensor) {
      std::vector<WeightPart> all;
      std::int64_t row = 0;
      for (const Module& m : modules) {
        all.push_back({.hf_name = hf_ + (fused.empty() ? m.name : fused) + tensor,
                       .rows = m.rows,
                       .hf_row = fused.empty() ? 0 : row,
                       .hf_rows = m.rows,
                       .kv_head_rows = m.kv_head_rows});
        row += m.rows;
      }
      for (WeightPart& part : all)
        if (!fused.empty()) part.hf_rows = row;
      return all;
    };
    out_.push_back({own_ + name, WeightKind::matrix, cols, parts(".weight"), after_cut});
    if (bias)
      out_.push_back({own_ + name + "_bias", WeightKind::bias, 1, parts(".bias"), after_cut});
  }

  const ModelConfig& c_;
  std::string own_, hf_;
  std::vector<ModelWeight>& out_;
};

// Whether every rank holds all rows.
bool keeps_rows(const ModelWeight& weight, ShardRule rule) {
  return weight.kind == WeightKind::vector || (weight.after_cut && rule == ShardRule::row_parallel);
}

}  // namespace

std::int64_t cols_of_rank(const ModelWeight& weight, std::int64_t num_ranks, ShardRule rule) {
  return weight.kind == WeightKind::matrix && keeps_rows(weight, rule) ? weight.cols / num_ranks
                                                                       : weight.cols;
}

std::int64_t rows_of_rank(const ModelWeight& weight, const WeightPart& part, std::int64_t num_ranks,
                          ShardRule rule) {
  if (keeps_rows(weight, rule)) return part.rows;
  const std::int64_t heads = part.kv_head_rows > 0 ? part.rows / part.kv_head_rows : 0;
  if (heads > 0 && heads < num_ranks) return part.kv_head_rows;
  TD_CHECK(part.rows % num_ranks == 0, "{}: {} rows cannot be cut over {} tensor-parallel ranks",
           part.hf_name, part.rows, num_ranks);
  return part.rows / num_ranks;
}

std::optional<std::int64_t> layer_of(std::string_view name) {
  constexpr std::string_view kPrefix = "layers.";
  std::int64_t layer = 0;
  if (!name.starts_with(kPrefix) ||
      std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), layer).ec !=
          std::errc())
    return std::nullopt;
  return layer;
}

std::vector<std::int64_t> hf_shape(const ModelWeight& weight, const WeightPart& part) {
  switch (weight.kind) {
    case WeightKind::vector:
      return {weight.cols};
    case WeightKind::bias:
      return {part.hf_rows};
    case WeightKind::matrix:
      break;
  }
  return {part.hf_rows, weight.cols};
}

std::vector<ModelWeight> model_weights(const ModelConfig& c) {
  std::vector<ModelWeight> out;
  const auto table = [&](const char* name, const char* hf_name) {
    out.push_back({.name = name,
                   .kind = WeightKind::matrix,
                   .cols = c.hidden_size,
                   .parts = {{hf_name, c.vocab_size, 0, c.vocab_size}}});
  };
  table("embed", kEmbedding);
  for (std::int64_t i = 0; i < c.num_layers; ++i) LayerWeights(c, i, out).add();
  out.push_back({.name = "norm",
                 .kind = WeightKind::vector,
                 .cols = c.hidden_size,
                 .parts = {{"model.norm.weight", 1, 0, 1}}});
  if (!c.tie_word_embeddings) table("head", kHead);
  return out;
}

std::string tensor_parallel_fault(const ModelConfig& c, std::int64_t num_ranks, ShardRule rule) {
  // (what, how many) that a number of ranks must divide.
  std::vector<std::pair<std::string, std::int64_t>> cut{{"num_attention_heads", c.num_heads},
                                                        {"intermediate_size", c.intermediate_size},
                                                        {"vocab_size", c.vocab_size}};
  if (rule == ShardRule::exact) cut.emplace_back("hidden_size", c.hidden_size);
  const auto fits = [&](std::int64_t n) {
    return (c.num_kv_heads % n == 0 || n % c.num_kv_heads == 0) &&
           std::all_of(cut.begin(), cut.end(), [&](const auto& p) { return p.second % n == 0; });
  };
  if (num_ranks >= 1 && fits(num_ranks)) return {};
  std::vector<std::string> faults;
  for (const auto& [name, count] : cut)
    if (count % num_ranks != 0) faults.push_back(fmt::format("{} {}", name, count));
  if (c.num_kv_heads % num_ranks != 0 && num_ranks % c.num_kv_heads != 0)
    faults.push_back(fmt::format("num_key_value_heads {}", c.num_kv_heads));
  std::vector<std::int64_t> widths;
  for (std::int64_t n = 1; n <= c.num_heads; ++n)
    if (fits(n)) widths.push_back(n);
  return fmt::format(
      "{} tensor-parallel ranks found, but {} cannot be shared evenly by them; {} fit", num_ranks,
      fmt::join(faults, ", "), fmt::join(widths, ", "));
}

std::vector<ExpectedTensor> expected_tensors(const ModelConfig& config) {
  std::vector<ExpectedTensor> out;
  for (const ModelWeight& weight : model_weights(config)) {
    for (const WeightPart& part : weight.parts) {
      if (part.hf_row > 0) continue;
      out.push_back({part.hf_name, hf_shape(weight, part), {}});
    }
  }
  if (config.tie_word_embeddings)
    out.push_back({kHead, {config.vocab_size, config.hidden_size}, kEmbedding});
  return out;
}

bool is_recomputable_buffer(std::string_view name) {
  return name.ends_with("rotary_emb.inv_freq") || name.ends_with("rotary_emb_local.inv_freq");
}

bool is_extra_layer(const ModelConfig& config, std::string_view name) {
  constexpr std::string_view kPrefix = "model.layers.";
  if (!name.starts_with(kPrefix)) return false;
  name.remove_prefix(kPrefix.size());
  std::int64_t layer = -1;
  const auto [end, fault] = std::from_chars(name.data(), name.data() + name.size(), layer);
  return fault == std::errc() && end != name.data() + name.size() && *end == '.' &&
         layer >= config.num_layers && layer < config.num_layers + config.num_extra_layers;
}

}  // namespace tandem
