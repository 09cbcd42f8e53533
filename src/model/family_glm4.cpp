// GLM-4-0414: norms before and after attention and MLP, the first half of each head turned by
// neighbouring pairs, biases on q, k and v, gate and up in one tensor of the file. Some folders
// hold layers for predicting further tokens after the last one; they are not part of the model.
#include "model/family.h"

namespace tandem {
namespace {

void read(ConfigReader& reader, ModelConfig& config) {
  config.norms = {.before_attention = "input_layernorm",
                  .after_attention = "post_self_attn_layernorm",
                  .before_mlp = "post_attention_layernorm",
                  .after_mlp = "post_mlp_layernorm"};
  config.fused_gate_up = true;
  read_attention_bias(reader, config, true, false);
  config.activation = read_activation(reader, "hidden_act", Activation::silu);
  config.ropes = {read_rope(reader, config, {.partial = true, .partial_factor = 0.5})};
  config.ropes[0].interleaved = true;
  config.num_extra_layers = reader.integer("num_nextn_predict_layers", 0, 0);
}

}  // namespace

const Family kGlm4 = {
    .model_type = "glm4",
    .architecture = "Glm4ForCausalLM",
    .defaults = {.head_dim = 128, .num_kv_heads = 2, .rms_norm_eps = 1.5625e-7, .pad_id = 151329},
    .read = read};

}  // namespace tandem
