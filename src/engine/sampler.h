// Drawing a token where more than the temperature decides: penalties, bias, forbidden ids, top-k,
// top-p, min-p. Without them a token is drawn by the kernel (ops/kernels/softmax.h).
//
// p is the softmax of the changed logits over the temperature. Tokens stand by p, the smaller id
// first where equal; kept are those of rank < top_k, with less than top_p of the mass before them,
// and with p >= min_p · largest p; all three look at p as it was before any was left out (SGLang's
// joint order). One number keyed by (seed, sample id, position) chooses among the kept by their
// mass. What is recorded is another matter: always the log-probability in the full softmax of the
// model's own logits over the temperature, which the trainer computes from token ids alone.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/scheduler.h"

namespace tandem {

class Sampler {
 public:
  // The token of a draw from one row of logits, which is not changed. Any row of the host.
  TokenId draw(std::span<const float> logits, const PlanDraw& draw,
               std::span<const LogitChange> changes);

 private:
  struct Candidate {
    float logit;
    TokenId id;
  };

  TokenId draw_truncated(std::span<const float> logits, const PlanDraw& draw);
  bool gather(std::span<const float> logits, const PlanDraw& draw, float top, double depth);
  std::size_t count_kept(const PlanDraw& draw, double log_sum_exp, bool all) const;

  std::vector<float> changed_;
  std::vector<Candidate> candidates_;
};

// z' = scaled(z - subtract) + add, where scaled divides what is positive by `scale` and multiplies
// the rest with it (Keskar et al. 2019).
void apply_changes(std::span<const LogitChange> changes, std::span<float> logits);

}  // namespace tandem
