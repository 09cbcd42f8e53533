// The head's conventions in worked numbers: temperature on every side (case C25), logits in f32
// whatever the weights' type (case C27), and the gradient of log-probability and entropy through
// the whole function against ATen.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "base/check.h"
#include "ops/functions.h"

namespace tandem {
namespace {

// A head [rows, cols] from f32 values, which are exact in the element type.
struct Head {
  Head(Element e, std::int64_t rows, std::int64_t cols, const std::vector<float>& values)
      : memory(static_cast<std::size_t>((rows + kPanel) * (cols + 1)) * 4),
        grad(static_cast<std::size_t>(rows * cols)),
        view{.name = "head", .data = memory.data(), .element = e, .rows = rows, .cols = cols} {
    kernels().write_panels(e, memory.data(), cols, 0, rows, values.data());
  }
  std::vector<std::byte> memory;
  std::vector<float> grad;
  WeightView view;
};

float sampled_log_prob(const std::vector<float>& logits, double temperature) {
  SampleRow row{.row = 0, .temperature = temperature};
  for (row.position = 0; row.position < 100; ++row.position) {
    std::int32_t token = 0;
    float log_prob = 0;
    kernels().sample(logits.data(), static_cast<std::int64_t>(logits.size()), &row, 1, &token,
                     &log_prob);
    if (token == 0) return log_prob;
  }
  return NAN;
}

// Case C25: logits [2, 0], token 0.
TEST(Head, TemperatureIsTheSameOnBothSides) {
  struct Case {
    double temperature, log_prob, entropy;
  };
  // p = 1 / (1 + e^(-2/T)), H = -p·log p - (1 - p)·log(1 - p)
  for (const Case& c : {Case{0.5, -0.018150, 0.090095}, Case{1, -0.126928, 0.365334},
                        Case{2, -0.313262, 0.582203}}) {
    const Head head(Element::f32, 2, 1, {2, 0});
    const std::int32_t ids[] = {0};
    const LogProbs out =
        head_log_probs(at::ones({1, 1}), ids, head.view, static_cast<float>(c.temperature), true);
    EXPECT_NEAR(out.log_probs[0].item<float>(), c.log_prob, 1e-6);
    EXPECT_NEAR(out.entropy[0].item<float>(), c.entropy, 1e-6);
    // The engine's draw: the same bits.
    EXPECT_EQ(sampled_log_prob({2, 0}, c.temperature), out.log_probs[0].item<float>());
  }
  const Head head(Element::f32, 2, 1, {2, 0});
  const std::int32_t ids[] = {0};
  EXPECT_THROW(head_log_probs(at::ones({1, 1}), ids, head.view, 0.0f, false), Error);
}

// Case C27: bf16 weights and hidden states with logits in [4, 8), where bf16 steps by 0.03125.
TEST(Head, LogitsAreF32ForBf16Weights) {
  constexpr std::int64_t kRows = 500, kCols = 64;
  std::mt19937 random(3);
  std::vector<float> values(kRows * kCols);
  for (float& v : values) v = 0.25f + 0.25f * static_cast<float>(random() % 64) / 64;  // exact
  const Head head(Element::bf16, kRows, kCols, values);
  const auto hidden = at::full({1, kCols}, 0.25f).to(at::kBFloat16);
  const auto exact = at::matmul(at::tensor(values).to(at::kDouble).reshape({kRows, kCols}),
                                hidden[0].to(at::kDouble));
  ASSERT_GE(exact.min().item<double>(), 4.0);
  ASSERT_LT(exact.max().item<double>(), 8.0);
  const auto wanted = at::log_softmax(exact, 0);
  const auto rounded = at::log_softmax(exact.to(at::kBFloat16).to(at::kDouble), 0);
  double worst_in_bf16 = 0;
  for (std::int32_t id = 0; id < kRows; ++id) {
    const std::int32_t ids[] = {id};
    const double found =
        head_log_probs(hidden, ids, head.view, 1.0f, false).log_probs[0].item<float>();
    EXPECT_NEAR(found, wanted[id].item<double>(), 1e-5);
    EXPECT_LE(found, 0.0);
    worst_in_bf16 = std::max(worst_in_bf16, std::abs((rounded - wanted)[id].item<double>()));
  }
  EXPECT_GT(worst_in_bf16, 1e-2);  // so the bound above says something
}

TEST(Head, ALogProbabilityIsNeverAboveZero) {
  for (const float gap : {1.0f, 10.0f, 20.0f, 90.0f, 1e4f}) {
    const Head head(Element::f32, 3, 1, {gap, 0, -gap});
    const std::int32_t ids[] = {0};
    const float found =
        head_log_probs(at::ones({1, 1}), ids, head.view, 1.0f, false).log_probs[0].item<float>();
    EXPECT_LE(found, 0.0f);
    EXPECT_NEAR(found, -std::log1p(std::exp(-gap) + std::exp(-2 * gap)), 1e-6);
  }
}

// Hidden states and head against ATen's log_softmax in f64, for a loss with both terms.
TEST(Head, GradientOfLogProbabilityAndEntropy) {
  constexpr std::int64_t kVocabulary = 1030, kCols = 12, kTokens = 7;
  at::manual_seed(1);
  const auto weights = at::randn({kVocabulary, kCols}) * 0.5, x = at::randn({kTokens, kCols});
  const float* w = weights.data_ptr<float>();
  Head head(Element::f32, kVocabulary, kCols, {w, w + weights.numel()});
  head.view.grad = head.grad.data();
  head.view.fresh = true;
  const std::int32_t ids[] = {0, 5, 1029, 7, 7, 1000, 3};
  const auto pick = at::tensor(std::vector<std::int64_t>(std::begin(ids), std::end(ids)));
  const auto a = at::arange(1, kTokens + 1, at::kFloat), b = 2 - 0.3 * a;

  auto hidden = x.clone().requires_grad_(true);
  const LogProbs out = head_log_probs(hidden, ids, head.view, 0.8f, true);
  (out.log_probs * a + out.entropy * b).sum().backward();

  auto hidden64 = x.to(at::kDouble).requires_grad_(true);
  auto weights64 = weights.to(at::kDouble).requires_grad_(true);
  const auto p = at::log_softmax(at::matmul(hidden64, weights64.t()) / 0.8, 1);
  const auto entropy = -(p.exp() * p).sum(1);
  (p.gather(1, pick.unsqueeze(1)).squeeze(1) * a + entropy * b).sum().backward();

  EXPECT_TRUE(at::allclose(out.entropy.detach().to(at::kDouble), entropy.detach(), 1e-5, 1e-5));
  EXPECT_TRUE(at::allclose(hidden.grad().to(at::kDouble), hidden64.grad(), 1e-4, 1e-4));
  const auto found = at::from_blob(head.grad.data(), {kVocabulary, kCols});
  EXPECT_TRUE(at::allclose(found.to(at::kDouble), weights64.grad(), 1e-4, 1e-4));
  // An entropy that is only looked at adds nothing.
  head.view.fresh = true;
  hidden = x.clone().requires_grad_(true);
  head_log_probs(hidden, ids, head.view, 0.8f, true).log_probs.sum().backward();
  const auto looked = hidden.grad().clone();
  hidden = x.clone().requires_grad_(true);
  head_log_probs(hidden, ids, head.view, 0.8f, false).log_probs.sum().backward();
  EXPECT_TRUE(at::equal(looked, hidden.grad()));
}

}  // namespace
}  // namespace tandem
