// From rewarded samples to a batch: groups kept whole by the number that is judged, failed samples
// left out of mean and loss, a reward that teaches nothing noticed.
#include "driver/sampling.h"

#include <gtest/gtest.h>

#include <functional>

#include "base/check.h"

namespace tandem {
namespace {

Sample sample_of(std::uint64_t id, std::uint64_t prompt, double reward) {
  Sample s;
  s.id = id;
  s.prompt_id = prompt;
  s.tokens = {1, 2, 3};
  s.response_length = 2;
  s.log_probs = {-1, -1};
  s.loss_mask = {1, 1};
  s.weight_versions = {1, 1};
  s.reward = reward;
  s.status = SampleStatus::completed;
  return s;
}

// Groups of four: prompt 0 has the first four values, prompt 1 the next, and so on.
std::vector<Sample> groups_of_four(const std::vector<double>& rewards) {
  std::vector<Sample> samples;
  for (std::size_t i = 0; i < rewards.size(); ++i)
    samples.push_back(sample_of(i, i / 4, rewards[i]));
  return samples;
}

void fail(Sample& s, const std::string& why) {
  s.status = SampleStatus::failed;
  s.error = why;
  s.reward = 0;
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

Config filtering(const std::string& key = "") {
  Config config;
  config.rollout.dynamic_sampling_filter_path = "check_reward_nonzero_std";
  config.rollout.dynamic_sampling_reward_key = key;
  return config;
}

// Case C05: under leave-one-out statistics too a group stays or goes as a whole.
TEST(GroupSelection, KeepsAndDropsWholeGroups) {
  const auto samples = groups_of_four({1, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1});
  GroupSelection selection(filtering());
  ASSERT_TRUE(selection.active());
  const auto verdicts = *selection.judge(samples, {}, [] { return false; });
  ASSERT_EQ(verdicts.size(), 3u);
  EXPECT_TRUE(verdicts[0].keep);
  EXPECT_TRUE(verdicts[1].keep);
  EXPECT_FALSE(verdicts[2].keep);
  EXPECT_FALSE(GroupSelection(Config{}).active());
}

// Case C06: shaped reward .10, .12, .09, .11 over an accuracy of 0.
TEST(GroupSelection, TheJudgedNumberIsASetting) {
  auto samples = groups_of_four({.10, .12, .09, .11});
  for (Sample& s : samples) s.reward_parts = {{"score", s.reward}, {"accuracy", 0.0}};
  EXPECT_TRUE(GroupSelection(filtering()).judge(samples, {}, [] { return false; })->at(0).keep);
  EXPECT_TRUE(
      GroupSelection(filtering("score")).judge(samples, {}, [] { return false; })->at(0).keep);
  const auto dropped =
      *GroupSelection(filtering("accuracy")).judge(samples, {}, [] { return false; });
  EXPECT_FALSE(dropped[0].keep);
  EXPECT_EQ(dropped[0].reason, "zero_std_0.0");
  EXPECT_NE(error_of([&] {
              GroupSelection(filtering("acc")).judge(samples, {}, [] { return false; });
            }).find("--dynamic-sampling-reward-key: the reward of sample 0 has no number 'acc'"),
            std::string::npos);
  // A failed sample has no parts, and no say.
  fail(samples[1], "no judge");
  samples[1].reward_parts.clear();
  EXPECT_FALSE(
      GroupSelection(filtering("accuracy")).judge(samples, {}, [] { return false; })->at(0).keep);
}

// Rewards 1, 0, (failed), 1 of one prompt: mean 2/3 over three, not 1/2 over four.
TEST(SetAdvantages, FailedSamplesAreLeftOutOfMeanAndLoss) {
  TrainBatch batch;
  batch.samples = groups_of_four({1, 0, 0, 1, 1, 0, 0, 0});
  fail(batch.samples[2], "no judge");
  for (const std::size_t i : {5, 6, 7}) fail(batch.samples[i], "no judge");
  AlgorithmConfig algorithm;
  algorithm.grpo_std_normalization = false;
  const GroupAdvantages found = set_advantages(batch, algorithm);
  const float third = static_cast<float>(1 - 2.0 / 3);
  EXPECT_EQ(batch.advantages,
            (std::vector<float>{third, static_cast<float>(-2.0 / 3), 0, third, 0, 0, 0, 0}));
  EXPECT_EQ(found.advantages, batch.advantages);
  EXPECT_EQ(found.num_groups, 2);
  EXPECT_EQ(found.single_sample_groups, 1);  // one of the second group is left: no spread, 0
  for (std::size_t i = 0; i < batch.samples.size(); ++i)
    EXPECT_EQ(batch.samples[i].loss_tokens(),
              batch.samples[i].status == SampleStatus::failed ? 0 : 2);

  for (Sample& s : batch.samples) fail(s, "nothing works");
  EXPECT_NE(error_of([&] { set_advantages(batch, algorithm); }).find("all 8 samples failed"),
            std::string::npos);
}

TEST(ReportFailures, StopsOnlyWhereAsked) {
  auto samples = groups_of_four({1, 1, 1, 1});
  EXPECT_EQ(error_of([&] { report_failures(samples, "step 1 rollout", true); }), "");
  fail(samples[3], "the judge is away");
  EXPECT_EQ(error_of([&] { report_failures(samples, "step 1 rollout", false); }), "");
  const std::string text = error_of([&] { report_failures(samples, "step 1 rollout", true); });
  EXPECT_TRUE(text.starts_with("--stop-on-reward-failure")) << text;
  for (const char* part : {"step 1 rollout", "sample 3", "the judge is away"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(ConstantReward, IsNoticedAfterSoManySteps) {
  struct Step {
    std::vector<double> rewards;
    bool notice;
  };
  const auto run = [](std::int64_t steps, const std::vector<Step>& all) {
    ConstantReward watch(steps);
    for (std::size_t i = 0; i < all.size(); ++i) {
      auto samples = groups_of_four(all[i].rewards);
      EXPECT_EQ(watch.step(samples).has_value(), all[i].notice) << "step " << i;
    }
  };
  const std::vector<double> ones(8, 1.0), zeros(8, 0.0), mixed = {1, 0, 1, 1};
  run(2, {{ones, false}, {ones, true}, {ones, false}, {ones, true}});
  run(2, {{ones, false}, {zeros, false}, {zeros, true}});  // another value counts anew
  run(2, {{ones, false}, {mixed, false}, {ones, false}, {ones, true}});
  run(0, {{ones, false}, {ones, false}});
  // A step of failures alone says nothing either way.
  ConstantReward watch(2);
  auto failed = groups_of_four(ones);
  for (Sample& s : failed) fail(s, "no judge");
  EXPECT_FALSE(watch.step(groups_of_four(ones)).has_value());
  EXPECT_FALSE(watch.step(failed).has_value());
  EXPECT_TRUE(watch.step(groups_of_four(ones)).has_value());
}

}  // namespace
}  // namespace tandem
