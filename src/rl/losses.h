// Policy losses per token: tensors in, tensors out; no reduction over samples and no process.
#pragma once

#include <ATen/core/Tensor.h>

#include "config/config.h"

namespace tandem {

struct PolicyLoss {
  at::Tensor loss;     // f32 [tokens], differentiable in log_probs
  at::Tensor clipped;  // f32 [tokens], 1 where the clipped branch is the larger
  at::Tensor ppo_kl;   // f32 [tokens], old - new (the k1 estimate), no gradient
};

// The clipped surrogate of Schulman et al. 2017 with separate bounds (DAPO, Yu et al. 2025):
// ratio = exp(clamp(log_probs - old_log_probs, ±20)),
// loss = max(-ratio·A, -clamp(ratio, 1 - eps_clip, 1 + eps_clip_high)·A).
// All inputs f32 [tokens].
PolicyLoss policy_loss(const at::Tensor& log_probs, const at::Tensor& old_log_probs,
                       const at::Tensor& advantages, double eps_clip, double eps_clip_high);

}  // namespace tandem
