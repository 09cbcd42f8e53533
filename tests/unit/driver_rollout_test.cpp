// What becomes of a rollout's samples before training: masks, and the metrics that describe them.
#include "driver/rollout.h"

#include <gtest/gtest.h>

#include "driver/metrics.h"
#include "rl/advantages.h"

namespace tandem {
namespace {

// C37: a truncated sample that is masked counts in its group, trains no token, and the length
// metrics say so. C09: the raw reward is shown as it was.
TEST(Rollout, MaskedTruncatedSamplesCountInTheirGroup) {
  std::vector<Sample> samples(4);
  const std::vector<double> rewards = {1, 0, 0, 1};
  for (std::size_t i = 0; i < 4; ++i) {
    samples[i].id = i;
    samples[i].tokens.assign(3 + 10 + i, 7);
    samples[i].response_length = 10 + static_cast<std::int64_t>(i);
    samples[i].loss_mask.assign(10 + i, 1);
    samples[i].log_probs.assign(10 + i, -1.0f);
    samples[i].weight_versions.assign(10 + i, 1);
    samples[i].reward = rewards[i];
    samples[i].status = i == 3 ? SampleStatus::truncated : SampleStatus::completed;
  }
  mask_truncated_samples(samples);
  EXPECT_EQ(samples[2].loss_mask, std::vector<std::uint8_t>(12, 1));
  EXPECT_EQ(samples[3].loss_mask, std::vector<std::uint8_t>(13, 0));
  EXPECT_EQ(samples[3].response_length, 13);

  const std::vector<std::uint64_t> prompt_ids(4, 0);
  const auto advantages = group_advantages(
      prompt_ids, rewards, {.rewards_normalization = true, .grpo_std_normalization = false});
  EXPECT_EQ(advantages.advantages, (std::vector<float>{0.5f, -0.5f, -0.5f, 0.5f}));
  Row row(train_declarations());
  add_rollout_metrics(row, samples, advantages, 1.0, 1);
  EXPECT_DOUBLE_EQ(row.value("rollout/raw_reward"), 0.5);
  EXPECT_DOUBLE_EQ(row.value("rollout/truncated_ratio"), 0.25);
  EXPECT_DOUBLE_EQ(row.value("rollout/response_len/mean"), (10 + 11 + 12 + 0) / 4.0);
  EXPECT_DOUBLE_EQ(row.value("rollout/response_len/min"), 0.0);
}

TEST(Rollout, CacheMetricsAreSharesOfPromptTokens) {
  std::vector<Sample> samples(3);
  for (Sample& s : samples) s.tokens.assign(40, 1);
  samples[1].cached_tokens = 32;
  samples[2].status = SampleStatus::failed;  // counts in neither
  Row row(train_declarations());
  add_rollout_metrics(row, samples, {.advantages = {0, 0, 0}}, 1.0, 1);
  EXPECT_DOUBLE_EQ(row.value("rollout/prefix_cache_hit_rate"), 32.0 / 80.0);
  EXPECT_DOUBLE_EQ(row.value("rollout/avg_cached_tokens_per_sample"), 16.0);
}

Config sampling_config() {
  Config config;
  config.rollout.rollout_max_response_len = 100;
  config.rollout.rollout_temperature = 0.8;
  config.rollout.rollout_top_p = 0.95;
  config.rollout.rollout_top_k = 40;
  config.rollout.rollout_stop = {"END"};
  config.rollout.rollout_stop_token_ids = {5};
  config.evaluate.eval_max_response_len = 50;
  config.evaluate.eval_temperature = 0;
  config.evaluate.eval_top_p = 1.0;
  config.evaluate.eval_top_k = -1;
  config.algorithm.seed = 9;
  return config;
}

TEST(Rollout, FlagsReachTheSampler) {
  const SamplingParams train = rollout_sampling(sampling_config());
  EXPECT_EQ(train.max_new_tokens, 100);
  EXPECT_EQ(train.temperature, 0.8);
  EXPECT_EQ(train.top_p, 0.95);
  EXPECT_EQ(train.top_k, 40);
  EXPECT_EQ(train.stop, std::vector<std::string>{"END"});
  EXPECT_EQ(train.stop_token_ids, std::vector<TokenId>{5});
  EXPECT_EQ(train.seed, 9u);
  EXPECT_FALSE(train.evaluation);
  const SamplingParams evaluation = evaluation_sampling(sampling_config());
  EXPECT_EQ(evaluation.max_new_tokens, 50);
  EXPECT_EQ(evaluation.temperature, 0);
  EXPECT_EQ(evaluation.top_p, 1.0);
  EXPECT_EQ(evaluation.top_k, -1);
  EXPECT_EQ(evaluation.stop, train.stop);
  EXPECT_TRUE(evaluation.evaluation);
}

}  // namespace
}  // namespace tandem
