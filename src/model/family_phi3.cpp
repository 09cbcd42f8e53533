// Phi-3 and Phi-4 (arXiv 2404.14219): q, k, v in one tensor of the file, gate and up in another;
// long rope with the original length beside it; a part of each head may stay unturned (Phi-4-mini).
#include "model/family.h"

namespace tandem {
namespace {

void read(ConfigReader& reader, ModelConfig& config) {
  config.fused_qkv = config.fused_gate_up = true;
  config.activation = read_activation(reader, "hidden_act", Activation::silu);
  config.ropes = {read_rope(reader, config, {.partial = true, .original_max_positions = 4096})};
  if (const RopeType type = config.ropes[0].type;
      type != RopeType::standard && type != RopeType::longrope) {
    reader.fault("rope_scaling of this family is of type longrope (or su) or absent");
  }
  const std::int64_t window = reader.integer("sliding_window", 1, 0);
  for (LayerConfig& layer : config.layers) layer.window = window;
}

}  // namespace

const Family kPhi3 = {.model_type = "phi3",
                      .architecture = "Phi3ForCausalLM",
                      .defaults = {.rms_norm_eps = 1e-5, .pad_id = 32000},
                      .read = read};

}  // namespace tandem
