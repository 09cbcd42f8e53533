// SmolLM3: llama's layer; every fourth layer (no_rope_layers: 0 means so) does not turn queries and
// keys (NoPE, arXiv 2305.19466), and those are the layers that slide where windows are asked for.
#include "model/family.h"

namespace tandem {
namespace {

// True where a layer turns queries and keys.
std::vector<bool> rope_layers(ConfigReader& reader, const ModelConfig& config) {
  const auto count = static_cast<std::size_t>(config.num_layers);
  const auto interval = static_cast<std::size_t>(reader.integer("no_rope_layer_interval", 1, 4));
  std::vector<bool> turned(count);
  for (std::size_t i = 0; i < count; ++i) turned[i] = (i + 1) % interval != 0;
  const Json* list = reader.find("no_rope_layers");
  if (!list) return turned;
  if (!list->is_array() || list->size() < count) {
    reader.fault("no_rope_layers is {}, wanted a list of 0 and 1, one for each of {} layers",
                 list->dump(), count);
    return turned;
  }
  for (std::size_t i = 0; i < count; ++i) {
    const Json& item = (*list)[i];
    if (item != 0 && item != 1 && !item.is_boolean())
      reader.fault("no_rope_layers[{}] is {}, wanted 0 or 1", i, item.dump());
    turned[i] = item == 1 || item == true;
  }
  return turned;
}

void read(ConfigReader& reader, ModelConfig& config) {
  read_attention_bias(reader, config, false, true);
  config.mlp_bias = reader.boolean("mlp_bias", false);
  config.activation = read_activation(reader, "hidden_act", Activation::silu);
  config.ropes = {read_rope(reader, config, {.theta = 2000000.0})};
  const std::vector<bool> turned = rope_layers(reader, config);
  const auto listed = sliding_layers(reader, config);
  const std::int64_t window =
      reader.boolean("use_sliding_window", false) ? reader.integer("sliding_window", 1, 0) : 0;
  for (std::size_t i = 0; i < turned.size(); ++i) {
    if (!turned[i]) config.layers[i].rope = kNoRope;
    if (listed ? (*listed)[i] : !turned[i]) config.layers[i].window = window;
  }
}

}  // namespace

const Family kSmolLm3 = {
    .model_type = "smollm3",
    .architecture = "SmolLM3ForCausalLM",
    .defaults = {.num_kv_heads = 4, .tie_word_embeddings = true, .pad_id = 128004},
    .read = read};

}  // namespace tandem
