// Llama 2 and 3 and what is built like them (SmolLM2, …): the plain layer; biases only where the
// config asks for them.
#include "model/family.h"

namespace tandem {
namespace {

void read(ConfigReader& reader, ModelConfig& config) {
  read_attention_bias(reader, config, false, true);
  config.mlp_bias = reader.boolean("mlp_bias", false);
  config.activation = read_activation(reader, "hidden_act", Activation::silu);
  config.ropes = {read_rope(reader, config)};
}

}  // namespace

const Family kLlama = {.model_type = "llama", .architecture = "LlamaForCausalLM", .read = read};

}  // namespace tandem
