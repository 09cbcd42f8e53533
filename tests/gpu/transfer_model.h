// A model and its weights for tests of weight updates on GPUs.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "model/hf_config.h"

namespace tandem {

inline ModelConfig transfer_model(std::int64_t head_dim, std::int64_t hidden,
                                  std::int64_t intermediate, std::int64_t layers) {
  ModelConfig c;
  c.family = "llama";
  c.vocab_size = 96;
  c.hidden_size = hidden;
  c.intermediate_size = intermediate;
  c.num_layers = layers;
  c.num_heads = 4;
  c.num_kv_heads = 2;
  c.head_dim = head_dim;
  c.layers.resize(static_cast<std::size_t>(layers));
  c.ropes.resize(1);
  return c;
}

// Numbers that bf16 holds exactly; others for another round.
inline std::vector<float> transfer_numbers(std::int64_t n, int round = 0) {
  std::mt19937 random(static_cast<unsigned>(3 + round));
  std::vector<float> flat(static_cast<std::size_t>(n));
  for (float& v : flat) v = static_cast<float>(static_cast<int>(random() % 255) - 127) / 8;
  return flat;
}

}  // namespace tandem
