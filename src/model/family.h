// What a model family is to this program: its names in config.json, the values that its files may
// leave out, and a function that turns the rest of config.json into features of ModelConfig (norm
// places, windows and rope by layer, fused tensors, …). The model's body reads the features and
// never asks for a family; so a new family is one small file family_<name>.cpp, a line below, and a
// line in hf_config.cpp.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "model/config_reader.h"
#include "model/hf_config.h"
#include "model/rope_reader.h"

namespace tandem {

// Values for keys that config.json does not name, as transformers has them.
struct FamilyDefaults {
  std::int64_t head_dim = 0;      // 0: hidden_size / num_attention_heads
  std::int64_t num_kv_heads = 0;  // 0: num_attention_heads
  double rms_norm_eps = 1e-6;
  bool tie_word_embeddings = false;
  std::optional<std::int32_t> pad_id = {};
};

struct Family {
  std::string_view model_type;
  std::string_view architecture;
  FamilyDefaults defaults = {};
  // Sizes, eps and tying are read; `layers` has one plain LayerConfig for each layer.
  void (*read)(ConfigReader& reader, ModelConfig& config);
};

extern const Family kLlama, kQwen2, kQwen3, kMistral, kPhi3, kSmolLm3, kOlmo2, kGlm4, kGemma3;

// attention_bias: of q, k and v, and of o where `on_output`.
void read_attention_bias(ConfigReader& reader, ModelConfig& config, bool otherwise, bool on_output);
// hidden_act under the key that the family uses; refuses what is not known.
Activation read_activation(ConfigReader& reader, const std::string& key, Activation otherwise);
// layer_types of transformers 5, true where a layer slides; empty if config.json has none.
std::optional<std::vector<bool>> sliding_layers(ConfigReader& reader, const ModelConfig& config);

}  // namespace tandem
