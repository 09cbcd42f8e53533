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
  return grpo_advantages(Ids(rewards.size(), 5), rewards, options);
}

// Case C01: exactly 0 where all are equal, also for values that f32 and sums do not hold exactly.
TEST(GrpoAdvantages, EqualRewardsGiveExactlyZero) {
  for (const std::vector<double>& rewards :
       {std::vector<double>(4, 1.0), std::vector<double>(8, 0.35), std::vector<double>(7, 0.1),
        std::vector<double>(3, -1e300)}) {
    for (const bool std_normalization : {true, false}) {
      const auto result = of_one_group(rewards, {true, std_normalization});
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
  const auto plain = of_one_group(rewards, {true, false});
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
  const auto result = grpo_advantages(Ids{9, 4, 9, 4, 9, 9}, std::vector<double>{1, 2, 0, 4, 0, 0});
  EXPECT_EQ(result.num_groups, 2);
  const Floats wanted = {
      static_cast<float>(0.75 / 0.500001),  static_cast<float>(-1 / (std::sqrt(2.0) + 1e-6)),
      static_cast<float>(-0.25 / 0.500001), static_cast<float>(1 / (std::sqrt(2.0) + 1e-6)),
      static_cast<float>(-0.25 / 0.500001), static_cast<float>(-0.25 / 0.500001)};
  for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_FLOAT_EQ(result.advantages[i], wanted[i]);
}

TEST(GrpoAdvantages, WithoutNormalisationTheRewardItself) {
  const auto result = of_one_group({1, 1, 0.5}, {false, true});
  EXPECT_EQ(result.advantages, (Floats{1, 1, 0.5f}));
  EXPECT_EQ(of_one_group({1, 1}, {false, true}).zero_std_groups, 1);
}

TEST(GrpoAdvantages, RewardsMustBeFinite) {
  for (const double bad :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    EXPECT_THROW(of_one_group({1.0, bad}), Error);
  }
  EXPECT_TRUE(grpo_advantages({}, {}).advantages.empty());
}

}  // namespace
}  // namespace tandem
