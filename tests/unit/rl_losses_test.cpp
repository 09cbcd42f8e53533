// Loss terms against values worked out by hand (the source of a formula stands at its table), and
// their gradients against finite differences in f64.
#include "rl/losses.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "base/check.h"

namespace tandem {
namespace {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

at::Tensor tensor(const Floats& v) { return at::tensor(v); }
at::Tensor exact(const Doubles& v) { return at::tensor(v, at::dtype(at::kDouble)); }

void expect_near(const at::Tensor& found, const Doubles& wanted, double tolerance,
                 const char* what = "") {
  ASSERT_EQ(found.numel(), static_cast<std::int64_t>(wanted.size())) << what;
  for (std::size_t i = 0; i < wanted.size(); ++i)
    EXPECT_NEAR(found[static_cast<std::int64_t>(i)].item<double>(), wanted[i], tolerance)
        << what << " at " << i;
}

// The gradient of sum(f(x)·weight) at x by autograd and by central differences agree.
void expect_gradient(const std::function<at::Tensor(const at::Tensor&)>& f, const Doubles& at,
                     const char* what) {
  const auto weight = at::arange(1, static_cast<std::int64_t>(at.size()) + 1, at::kDouble);
  auto x = exact(at).requires_grad_(true);
  (f(x) * weight).sum().backward();
  for (std::size_t i = 0; i < at.size(); ++i) {
    constexpr double kStep = 1e-6;
    Doubles up = at, down = at;
    up[i] += kStep;
    down[i] -= kStep;
    const double slope =
        ((f(exact(up)) - f(exact(down))) * weight).sum().item<double>() / (2 * kStep);
    EXPECT_NEAR(x.grad()[static_cast<std::int64_t>(i)].item<double>(), slope,
                1e-5 * (1 + std::abs(slope)))
        << what << " at " << i;
  }
}

constexpr KlLossType kAllKinds[] = {KlLossType::k1, KlLossType::k2, KlLossType::k3,
                                    KlLossType::low_var_kl};

// ---- KL (case C17; Schulman 2020: k1 = d, k2 = d²/2, k3 = e^-d - 1 + d) ----

TEST(ApproximateKl, WorkedValues) {
  struct Case {
    double d, k1, k2, k3;
  };
  const Case cases[] = {{0, 0, 0, 0},
                        {1, 1, 0.5, 0.367879},
                        {-1, -1, 0.5, 0.718282},
                        {0.5, 0.5, 0.125, 0.106531},
                        {-0.2, -0.2, 0.02, 0.021403},
                        {2, 2, 2, 1.135335}};
  for (const Case& c : cases) {
    const auto policy = tensor({static_cast<float>(c.d) - 3.0f}), base = tensor({-3.0f});
    const double values[] = {c.k1, c.k2, c.k3, c.k3};
    for (int k = 0; k < 4; ++k)
      expect_near(approximate_kl(policy, base, kAllKinds[k]), {values[k]}, 1e-6,
                  name_of(kAllKinds[k]).data());
  }
}

TEST(ApproximateKl, GradientsAgreeWithFiniteDifferences) {
  for (const KlLossType kind : kAllKinds) {
    const auto base = exact({-1, -2, -0.5, -3, -1});
    expect_gradient([&](const at::Tensor& x) { return approximate_kl(x, base, kind); },
                    {-0.5, -3, -0.5, -3.2, -2.5}, name_of(kind).data());
    // With the ratio of new to old probability its own gradient counts too.
    const auto old = exact({-1, -2.5, -0.5, -3, -2});
    expect_gradient(
        [&](const at::Tensor& x) { return approximate_kl(x, base, kind, at::exp(x - old)); },
        {-0.5, -3, -0.5, -3.2, -2.5}, name_of(kind).data());
  }
}

// Case C18: the reference far likelier (or far less likely) than the policy.
TEST(ApproximateKl, ValueAndGradientAreFiniteEverywhere) {
  for (const KlLossType kind : kAllKinds) {
    const Floats far = {-100, 100, -1000, 1000, -20.5, -3e4f, 1e30f, -1e30f};
    auto policy = tensor(far).requires_grad_(true);
    // k2 squares, so it is finite as far as a square is.
    if (kind == KlLossType::k2) policy = tensor({-100, 100, -1e4f, 1e4f}).requires_grad_(true);
    const auto kl = approximate_kl(policy, at::zeros_like(policy), kind);
    kl.sum().backward();
    EXPECT_TRUE(kl.isfinite().all().item<bool>()) << name_of(kind);
    EXPECT_TRUE(policy.grad().isfinite().all().item<bool>()) << name_of(kind);
  }
  // Within ±10 k3 is the plain formula.
  Floats near;
  for (int d = -10; d <= 10; ++d) near.push_back(static_cast<float>(d));
  const auto kl = approximate_kl(tensor(near), at::zeros({21}), KlLossType::k3);
  for (int i = 0; i < 21; ++i) {
    const double d = near[i], plain = std::exp(-d) - 1 + d;
    EXPECT_NEAR(kl[i].item<double>(), plain, 2e-7 * (1 + plain));
  }
  // At d = -3 low_var_kl passes its bound of 10.
  expect_near(approximate_kl(tensor({-2, -3, -100}), at::zeros({3}), KlLossType::low_var_kl),
              {std::exp(2.0) - 3, 10, 10}, 1e-5);
}

TEST(ApproximateKl, NanStaysNan) {
  for (const KlLossType kind : kAllKinds)
    EXPECT_TRUE(std::isnan(approximate_kl(tensor({NAN}), tensor({-1}), kind).item<float>()));
}

// Case C19: k1 may be negative, the others never are.
TEST(ApproximateKl, OnlyK1IsEverNegative) {
  const auto d = at::linspace(-9, 9, 1801);
  for (const KlLossType kind : kAllKinds) {
    const float lowest = approximate_kl(d, at::zeros_like(d), kind).min().item<float>();
    if (kind == KlLossType::k1)
      EXPECT_EQ(lowest, -9.0f);
    else
      EXPECT_GE(lowest, 0.0f) << name_of(kind);
  }
}

// ---- policy loss (Schulman et al. 2017; DAPO's two bounds; dual clip of Ye et al. 2020) ----

TEST(PolicyLoss, TakesTheLargerBranchAndItsGradient) {
  // ratio 1.5 and 0.5 under clips [0.8, 1.3], with both signs of the advantage.
  const auto log_probs =
      tensor({std::log(1.5f), std::log(1.5f), std::log(0.5f), std::log(0.5f)}).requires_grad_(true);
  const auto terms = policy_loss(-log_probs, tensor({1, -1, 1, -1}), 0.2, 0.3);
  terms.loss.sum().backward();
  expect_near(terms.loss, {-1.3, 1.5, -0.5, 0.8}, 1e-6);
  expect_near(terms.clipped, {1, 0, 0, 1}, 0);
  expect_near(log_probs.grad(), {0, 1.5, -0.5, 0}, 1e-6);
}

TEST(PolicyLoss, DualClipBoundsTheLossOfNegativeAdvantages) {
  // Ratios 2, 4, 4, 0.5 under c = 3: only -ratio·A above 3·|A| with A < 0 is cut.
  const auto log_probs =
      tensor({std::log(2.0f), std::log(4.0f), std::log(4.0f), std::log(0.5f)}).requires_grad_(true);
  const auto advantages = tensor({-1, -2, 1, -1});
  const auto terms = policy_loss(-log_probs, advantages, 0.2, 0.2, 3.0);
  terms.loss.sum().backward();
  expect_near(terms.loss, {2, 6, -1.2, 0.8}, 1e-6);
  expect_near(log_probs.grad(), {2, 0, 0, 0}, 1e-6);
  expect_near(policy_loss(-log_probs, advantages, 0.2, 0.2).loss, {2, 8, -1.2, 0.8}, 1e-6);
}

TEST(PolicyLoss, GradientsAgreeWithFiniteDifferences) {
  const auto advantages = exact({1, -1, 0.5, -2, 0, 3});
  for (const std::optional<double> c : {std::optional<double>(), std::optional<double>(2.0)})
    expect_gradient(
        [&](const at::Tensor& x) { return policy_loss(-x, advantages, 0.2, 0.3, c).loss; },
        {0.1, 0.9, -0.5, -0.05, 0.3, 0.26}, "policy loss");
}

TEST(PolicyLoss, AtTheOldPolicyTheGradientIsMinusTheAdvantage) {
  const auto log_probs = tensor({-1, -2}).requires_grad_(true);
  policy_loss(log_probs.detach() - log_probs, tensor({0.5f, -2}), 0.2, 0.2).loss.sum().backward();
  EXPECT_EQ(log_probs.grad()[0].item<float>(), -0.5f);
  EXPECT_EQ(log_probs.grad()[1].item<float>(), 2.0f);
}

TEST(PolicyLoss, AFarPolicyStaysFinite) {
  const auto log_probs = tensor({-1, -200}).requires_grad_(true);
  const auto terms = policy_loss(tensor({-200, -1}) - log_probs, tensor({1, -1}), 0.2, 0.2);
  terms.loss.sum().backward();
  EXPECT_TRUE(terms.loss.isfinite().all().item<bool>());
  EXPECT_TRUE(log_probs.grad().isfinite().all().item<bool>());
}

// ---- all terms together ----

constexpr std::int64_t kTwoAndOne[] = {2, 1};

LossInput input_of(const at::Tensor& log_probs) {
  const auto like = log_probs.options().requires_grad(false);
  return {.log_probs = log_probs,
          .entropy = {},
          .old_log_probs = at::tensor(Doubles{-1, -2, -1.5}, at::kDouble).to(like.dtype()),
          .reference_log_probs = {},
          .advantages = at::tensor(Doubles{1, 1, -1}, at::kDouble).to(like.dtype()),
          .policy_weights = {},
          .sample_tokens = kTwoAndOne};
}

// GSPO (Zheng et al. 2025): the ratio is exp of the sample's mean of new - old, for each token.
TEST(LossTerms, GspoUsesTheMeanOverTheSequence) {
  AlgorithmConfig a;
  a.advantage_estimator = AdvantageEstimator::gspo;
  const auto log_probs = tensor({-0.9f, -1.7f, -1.6f}).requires_grad_(true);
  const LossTerms terms = loss_terms(input_of(log_probs), a);
  expect_near(terms.ppo_kl, {-0.2, -0.2, 0.1}, 1e-6);
  expect_near(terms.policy, {-1.2, -1.2, std::exp(-0.1)}, 1e-6);  // exp(0.2) is clipped at 1.2
  terms.policy.sum().backward();
  expect_near(log_probs.grad(), {0, 0, std::exp(-0.1)}, 1e-6);
  expect_gradient([&](const at::Tensor& x) { return loss_terms(input_of(x), a).policy; },
                  {-0.9, -2.0, -1.6}, "gspo");
}

TEST(LossTerms, ExtraIsTheKlMinusTheEntropy) {
  AlgorithmConfig a;
  a.use_kl_loss = true;
  a.kl_loss_coef = 0.5;
  a.entropy_coef = 0.1;
  LossInput in = input_of(tensor({-1, -2, -1.5f}).requires_grad_(true));
  in.reference_log_probs = tensor({-2, -2, -1});
  in.entropy = tensor({1, 2, 3}).requires_grad_(true);
  const LossTerms terms = loss_terms(in, a);  // k1: d = 1, 0, -0.5
  expect_near(terms.kl, {1, 0, -0.5}, 1e-6);
  expect_near(terms.extra, {0.5 - 0.1, 0 - 0.2, -0.25 - 0.3}, 1e-6);
  terms.extra.sum().backward();
  expect_near(in.entropy.grad(), {-0.1, -0.1, -0.1}, 1e-7);
  expect_near(in.log_probs.grad(), {0.5, 0.5, 0.5}, 1e-7);

  a.entropy_coef = a.kl_loss_coef = 0;  // measured, but not in the loss
  const LossTerms measured = loss_terms(in, a);
  EXPECT_FALSE(measured.extra.defined());
  expect_near(measured.kl, {1, 0, -0.5}, 1e-6);
}

TEST(LossTerms, UnbiasedKlCarriesTheRatio) {
  AlgorithmConfig a;
  a.use_kl_loss = a.use_unbiased_kl = true;
  a.kl_loss_coef = 1;
  a.kl_loss_type = KlLossType::k3;
  const auto f = [&](const at::Tensor& x) {
    LossInput in = input_of(x);
    in.reference_log_probs = exact({-2, -2, -1}).to(x.dtype());
    return loss_terms(in, a).extra;
  };
  const auto x = tensor({-0.5f, -2, -1});
  const auto d = Doubles{1.5, 0, 0};
  expect_near(f(x), {std::exp(0.5) * (std::exp(-d[0]) - 1 + d[0]), 0, 0}, 1e-6);
  expect_gradient(f, {-0.5, -1.9, -1.2}, "unbiased kl");
}

TEST(LossTerms, WeightsAndOpsmMultiplyThePolicyPart) {
  AlgorithmConfig a;
  LossInput in = input_of(tensor({-1, -2, -1.9f}));
  in.policy_weights = tensor({2, 0, 1});
  expect_near(loss_terms(in, a).policy, {-2, 0, 0.8}, 1e-6);  // third: ratio exp(-0.4) below 0.8
  // OPSM: third sample has A < 0 and old - new = 0.4.
  a.use_opsm = true;
  a.opsm_delta = 0.3;
  const LossTerms masked = loss_terms(in, a);
  expect_near(masked.policy, {-2, 0, 0}, 1e-6);
  expect_near(masked.opsm_clipped, {0, 0, 1}, 0);
  a.opsm_delta = 0.5;
  expect_near(loss_terms(in, a).policy, {-2, 0, 0.8}, 1e-6);
}

// (Σw)² / (n Σw²): 1 on policy; weights 1 and e^0.5 give 0.942.
TEST(LossTerms, EffectiveSampleSize) {
  AlgorithmConfig a;
  const LossTerms terms = loss_terms(input_of(tensor({-1, -1.5f, -0.2f})), a);
  const double e = std::exp(0.5), share = (1 + e) * (1 + e) / (2 * (1 + e * e));
  expect_near(terms.ess_ratio, {share, share, 1}, 1e-6);
}

TEST(LossTerms, SizesMustAgree) {
  LossInput in = input_of(tensor({-1, -2, -1}));
  in.advantages = tensor({1, 1});
  EXPECT_THROW(loss_terms(in, {}), Error);
}

// ---- denominators ----

// Case C10: row 1 has losses 2 at 5 tokens, row 2 one token of 10.
TEST(TokenWeights, TokenMeanSampleMeanAndConstantLength) {
  constexpr std::int64_t tokens[] = {5, 1};
  const TokenWeights sample(tokens, false), token(tokens, true), constant(tokens, false, 4);
  const auto total = [&](auto&& weight) { return 5 * 2 * weight(5) + 10 * weight(1); };
  EXPECT_NEAR(total([&](std::int64_t n) { return token.policy(n); }), 20.0 / 6, 1e-12);
  EXPECT_NEAR(total([&](std::int64_t n) { return sample.policy(n); }), 6.0, 1e-12);
  // Dr. GRPO: (10 / 4 + 10 / 4) / 2; other terms keep the sample mean.
  EXPECT_NEAR(total([&](std::int64_t n) { return constant.policy(n); }), 2.5, 1e-12);
  EXPECT_NEAR(total([&](std::int64_t n) { return constant.mean(n); }), 6.0, 1e-12);
}

// Case C13: a sample without loss tokens adds no token to the denominator; none at all is no NaN.
TEST(TokenWeights, FullyMaskedSamples) {
  constexpr std::int64_t tokens[] = {4, 0}, none[] = {0, 0};
  EXPECT_EQ(TokenWeights(tokens, true).mean(4), 0.25);
  EXPECT_EQ(TokenWeights(tokens, false).mean(4), 0.125);  // a sample of two, as in Miles
  EXPECT_EQ(TokenWeights(none, true).mean(1), 0.0);
}

}  // namespace
}  // namespace tandem
