// Log-probabilities, loss and gradients of given token sequences, by the arithmetic that training
// and rollout use: what `tandem score` prints and what golden tests compare with other programs.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "data/sample.h"
#include "model/model.h"
#include "trainer/gradients.h"

namespace tandem {

struct Score {
  std::vector<float> log_probs;  // of ids[1..], one per next token, at temperature 1
  float loss = 0;                // mean cross-entropy over them
  // L2 norm of the loss's gradient by Hugging Face parameter name; empty unless asked for.
  std::map<std::string, double> gradient_norms;
};

class Scorer {
 public:
  Scorer(const ModelConfig& config, Arena& arena, bool gradients);

  // Packed, as in training; ids has at least two tokens. Gradients are of this sequence alone.
  Score through_trainer(std::span<const TokenId> ids);
  // Paged, as in rollout: a prefill of the first half, then one row at a time.
  Score through_engine(std::span<const TokenId> ids);

 private:
  std::map<std::string, double> norms() const;
  // Long rope turns a sequence by its own length.
  void prepare(std::span<const TokenId> ids);

  Arena& arena_;
  bool gradients_;
  FlatBuffer grads_;
  Model model_;
};

}  // namespace tandem
