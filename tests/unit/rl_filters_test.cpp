// Which groups dynamic sampling keeps: whole groups, by the value that the setting names.
#include "rl/filters.h"

#include <gtest/gtest.h>

namespace tandem {
namespace {

std::vector<JudgedSample> group(std::uint64_t id, const std::vector<double>& values) {
  std::vector<JudgedSample> out;
  for (const double v : values) out.push_back({.prompt_id = id, .value = v});
  return out;
}

std::vector<JudgedSample> joined(const std::vector<std::vector<JudgedSample>>& groups) {
  std::vector<JudgedSample> out;
  for (const auto& g : groups) out.insert(out.end(), g.begin(), g.end());
  return out;
}

TEST(GroupFilter, NamesAreThoseOfMiles) {
  EXPECT_EQ(parse_group_filter(""), GroupFilter::none);
  EXPECT_EQ(parse_group_filter("check_no_aborted"), GroupFilter::no_aborted);
  EXPECT_EQ(parse_group_filter(
                "miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"),
            GroupFilter::reward_nonzero_std);
  EXPECT_EQ(parse_group_filter("mine.keep_hard"), std::nullopt);
}

// Case C05: groups are kept whole whatever a single sample is, and dropped whole.
TEST(GroupFilter, GroupsStayWhole) {
  const auto verdicts =
      judge_groups(joined({group(3, {1, 0, 0, 0}), group(1, {1, 1, 1, 0}), group(2, {1, 1, 1, 1})}),
                   GroupFilter::reward_nonzero_std);
  ASSERT_EQ(verdicts.size(), 3u);
  EXPECT_EQ(verdicts[0].prompt_id, 3u);
  EXPECT_TRUE(verdicts[0].keep);
  EXPECT_TRUE(verdicts[1].keep);
  EXPECT_FALSE(verdicts[2].keep);
  EXPECT_EQ(verdicts[2].reason, "zero_std_1.0");
}

// Values that sums do not hold exactly are still equal.
TEST(GroupFilter, EqualIsDecidedByTheValues) {
  EXPECT_FALSE(
      judge_groups(group(1, std::vector<double>(7, 0.1)), GroupFilter::reward_nonzero_std)[0].keep);
  EXPECT_TRUE(judge_groups(group(1, {0.1, 0.1000000001}), GroupFilter::reward_nonzero_std)[0].keep);
}

// Case C06: accuracy [0,0,0,0] under a shaped reward: what is judged decides.
TEST(GroupFilter, JudgesTheValueItIsGiven) {
  EXPECT_TRUE(
      judge_groups(group(1, {.10, .12, .09, .11}), GroupFilter::reward_nonzero_std)[0].keep);
  EXPECT_FALSE(judge_groups(group(1, {0, 0, 0, 0}), GroupFilter::reward_nonzero_std)[0].keep);
}

// A failed sample is left out of its group's mean, so it must not make a spread of its own.
TEST(GroupFilter, SamplesWithoutARewardSayNothing) {
  auto samples = joined({group(1, {1, 0, 1}), group(2, {0, 0}), group(3, {1, 0, 0.5})});
  for (const std::size_t failed : {1, 3, 4, 6}) samples[failed].has_value = false;
  const auto verdicts = judge_groups(samples, GroupFilter::reward_nonzero_std);
  ASSERT_EQ(verdicts.size(), 3u);
  EXPECT_EQ(verdicts[0].reason, "zero_std_1.0");
  EXPECT_EQ(verdicts[1].reason, "no_reward");
  EXPECT_TRUE(verdicts[2].keep);
}

TEST(GroupFilter, UnfinishedSamplesDropTheirGroup) {
  auto samples = joined({group(1, {1, 0}), group(2, {1, 0})});
  samples[2].finished = false;
  const auto verdicts = judge_groups(samples, GroupFilter::no_aborted);
  EXPECT_TRUE(verdicts[0].keep);
  EXPECT_FALSE(verdicts[1].keep);
  EXPECT_EQ(verdicts[1].reason, "group_has_aborted");
}

}  // namespace
}  // namespace tandem
