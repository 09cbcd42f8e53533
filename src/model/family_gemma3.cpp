// Gemma 3, text (arXiv 2503.19786): five layers with a window and a rope base of their own for each
// layer that sees all; norms before and after attention and MLP and of query and key heads, all of
// them times (1 + weight); embeddings times sqrt(hidden_size); scores divided by
// sqrt(query_pre_attn_scalar); gated GELU.
#include <cmath>

#include "model/family.h"

namespace tandem {
namespace {

enum Rope : std::int64_t { kGlobal, kLocal };

void read_layers(ConfigReader& reader, ModelConfig& config) {
  const std::int64_t window = reader.integer("sliding_window", 1);
  const std::int64_t pattern = reader.integer("sliding_window_pattern", 1, 6);
  const auto listed = sliding_layers(reader, config);
  for (std::int64_t i = 0; i < config.num_layers; ++i)
    if (listed ? (*listed)[i] : (i + 1) % pattern != 0)
      config.layers[i] = {.window = window, .rope = kLocal};
}

void read(ConfigReader& reader, ModelConfig& config) {
  config.norms = {.before_attention = "input_layernorm",
                  .after_attention = "post_attention_layernorm",
                  .before_mlp = "pre_feedforward_layernorm",
                  .after_mlp = "post_feedforward_layernorm"};
  config.norm_offset = 1.0;
  config.qk_norm = QkNorm::head;
  config.embedding_scale = std::sqrt(static_cast<double>(config.hidden_size));
  config.query_pre_attn_scalar = reader.number("query_pre_attn_scalar", 256.0);
  if (config.query_pre_attn_scalar == 0.0) reader.fault("query_pre_attn_scalar is 0");
  read_attention_bias(reader, config, false, true);
  config.activation = read_activation(reader, "hidden_activation", Activation::gelu_tanh);
  config.ropes = {read_rope(reader, config, {.layer_type = "full_attention", .theta = 1000000.0}),
                  read_rope(reader, config,
                            {.layer_type = "sliding_attention",
                             .theta_key = "rope_local_base_freq",
                             .theta = 10000.0,
                             .scaled = false})};
  read_layers(reader, config);
  for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping"})
    if (reader.find(key))
      reader.fault("{} is {}; soft caps are not known", key, reader.find(key)->dump());
  if (reader.boolean("use_bidirectional_attention", false))
    reader.fault("use_bidirectional_attention is true; only causal attention is known");
}

}  // namespace

const Family kGemma3 = {
    .model_type = "gemma3_text",
    .architecture = "Gemma3ForCausalLM",
    .defaults = {.head_dim = 256, .num_kv_heads = 4, .tie_word_embeddings = true, .pad_id = 0},
    .read = read};

}  // namespace tandem
