// Mistral (arXiv 2310.06825): llama's layer; every layer sees only the last sliding_window tokens.
// null means no window, an absent key 4096.
#include "model/family.h"

namespace tandem {
namespace {

void read(ConfigReader& reader, ModelConfig& config) {
  config.activation = read_activation(reader, "hidden_act", Activation::silu);
  config.ropes = {read_rope(reader, config)};
  const std::int64_t window =
      reader.integer("sliding_window", 1, reader.names("sliding_window") ? 0 : 4096);
  for (LayerConfig& layer : config.layers) layer.window = window;
}

}  // namespace

const Family kMistral = {.model_type = "mistral",
                         .architecture = "MistralForCausalLM",
                         .defaults = {.num_kv_heads = 8},
                         .read = read};

}  // namespace tandem
