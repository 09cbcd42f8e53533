// Group advantages against worked values.
#include "rl/advantages.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/check.h"

namespace tandem {
namespace {

using Floats = std::vector<float>;
using Ids = std::vector<std::uint64_t>;

GroupAdvantages of_one_group(const std::vector<double>& rewards,
                             const AdvantageOptions& options = {}) {
  return group_advantages(Ids(rewards.size(), 5), rewards, options);
}

// Case C01: exactly 0 where all are equal, also for values that f32 and sums do not hold exactly.
TEST(GrpoAdvantages, EqualRewardsGiveExactlyZero) {
  for (const std::vector<double>& rewards :
       {std::vector<double>(4, 1.0), std::vector<double>(8, 0.35), std::vector<double>(7, 0.1),
        std::vector<double>(3, -1e300)}) {
    for (const bool std_normalization : {true, false}) {
      const auto result = of_one_group(rewards, {.grpo_std_normalization = std_normalization});
      EXPECT_EQ(result.advantages, Floats(rewards.size(), 0.0f));
      EXPECT_EQ(result.zero_std_groups, 1);
      EXPECT_EQ(result.single_sample_groups, 0);
    }
  }
}

// Case C02's rewards: mean 0.30625, sample std 0.35 / sqrt(8).
TEST(GrpoAdvantages, OneOddReward) {
  std::vector<double> rewards(8, 0.35);
  rewards[0] = 0.0;
  const double std = 0.35 / std::sqrt(8.0);
  const auto result = of_one_group(rewards);
  EXPECT_NEAR(result.advantages[0], -0.30625 / (std + 1e-6), 1e-6);  // -2.4748537
  EXPECT_NEAR(result.advantages[0], -2.4748537, 3e-5);
  for (int i = 1; i < 8; ++i) EXPECT_NEAR(result.advantages[i], 0.04375 / (std + 1e-6), 1e-6);
  const auto plain = of_one_group(rewards, {.grpo_std_normalization = false});
  EXPECT_NEAR(plain.advantages[0], -0.30625, 1e-7);
  EXPECT_NEAR(plain.advantages[7], 0.04375, 1e-7);
  EXPECT_EQ(result.zero_std_groups, 0);
}

// Case C03: one sample has no spread; 0 and counted, never NaN.
TEST(GrpoAdvantages, SingleSample) {
  const auto result = of_one_group({1.0});
  EXPECT_EQ(result.advantages, Floats{0.0f});
  EXPECT_EQ(result.single_sample_groups, 1);
  EXPECT_EQ(result.zero_std_groups, 1);
}

// [1,0,0,0]: mean 0.25, squares 0.75, sample std 0.5. [2,4]: mean 3, std sqrt 2.
TEST(GrpoAdvantages, GroupsAreFoundByPromptWhateverTheOrder) {
  const auto result =
      group_advantages(Ids{9, 4, 9, 4, 9, 9}, std::vector<double>{1, 2, 0, 4, 0, 0});
  EXPECT_EQ(result.num_groups, 2);
  const Floats wanted = {
      static_cast<float>(0.75 / 0.500001),  static_cast<float>(-1 / (std::sqrt(2.0) + 1e-6)),
      static_cast<float>(-0.25 / 0.500001), static_cast<float>(1 / (std::sqrt(2.0) + 1e-6)),
      static_cast<float>(-0.25 / 0.500001), static_cast<float>(-0.25 / 0.500001)};
  for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_FLOAT_EQ(result.advantages[i], wanted[i]);
}

TEST(GrpoAdvantages, WithoutNormalisationTheRewardItself) {
  const auto result = of_one_group({1, 1, 0.5}, {.rewards_normalization = false});
  EXPECT_EQ(result.advantages, (Floats{1, 1, 0.5f}));
  EXPECT_EQ(of_one_group({1, 1}, {.rewards_normalization = false}).zero_std_groups, 1);
}

TEST(GrpoAdvantages, RewardsMustBeFinite) {
  for (const double bad :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    EXPECT_THROW(of_one_group({1.0, bad}), Error);
  }
  EXPECT_TRUE(group_advantages({}, {}).advantages.empty());
}

// Rewards 1, 0, 0, 0.5 and what each estimator makes of them.
TEST(GroupAdvantages, Estimators) {
  using E = AdvantageEstimator;
  const std::vector<double> rewards = {1, 0, 0, 0.5};  // mean 0.375, squares 0.6875
  const double std = std::sqrt(0.6875 / 3) + 1e-6;
  struct Case {
    E estimator;
    double scale, shift;  // (r - shift) / scale
  };
  for (const Case& c : {Case{E::grpo, std, 0.375}, Case{E::gspo, std, 0.375},
                        Case{E::reinforce_plus_plus_baseline, 1, 0.375},
                        Case{E::reinforce_plus_plus, 1, 0}, Case{E::rloo, 0.75, 0.375}}) {
    const auto result = of_one_group(rewards, {.estimator = c.estimator});
    for (int i = 0; i < 4; ++i)
      EXPECT_NEAR(result.advantages[i], (rewards[i] - c.shift) / c.scale, 1e-6) << i;
  }
  // rloo by its definition: 1 - (0 + 0 + 0.5) / 3.
  EXPECT_NEAR(of_one_group(rewards, {.estimator = E::rloo}).advantages[0], 1 - 0.5 / 3, 1e-6);
}

// Case C02: leave-one-out with one odd reward.
TEST(GroupAdvantages, LeaveOneOutWithOneOddReward) {
  std::vector<double> rewards(8, 0.35);
  rewards[0] = 0.0;
  const auto result = of_one_group(rewards, {.estimator = AdvantageEstimator::rloo});
  EXPECT_NEAR(result.advantages[0], -0.35, 1e-7);
  for (int i = 1; i < 8; ++i) EXPECT_NEAR(result.advantages[i], 0.05, 1e-7);
  const auto one = of_one_group({1.0}, {.estimator = AdvantageEstimator::rloo});
  EXPECT_EQ(one.advantages, Floats{0.0f});
}

// ---- per token ----

// REINFORCE++ (Hu et al. 2025): reward 2 at the last loss token, -0.5·kl at each, gamma 0.9.
TEST(TokenAdvantages, DiscountedReturns) {
  const std::vector<float> kl = {0.2f, 9, 0.4f, 0.6f, 9};
  const std::vector<std::uint8_t> mask = {1, 0, 1, 1, 0};
  const auto returns = discounted_returns(2, kl, mask, 0.5, 0.9);
  const double last = 2 - 0.3, third = -0.2 + 0.9 * last, second = 0.9 * third;
  const std::vector<double> wanted = {-0.1 + 0.9 * second, second, third, last, 0};
  for (int t = 0; t < 5; ++t) EXPECT_NEAR(returns[t], wanted[t], 1e-6) << t;
  // Without a KL and a discount every token up to the last gets the reward.
  EXPECT_EQ(discounted_returns(2, {}, mask, 0.5, 1.0), (Floats{2, 2, 2, 2, 0}));
  EXPECT_EQ(discounted_returns(2, {}, std::vector<std::uint8_t>(3, 0), 0, 1), Floats(3, 0.0f));
}

TrainBatch batch_of(const Floats& advantages, const std::vector<std::vector<std::uint8_t>>& masks) {
  TrainBatch batch;
  batch.advantages = advantages;
  for (std::size_t i = 0; i < masks.size(); ++i) {
    Sample s;
    s.id = i;
    s.loss_mask = masks[i];
    s.response_length = static_cast<std::int64_t>(masks[i].size());
    batch.samples.push_back(s);
  }
  return batch;
}

TEST(TokenAdvantages, ByEstimator) {
  const TrainBatch batch = batch_of({1, -2}, {{1, 1}, {1}});
  const TokenValues kl = {{0.2f, 0.4f}, {0.6f}};
  AlgorithmConfig a;
  a.kl_coef = 0.5;
  EXPECT_EQ(token_advantages(batch, kl, a).advantages, (TokenValues{{1, 1}, {-2}}));
  a.advantage_estimator = AdvantageEstimator::reinforce_plus_plus_baseline;
  const auto baseline = token_advantages(batch, kl, a).advantages;
  EXPECT_NEAR(baseline[0][1], 1 - 0.5 * 0.4, 1e-6);
  EXPECT_NEAR(baseline[1][0], -2 - 0.5 * 0.6, 1e-6);
  a.advantage_estimator = AdvantageEstimator::reinforce_plus_plus;
  const auto returns = token_advantages(batch, kl, a).returns;
  EXPECT_NEAR(returns[0][0], -0.1 - 0.2 + 1, 1e-6);
}

// Values 1, 1, -2 and one outside of the loss: mean 0, variance (1 + 1 + 4) / 2 = 3.
TEST(TokenAdvantages, WhiteningCountsLossTokensOnly) {
  AlgorithmConfig a;
  a.normalize_advantages = true;
  const TrainBatch batch = batch_of({1, -2}, {{1, 1}, {1, 0}});
  const TokenAdvantages out = token_advantages(batch, {}, a);
  EXPECT_EQ(out.returns, (TokenValues{{1, 1}, {-2, -2}}));
  EXPECT_NEAR(out.advantages[0][0], 1 / std::sqrt(3 + 1e-8), 1e-6);
  EXPECT_NEAR(out.advantages[1][0], -2 / std::sqrt(3 + 1e-8), 1e-6);
  // Equal values, one token, none: zeros, never a blown-up rounding error.
  for (const TrainBatch& flat : {batch_of({0.1f, 0.1f}, {{1, 1}, {1, 1}}), batch_of({3}, {{1}})})
    for (const auto& values : token_advantages(flat, {}, a).advantages)
      for (const float v : values) EXPECT_EQ(v, 0.0f);
  EXPECT_EQ(token_advantages(batch_of({3}, {{0}}), {}, a).advantages, (TokenValues{{3}}));
}

}  // namespace
}  // namespace tandem
