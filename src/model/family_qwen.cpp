// Qwen 2 and 2.5 (biases on q, k and v) and Qwen 3 (norms of query and key heads instead). Both may
// have sliding windows from layer max_window_layers on, and only if use_sliding_window says so.
#include "model/family.h"

namespace tandem {
namespace {

void read_windows(ConfigReader& reader, ModelConfig& config) {
  const std::int64_t window = reader.integer("sliding_window", 0, 4096);
  const std::int64_t first = reader.integer("max_window_layers", 0, 28);
  if (!reader.boolean("use_sliding_window", false)) return;
  const auto listed = sliding_layers(reader, config);
  for (std::int64_t i = 0; i < config.num_layers; ++i)
    if (listed ? (*listed)[i] : i >= first) config.layers[i].window = window;
}

void read_both(ConfigReader& reader, ModelConfig& config) {
  config.activation = read_activation(reader, "hidden_act", Activation::silu);
  config.ropes = {read_rope(reader, config)};
  read_windows(reader, config);
}

void read_qwen2(ConfigReader& reader, ModelConfig& config) {
  config.qkv_bias = true;
  read_both(reader, config);
}

void read_qwen3(ConfigReader& reader, ModelConfig& config) {
  read_attention_bias(reader, config, false, true);
  config.qk_norm = QkNorm::head;
  read_both(reader, config);
}

}  // namespace

const Family kQwen2 = {
    .model_type = "qwen2", .architecture = "Qwen2ForCausalLM", .read = read_qwen2};
const Family kQwen3 = {.model_type = "qwen3",
                       .architecture = "Qwen3ForCausalLM",
                       .defaults = {.head_dim = 128},
                       .read = read_qwen3};

}  // namespace tandem
