// The clipped surrogate against values worked out by hand.
#include "rl/losses.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

namespace tandem {
namespace {

at::Tensor tensor(std::vector<float> v) { return at::tensor(v); }

TEST(PolicyLoss, TakesTheLargerBranchAndItsGradient) {
  // ratio 1.5 and 0.5 under clips [0.8, 1.3], with both signs of the advantage.
  const auto old = tensor({0, 0, 0, 0});
  const auto log_probs =
      tensor({std::log(1.5f), std::log(1.5f), std::log(0.5f), std::log(0.5f)}).requires_grad_(true);
  const auto terms = policy_loss(log_probs, old, tensor({1, -1, 1, -1}), 0.2, 0.3);
  const std::vector<float> loss{-1.3f, 1.5f, -0.5f, 0.8f}, clipped{1, 0, 0, 1};
  terms.loss.sum().backward();
  const std::vector<float> grad{0, 1.5f, -0.5f, 0};
  for (int i = 0; i < 4; ++i) {
    EXPECT_NEAR(terms.loss[i].item<float>(), loss[i], 1e-6);
    EXPECT_EQ(terms.clipped[i].item<float>(), clipped[i]);
    EXPECT_NEAR(log_probs.grad()[i].item<float>(), grad[i], 1e-6);
    EXPECT_NEAR(terms.ppo_kl[i].item<float>(), -log_probs[i].item<float>(), 1e-7);
  }
}

TEST(PolicyLoss, AtTheOldPolicyTheGradientIsMinusTheAdvantage) {
  const auto log_probs = tensor({-1, -2}).requires_grad_(true);
  const auto terms = policy_loss(log_probs, log_probs.detach(), tensor({0.5f, -2}), 0.2, 0.2);
  terms.loss.sum().backward();
  EXPECT_EQ(log_probs.grad()[0].item<float>(), -0.5f);
  EXPECT_EQ(log_probs.grad()[1].item<float>(), 2.0f);
}

TEST(PolicyLoss, AFarPolicyStaysFinite) {
  const auto log_probs = tensor({-1, -200}).requires_grad_(true);
  const auto terms = policy_loss(log_probs, tensor({-200, -1}), tensor({1, -1}), 0.2, 0.2);
  terms.loss.sum().backward();
  EXPECT_TRUE(terms.loss.isfinite().all().item<bool>());
  EXPECT_TRUE(log_probs.grad().isfinite().all().item<bool>());
}

}  // namespace
}  // namespace tandem
