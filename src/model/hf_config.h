// A Hugging Face config.json as plain numbers: the one description from which the model is built
// and the weight files are accounted for. No torch here.
//
// Read are the older hub style (rope_theta, rope_scaling, torch_dtype) and that of transformers 5
// (rope_parameters, layer_types, dtype), flat or inside text_config. Nothing is guessed in silence:
// an unknown family, activation, rope or layer type is refused with the list of known ones, and
// where two keys say the same thing differently both are named. What a family is stands in
// family_<name>.cpp; here it has become features, and nothing behind here asks for its name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "model/rope_config.h"
#include "ops/kernels/kernels.h"

namespace tandem {

// RMS norms of queries and keys before the rotation: none, over head_dim, over all heads at once.
enum class QkNorm : std::uint8_t { none, head, projection };

inline constexpr std::int64_t kNoRope = -1;

// What may differ from layer to layer.
struct LayerConfig {
  std::int64_t window = 0;  // tokens that a position sees, itself included; 0: all before it
  std::int64_t rope = 0;    // index into ModelConfig::ropes; kNoRope: not rotated
};

// A layer's norms by their Hugging Face names inside the layer; empty: there is none.
struct LayerNorms {
  std::string before_attention = "input_layernorm";
  std::string after_attention = {};  // of what attention adds to the residual stream
  std::string before_mlp = "post_attention_layernorm";
  std::string after_mlp = {};
};

struct ModelConfig {
  std::string family;        // model_type of the language model: "llama", "qwen2", "gemma3_text"
  std::string architecture;  // "LlamaForCausalLM"
  std::string dtype;         // what the config says the weights are: "bfloat16"; empty: nothing

  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_layers = 0;
  std::int64_t num_heads = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t max_position_embeddings = 0;

  double rms_norm_eps = 1e-6;
  double norm_offset = 0.0;  // norms multiply by weight + norm_offset
  LayerNorms norms;
  QkNorm qk_norm = QkNorm::none;
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  Activation activation = Activation::silu;
  double embedding_scale = 1.0;
  std::optional<double> query_pre_attn_scalar;  // scores are divided by its root; empty: head_dim
  std::vector<RopeConfig> ropes;
  std::vector<LayerConfig> layers;  // always num_layers long

  // How the files hold the weights.
  bool tie_word_embeddings = false;
  bool fused_qkv = false;             // self_attn.qkv_proj
  bool fused_gate_up = false;         // mlp.gate_up_proj
  std::int64_t num_extra_layers = 0;  // after the last layer, known and not used

  std::vector<std::int32_t> eos_ids;  // generation_config.json's list, else config.json's
  std::optional<std::int32_t> bos_id;
  std::optional<std::int32_t> pad_id;

  std::int64_t q_rows() const { return num_heads * head_dim; }
  std::int64_t kv_rows() const { return num_kv_heads * head_dim; }
  bool has_sliding_window() const;
  bool has_longrope() const;
};

// Reads <folder>/config.json and, if present, <folder>/generation_config.json. One Error lists all
// faults, each beginning with the path and the key.
ModelConfig read_model_config(const std::string& folder);

// The same from parsed JSON; `generation` may be null. `where` and `generation_where` begin errors.
ModelConfig parse_model_config(const Json& config, std::string_view where, const Json* generation,
                               std::string_view generation_where);

std::string known_families();  // "llama, qwen2, qwen3, …"

}  // namespace tandem
