// OLMo 2 (arXiv 2501.00656): no norm before attention and MLP but one after each, and norms of
// queries and keys over the whole projection.
#include "model/family.h"

namespace tandem {
namespace {

void read(ConfigReader& reader, ModelConfig& config) {
  config.norms = {.before_attention = "",
                  .after_attention = "post_attention_layernorm",
                  .before_mlp = "",
                  .after_mlp = "post_feedforward_layernorm"};
  config.qk_norm = QkNorm::projection;
  read_attention_bias(reader, config, false, true);
  config.activation = read_activation(reader, "hidden_act", Activation::silu);
  config.ropes = {read_rope(reader, config)};
}

}  // namespace

const Family kOlmo2 = {.model_type = "olmo2",
                       .architecture = "Olmo2ForCausalLM",
                       .defaults = {.rms_norm_eps = 1e-5, .pad_id = 1},
                       .read = read};

}  // namespace tandem
