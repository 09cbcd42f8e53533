// A Hugging Face config.json as plain numbers: the one description from which the model is built,
// the weight files are accounted for. No torch here.
//
// Read are the older hub style (rope_theta, rope_scaling, torch_dtype) and that of transformers 5
// (rope_parameters, dtype), flat or inside text_config. Nothing is guessed in silence: an unknown
// family, activation, rope or layer type is refused with the list of known ones, and where two keys
// say the same thing differently both are named. A family is one row in kFamilies (hf_config.cpp).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "model/rope_config.h"

namespace tandem {

struct ModelConfig {
  std::string family;        // model_type of the language model: "llama", "qwen2", "qwen3"
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
  bool tie_word_embeddings = false;
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  bool qk_norm = false;  // RMS norm over head_dim of q and k, before the rotation
  RopeConfig rope;

  // By layer: how many tokens back attention sees, 0 = all. Always num_layers long.
  std::vector<std::int64_t> sliding_windows;
  bool has_sliding_window() const;

  std::vector<std::int32_t> eos_ids;  // generation_config.json's list, else config.json's
  std::optional<std::int32_t> bos_id;
  std::optional<std::int32_t> pad_id;

  std::int64_t q_rows() const { return num_heads * head_dim; }
  std::int64_t kv_rows() const { return num_kv_heads * head_dim; }
};

// Reads <folder>/config.json and, if present, <folder>/generation_config.json. One Error lists all
// faults, each beginning with the path and the key.
ModelConfig read_model_config(const std::string& folder);

// The same from parsed JSON; `generation` may be null. `where` and `generation_where` begin errors.
ModelConfig parse_model_config(const Json& config, std::string_view where, const Json* generation,
                               std::string_view generation_where);

// A tensor that the family's weight files hold.
struct ExpectedTensor {
  std::string name;  // Hugging Face name
  std::vector<std::int64_t> shape;
  // Not empty: the tensor may be absent, and if present must equal this one (a tied head).
  std::string copy_of;
};

// All tensors of the model in the order of the forward pass.
std::vector<ExpectedTensor> expected_tensors(const ModelConfig& config);

// True for buffers that older files carry and every reader computes (…rotary_emb.inv_freq).
bool is_recomputable_buffer(std::string_view name);

std::string known_families();  // "llama, qwen2, qwen3"

}  // namespace tandem
