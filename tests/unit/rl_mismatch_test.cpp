// Ratios of trainer to engine probability: weights, rejections and their metrics, worked by hand.
#include "rl/mismatch.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace tandem {
namespace {

using Floats = std::vector<float>;
using Mask = std::vector<std::uint8_t>;

// Trainer at log_ratios, engine at 0, so the ratios are exp(log_ratios).
MismatchCorrection correct(const Floats& log_ratios, const AlgorithmConfig& a, Mask mask = {}) {
  if (mask.empty()) mask.assign(log_ratios.size(), 1);
  return correct_mismatch(log_ratios, Floats(log_ratios.size(), 0.0f), mask, a);
}

AlgorithmConfig tis(TisMode mode, double low, double high, RatioLevel level = RatioLevel::token) {
  AlgorithmConfig a;
  a.use_tis = true;
  a.tis_mode = mode;
  a.tis_level = level;
  a.tis_clip_low = low;
  a.tis_clip = high;
  return a;
}

void expect_near(const Floats& found, const Floats& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i)
    EXPECT_NEAR(found[i], wanted[i], 1e-5 * (1 + std::abs(wanted[i]))) << i;
}

// Case C21: ratios 0.606531, 12.182494, 0.818731 under the cap 5.
TEST(Mismatch, TruncationReportsBothTheRatioAndTheWeight) {
  const Mask mask(3, 1);
  const auto c = correct({-0.5f, 2.5f, -0.2f}, tis(TisMode::clip, 0, 5));
  expect_near(c.ratio, {0.606531f, 12.182494f, 0.818731f});
  expect_near(c.weights, {0.606531f, 5, 0.818731f});
  const MismatchSums sums = mismatch_sums(c, mask);
  EXPECT_NEAR(sums.ratio / 3, 4.535919, 1e-5);
  EXPECT_NEAR(sums.weight / 3, 2.141754, 1e-5);
  EXPECT_NEAR(sums.bounded / 3, 1.0 / 3, 1e-12);
  EXPECT_NEAR(sums.distance / 3, (0.393469 + 11.182494 + 0.181269) / 3, 1e-5);
  EXPECT_EQ(sums.rejected, 0);
}

// Case C15: ratios 1.105, 0.223, 2.226, 0.0000454, 1.350 kept within [0.5, 2].
TEST(Mismatch, RejectedTokensLeaveTheDenominatorToo) {
  const Floats logs = {0.1f, -1.5f, 0.8f, -10, 0.3f};
  const Mask all(5, 1), kept = {1, 0, 0, 0, 1};
  const auto c = correct(logs, tis(TisMode::mask, 0.5, 2));
  EXPECT_EQ(c.mask, kept);
  const MismatchSums sums = mismatch_sums(c, all);
  EXPECT_EQ(sums.rejected, 3);
  EXPECT_NEAR(sums.weight / (5 - sums.rejected), 1.227515, 1e-6);
  // icepop keeps them in the denominator with weight 0.
  const auto pop = correct(logs, tis(TisMode::icepop, 0.5, 2));
  EXPECT_EQ(pop.mask, all);
  expect_near(pop.weights, {1.105171f, 0, 0, 0, 1.349859f});
  EXPECT_NEAR(mismatch_sums(pop, all).weight / 5, 0.491006, 1e-6);
  // The same rejection without weights.
  AlgorithmConfig rs;
  rs.use_rs = true;
  rs.rs_lower_bound = 0.5;
  rs.rs_upper_bound = 2.0;
  const auto r = correct(logs, rs);
  EXPECT_EQ(r.mask, kept);
  expect_near(r.weights, {1, 1, 1, 1, 1});
}

TEST(Mismatch, LevelsUseTheSequencesLossTokens) {
  const Mask mask = {1, 0, 1, 1};
  const Floats logs = {0.2f, 9, -0.1f, 0.3f};  // the second is not in the loss
  expect_near(correct(logs, tis(TisMode::clip, 0, 9, RatioLevel::sequence), mask).weights,
              {std::exp(0.4f), 1, std::exp(0.4f), std::exp(0.4f)});
  const float mean = std::exp(0.4f / 3);
  expect_near(correct(logs, tis(TisMode::clip, 0, 9, RatioLevel::geometric), mask).weights,
              {mean, 1, mean, mean});
  expect_near(correct(logs, tis(TisMode::clip, 0, 9), mask).weights,
              {std::exp(0.2f), 1, std::exp(-0.1f), std::exp(0.3f)});
}

TEST(Mismatch, OneVetoedTokenRejectsItsSequence) {
  AlgorithmConfig a;
  a.use_rs = true;
  a.rs_level = RatioLevel::sequence;
  a.rs_lower_bound = 0.0;
  a.rs_upper_bound = 1e6;
  EXPECT_EQ(correct({0, -12, 0}, a).mask, (Mask{1, 1, 1}));
  a.rs_veto_threshold = 1e-4;
  EXPECT_EQ(correct({0, -12, 0}, a).mask, (Mask{0, 0, 0}));
  EXPECT_EQ(correct({0, -9, 0}, a).mask, (Mask{1, 1, 1}));  // exp(-9) = 1.2e-4
}

// Case C16: whatever stands outside of the loss has no influence; what is bad inside of it shows.
TEST(Mismatch, OnlyLossTokensCount) {
  const auto a = tis(TisMode::mask, 0.5, 2, RatioLevel::sequence);
  const Mask mask = {1, 0, 1};
  const Floats engine(3, 0.0f);
  const auto clean = correct_mismatch(Floats{0.1f, 0, 0.2f}, engine, mask, a);
  for (const float bad :
       {99.0f, -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    const auto c = correct_mismatch(Floats{0.1f, bad, 0.2f}, engine, mask, a);
    EXPECT_EQ(c.weights, clean.weights);
    EXPECT_EQ(c.mask, clean.mask);
    EXPECT_EQ(mismatch_sums(c, mask).ratio, mismatch_sums(clean, mask).ratio);
  }
  const auto shown = correct({0, NAN}, tis(TisMode::mask, 0.5, 2));
  EXPECT_EQ(shown.mask, (Mask{1, 1}));
  EXPECT_TRUE(std::isnan(shown.weights[1]));
  EXPECT_EQ(correct({0, 99}, tis(TisMode::mask, 0.5, 2)).mask, (Mask{1, 0}));
}

TEST(Mismatch, EqualLogProbabilitiesChangeNothing) {
  for (const TisMode mode : {TisMode::clip, TisMode::icepop, TisMode::mask}) {
    const auto c = correct({0, 0, 0}, tis(mode, 0.5, 2));
    EXPECT_EQ(c.weights, (Floats{1, 1, 1}));
    EXPECT_EQ(c.mask, (Mask{1, 1, 1}));
  }
}

}  // namespace
}  // namespace tandem
