// Starts one call per prompt, gathers answers as they come, then decodes and rewards them together.
#include "driver/rollout.h"

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "base/check.h"
#include "base/clock.h"

namespace tandem {
namespace {

constexpr double kStopSeconds = 0.1;  // between two looks at stop()

// Filled on the fetcher's thread; kept alive by the callbacks that are still out.
struct Inbox {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<GroupResult> results;
};

}  // namespace

SamplingParams rollout_sampling(const Config& config) {
  const RolloutConfig& rollout = config.rollout;
  SamplingParams params{.max_new_tokens = rollout.rollout_max_response_len.value(),
                        .temperature = rollout.rollout_temperature,
                        .top_p = rollout.rollout_top_p,
                        .top_k = rollout.rollout_top_k,
                        .logit_bias = {},
                        .stop = rollout.rollout_stop,
                        .stop_token_ids = {},
                        .seed = static_cast<std::uint64_t>(config.algorithm.seed)};
  for (const std::int64_t id : rollout.rollout_stop_token_ids)
    params.stop_token_ids.push_back(static_cast<TokenId>(id));
  return params;
}

SamplingParams evaluation_sampling(const Config& config) {
  const EvaluateConfig& e = config.evaluate;
  SamplingParams params = rollout_sampling(config);
  params.max_new_tokens = e.eval_max_response_len.value();
  params.temperature = e.eval_temperature.value();
  params.top_p = e.eval_top_p.value();
  params.top_k = e.eval_top_k.value();
  params.evaluation = true;
  return params;
}

void mask_truncated_samples(std::vector<Sample>& samples) {
  for (Sample& s : samples) {
    if (s.status == SampleStatus::truncated) std::ranges::fill(s.loss_mask, std::uint8_t{0});
  }
}

std::optional<std::vector<Sample>> RolloutMaker::generate(const std::vector<Prompt>& prompts,
                                                          const std::vector<RolloutItem>& items,
                                                          const RolloutSetup& setup) {
  const Deadline deadline = Deadline::after(setup.timeout_seconds);
  const std::int64_t n = setup.samples_per_prompt;
  progress_.begin(setup.phase, static_cast<std::int64_t>(items.size()) * n, "samples");
  auto inbox = std::make_shared<Inbox>();
  std::size_t turn = 0;
  for (const RolloutItem& item : items) {
    PromptGroup group{.prompt_id = item.counter,
                      .first_sample_id = item.counter * static_cast<std::uint64_t>(n),
                      .n = n,
                      .prompt = prompts[item.index].ids,
                      .params = setup.params};
    if (setup.max_context > 0)
      group.params.max_new_tokens =
          std::clamp(setup.max_context - static_cast<std::int64_t>(group.prompt.size()),
                     std::int64_t{0}, group.params.max_new_tokens);
    engines_[turn++ % engines_.size()]->generate(group, deadline, [inbox](GroupResult result) {
      {
        const std::lock_guard lock(inbox->mutex);
        inbox->results.push_back(std::move(result));
      }
      inbox->changed.notify_one();
    });
  }
  std::vector<Sample> samples;
  for (std::size_t done = 0; done < items.size(); ++done) {
    GroupResult result;
    {
      std::unique_lock lock(inbox->mutex);
      bool arrived = false;
      while (!arrived && !deadline.expired()) {
        if (stop_()) return std::nullopt;
        arrived = inbox->changed.wait_until(lock, deadline.within(kStopSeconds).time_point(),
                                            [&] { return !inbox->results.empty(); });
      }
      TD_CHECK(arrived, "{}: {} of {} prompts unanswered by {} engine{} (the first at {}) after {}",
               setup.phase, items.size() - done, items.size(), engines_.size(),
               engines_.size() == 1 ? "" : "s", engines_.front()->address().url(""),
               deadline.describe());
      result = std::move(inbox->results.back());
      inbox->results.pop_back();
    }
    TD_CHECK(result.ok(), "{}: prompt {}: {}", setup.phase, result.prompt_id, result.error);
    for (Sample& s : result.samples) samples.push_back(std::move(s));
    progress_.advance(n);
  }
  std::sort(samples.begin(), samples.end(),
            [](const Sample& a, const Sample& b) { return a.id < b.id; });
  return samples;
}

void RolloutMaker::reward(const std::vector<Prompt>& prompts, const std::vector<RolloutItem>& items,
                          const RolloutSetup& setup, std::vector<Sample>& samples) {
  std::vector<std::vector<TokenId>> ids;
  for (const Sample& s : samples)
    ids.emplace_back(s.tokens.begin() + s.prompt_length(), s.tokens.end());
  const auto texts = tokenizer_.decode(ids, setup.skip_special_tokens);
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const Prompt& prompt =
        prompts[items[i / static_cast<std::size_t>(setup.samples_per_prompt)].index];
    TD_CHECK(texts[i].ok(), "sample {}: its answer cannot be decoded: {}", samples[i].id,
             texts[i].error);
    samples[i].response = texts[i].text;
    samples[i].label = prompt.label;
    samples[i].reward = rule_reward(setup.rule, samples[i].response, prompt.label);
  }
}

std::optional<std::vector<Sample>> RolloutMaker::run(const std::vector<Prompt>& prompts,
                                                     const std::vector<RolloutItem>& items,
                                                     const RolloutSetup& setup) {
  auto samples = generate(prompts, items, setup);
  if (samples) {
    reward(prompts, items, setup, *samples);
    if (setup.mask_truncated) mask_truncated_samples(*samples);
  }
  progress_.end();
  return samples;
}

}  // namespace tandem
