// The policy loss per token and what is measured beside it: tensors in, tensors out; no reduction
// over samples, no process. Tensors are f32 [tokens], sample by sample; only log_probs and entropy
// carry a gradient. Nothing is masked here: tokens outside of the loss are never passed in, so what
// stands at them (NaN, infinity) cannot reach a gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "config/config.h"

namespace tandem {

// KL(policy ‖ base) per token, estimated from the sampled tokens' log-probabilities (Schulman,
// "Approximating KL divergence", 2020); with d = log_probs - base_log_probs
//   k1 = d    k2 = d²/2    k3 = exp(-d) - 1 + d    low_var_kl = k3 held within ±10.
// k3 and low_var_kl take d within ±20 (the bound that Miles, slime and verl use for low_var_kl), so
// that value and gradient are finite for every finite d; beyond it the gradient is 0. `ratio`, when
// defined, multiplies the estimate (before low_var_kl's bound): with the ratio of new to old
// probability its gradient is unbiased (DeepSeek-V3.2, 2025). NaN stays NaN.
at::Tensor approximate_kl(const at::Tensor& log_probs, const at::Tensor& base_log_probs,
                          KlLossType type, const at::Tensor& ratio = {});

struct PolicyLoss {
  at::Tensor loss;     // differentiable in ppo_kl
  at::Tensor clipped;  // 1 where the clipped branch is the larger
};

// The clipped surrogate of Schulman et al. 2017 with separate bounds (DAPO, Yu et al. 2025):
// ratio = exp(clamp(-ppo_kl, ±20)), loss = max(-ratio·A, -clamp(ratio, 1 - eps_clip,
// 1 + eps_clip_high)·A). eps_clip_c (dual clip, Ye et al. 2020): where A < 0 the loss is at most
// -eps_clip_c·A. ppo_kl is old - new log-probability, or its mean over the sequence (GSPO).
PolicyLoss policy_loss(const at::Tensor& ppo_kl, const at::Tensor& advantages, double eps_clip,
                       double eps_clip_high, std::optional<double> eps_clip_c = std::nullopt);

struct LossInput {
  at::Tensor log_probs;            // of the present policy
  at::Tensor entropy;              // undefined: neither in the loss nor measured
  at::Tensor old_log_probs;        // of the policy that the ratio compares with
  at::Tensor reference_log_probs;  // undefined: no KL
  at::Tensor advantages;
  at::Tensor policy_weights;                    // multiply the policy loss (TIS); undefined: 1
  std::span<const std::int64_t> sample_tokens;  // tokens of each sample, in order; none is 0
};

struct LossTerms {
  at::Tensor policy;  // differentiable
  at::Tensor extra;   // kl_loss_coef·KL - entropy_coef·entropy; undefined if neither counts
  // Without gradient:
  at::Tensor clipped, ppo_kl;
  at::Tensor kl;         // undefined: no reference
  at::Tensor ess_ratio;  // effective share of a sample's tokens: (Σw)² / (n·Σw²), w = new / old
  at::Tensor opsm_clipped;  // 1 for tokens masked by --use-opsm; undefined without it
};

// All terms that the settings ask for. gspo: the ratio is the exponential of the mean over the
// sample's loss tokens (Zheng et al. 2025). use_opsm: policy 0 where A < 0 and the sample's mean of
// old - new is above opsm_delta (DeepSeek-V3.2).
LossTerms loss_terms(const LossInput& input, const AlgorithmConfig& algorithm);

// What one token of a sample weighs in means over the global batch of an optimizer step.
// Default: mean over the sample's loss tokens, then over samples; a sample without loss tokens
// counts as a sample and adds nothing. Per token: 1 / all loss tokens, and no floor under a sample.
class TokenWeights {
 public:
  // `tokens`: loss tokens of each sample of the step. constant_length (Dr. GRPO, Liu et al. 2025):
  // the policy loss of a sample is its sum over tokens divided by it.
  TokenWeights(std::span<const std::int64_t> tokens, bool per_token,
               std::optional<std::int64_t> constant_length = std::nullopt);
  // Of a sample with that many loss tokens (at least 1).
  double mean(std::int64_t sample_tokens) const;
  double policy(std::int64_t sample_tokens) const;

 private:
  double sample_ = 0, token_ = 0;  // 1 / samples; 1 / tokens or 0
  bool per_token_;
  std::optional<std::int64_t> constant_length_;
};

}  // namespace tandem
