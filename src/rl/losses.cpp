// The clipped surrogate as tensor expressions; autograd differentiates them.
#include "rl/losses.h"

#include <ATen/ATen.h>

#include "base/check.h"

namespace tandem {

PolicyLoss policy_loss(const at::Tensor& log_probs, const at::Tensor& old_log_probs,
                       const at::Tensor& advantages, double eps_clip, double eps_clip_high) {
  TD_CHECK(log_probs.sizes() == old_log_probs.sizes() && log_probs.sizes() == advantages.sizes(),
           "policy loss: {} log-probabilities, {} old ones and {} advantages", log_probs.numel(),
           old_log_probs.numel(), advantages.numel());
  const auto difference = log_probs - old_log_probs;
  const auto ratio = at::exp(at::clamp(difference, -20.0, 20.0));
  const auto free = -ratio * advantages;
  const auto bound = -at::clamp(ratio, 1.0 - eps_clip, 1.0 + eps_clip_high) * advantages;
  // Where both agree the gradient is the free one's, so equal branches do not share it.
  return {.loss = at::where(bound > free, bound, free),
          .clipped = (bound > free).to(at::kFloat),
          .ppo_kl = -difference.detach()};
}

}  // namespace tandem
