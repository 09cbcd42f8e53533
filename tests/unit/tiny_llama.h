// A model for tests of layouts and weight updates: rows that are no multiple of a panel (heads of
// 6, 40 intermediate) and a vocabulary that is.
#pragma once

#include "model/hf_config.h"

namespace tandem {

inline ModelConfig tiny_llama() {
  ModelConfig c;
  c.family = "llama";
  c.vocab_size = 64;
  c.hidden_size = 24;
  c.intermediate_size = 40;
  c.num_layers = 2;
  c.num_heads = 4;
  c.num_kv_heads = 2;
  c.head_dim = 6;
  c.layers.resize(2);
  c.ropes.resize(1);
  return c;
}

}  // namespace tandem
