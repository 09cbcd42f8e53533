// Starts all calls, takes answers as they come and hands each to the rewards at once.
#include "driver/rollout.h"

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "base/check.h"
#include "base/clock.h"
#include "base/json.h"
#include "data/batch.h"

namespace tandem {
namespace {

constexpr double kSliceSeconds = 0.02;  // of a wait while the other side may have news
constexpr double kStopSeconds = 0.1;    // between two looks at stop()

// Filled on the fetcher's thread; kept alive by the callbacks that are still out.
struct Inbox {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<GroupResult> results;
};

Sample sample_from(const Json& value, Sample sample, const std::string& where) {
  sample.tokens = require<std::vector<TokenId>>(value, "tokens", where);
  sample.response_length = require<std::int64_t>(value, "response_length", where);
  sample.response = require<std::string>(value, "response", where);
  sample.log_probs = require<std::vector<float>>(value, "log_probs", where);
  sample.loss_mask = require<std::vector<std::uint8_t>>(value, "loss_mask", where);
  sample.weight_versions.assign(sample.loss_mask.size(),
                                require<std::int64_t>(value, "weight_version", where));
  const bool cut = require<std::string>(value, "status", where) == "truncated";
  sample.status = cut ? SampleStatus::truncated : SampleStatus::completed;
  sample.finish = cut ? FinishReason::length : FinishReason::stop;
  if (require<bool>(value, "removed", where))
    std::fill(sample.loss_mask.begin(), sample.loss_mask.end(), std::uint8_t{0});
  check_sample(sample);
  return sample;
}

// Gives a sample its reward, `key`'s part of it if that is not empty, or makes it a failed one.
void set_reward(Sample& sample, SampleReward result, const std::string& key) {
  sample.reward = result.reward;
  sample.error = std::move(result.error);
  sample.reward_parts = std::move(result.parts);
  if (sample.error.empty() && !key.empty()) {
    const auto part = sample.reward_parts.find(key);
    if (part == sample.reward_parts.end())
      sample.error = fmt::format("the reward has no number '{}'", key);
    else
      sample.reward = part->second;
  }
  if (sample.error.empty()) return;
  sample.status = SampleStatus::failed;
  sample.reward = 0.0;
}

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

struct RolloutMaker::Work {
  const std::vector<Prompt>& prompts;
  const std::vector<RolloutItem>& items;
  const RolloutSetup& setup;
  Deadline deadline;
  std::shared_ptr<Inbox> inbox = std::make_shared<Inbox>();
  std::map<std::uint64_t, std::size_t> place_of = {};     // in items, by prompt id
  std::map<std::uint64_t, const Prompt*> prompt_of = {};  // by prompt id
  std::map<std::uint64_t, std::int64_t> missing = {};     // samples of a prompt not generated yet
  std::map<std::uint64_t, Sample> samples = {};           // generated, by id
  std::map<std::uint64_t, bool> rewarded_by_maker = {};   // samples whose function gave a reward
  std::size_t num_samples = 0, num_finished = 0;

  bool generating() const { return samples.size() < num_samples; }
};

void RolloutMaker::ask_engine(Work& work, std::size_t at) {
  const RolloutSetup& setup = work.setup;
  const RolloutItem& item = work.items[at];
  PromptGroup group{
      .prompt_id = item.counter,
      .first_sample_id = item.counter * static_cast<std::uint64_t>(setup.samples_per_prompt),
      .n = setup.samples_per_prompt,
      .prompt = work.prompts[item.index].ids,
      .params = setup.params};
  if (setup.max_context > 0)
    group.params.max_new_tokens =
        std::clamp(setup.max_context - static_cast<std::int64_t>(group.prompt.size()),
                   std::int64_t{0}, group.params.max_new_tokens);
  engines_[at % engines_.size()]->generate(group, work.deadline,
                                           [inbox = work.inbox](GroupResult result) {
                                             {
                                               const std::lock_guard lock(inbox->mutex);
                                               inbox->results.push_back(std::move(result));
                                             }
                                             inbox->changed.notify_one();
                                           });
}

void RolloutMaker::ask_function(Work& work) {
  const SamplingParams& p = work.setup.params;
  const std::string params =
      dump_json(Json{{"temperature", p.temperature},
                     {"top_p", p.top_p},
                     {"top_k", p.top_k},
                     {"max_new_tokens", p.max_new_tokens},
                     {"stop", p.stop},
                     {"stop_token_ids", p.stop_token_ids},
                     {"skip_special_tokens", work.setup.skip_special_tokens}});
  const auto n = static_cast<std::uint64_t>(work.setup.samples_per_prompt);
  for (const RolloutItem& item : work.items)
    for (std::uint64_t i = 0; i < n; ++i) {
      Sample sample;
      sample.id = item.counter * n + i;
      sample.prompt_id = item.counter;
      const Prompt& prompt = work.prompts[item.index];
      sample.tokens = prompt.ids;
      sample.label = prompt.label;
      generation_->submit(sample.id,
                          fmt::format(R"("samples":[{}],"sampling_params":{},"evaluation":{})",
                                      function_sample(sample, prompt), params, p.evaluation));
    }
}

// Groups that the engines have finished: text and label, all of them in one call.
void RolloutMaker::take_groups(Work& work, double wait_seconds) {
  std::vector<GroupResult> groups;
  {
    std::unique_lock lock(work.inbox->mutex);
    work.inbox->changed.wait_until(lock, work.deadline.within(wait_seconds).time_point(),
                                   [&] { return !work.inbox->results.empty(); });
    groups.swap(work.inbox->results);
  }
  std::vector<Sample> samples;
  for (GroupResult& group : groups) {
    TD_CHECK(group.ok(), "{}: prompt {}: {}", work.setup.phase, group.prompt_id, group.error);
    // By a pause for new weights (--pause-generation-mode abort): begun anew with those.
    if (std::ranges::any_of(group.samples,
                            [](const Sample& s) { return s.finish == FinishReason::abort; })) {
      ask_engine(work, work.place_of.at(group.prompt_id));
      continue;
    }
    std::move(group.samples.begin(), group.samples.end(), std::back_inserter(samples));
  }
  if (samples.empty()) return;
  std::vector<std::vector<TokenId>> ids;
  for (const Sample& s : samples)
    ids.emplace_back(s.tokens.begin() + s.prompt_length(), s.tokens.end());
  const auto texts = tokenizer_.decode(ids, work.setup.skip_special_tokens);
  for (std::size_t i = 0; i < samples.size(); ++i) {
    TD_CHECK(texts[i].ok(), "sample {}: its answer cannot be decoded: {}", samples[i].id,
             texts[i].error);
    samples[i].response = texts[i].text;
    samples[i].label = work.prompt_of.at(samples[i].prompt_id)->label;
  }
  generated(work, std::move(samples));
}

// Samples that the user's function has made.
void RolloutMaker::take_made(Work& work, double wait_seconds) {
  std::vector<Sample> samples;
  for (const FunctionResult& result : generation_->poll(work.deadline.within(wait_seconds))) {
    Sample sample;
    sample.id = result.id;
    sample.prompt_id = result.id / static_cast<std::uint64_t>(work.setup.samples_per_prompt);
    const Prompt& prompt = *work.prompt_of.at(sample.prompt_id);
    sample.tokens = prompt.ids;
    sample.label = prompt.label;
    if (result.ok()) {
      sample = sample_from(result.value, std::move(sample), "generate function");
      if (result.value.contains("reward")) {
        set_reward(sample, read_reward(sample.id, result.value, "generate function"),
                   work.setup.reward_key);
        work.rewarded_by_maker[sample.id] = true;
      }
    } else {
      sample.status = SampleStatus::failed;
      sample.error = "generate function: " + result.error;
    }
    samples.push_back(std::move(sample));
  }
  generated(work, std::move(samples));
}

// To the rewards, each by itself or, for functions that judge groups, once its group is whole.
void RolloutMaker::generated(Work& work, std::vector<Sample> samples) {
  for (Sample& sample : samples) {
    const std::uint64_t id = sample.id, prompt = sample.prompt_id;
    work.samples.emplace(id, std::move(sample));
    if (--work.missing.at(prompt) == 0 && rewards_.by_group()) submit(work, prompt);
    if (rewards_.by_group()) continue;
    Sample& kept = work.samples.at(id);
    if (kept.status == SampleStatus::failed || work.rewarded_by_maker.count(id))
      finish(work);
    else
      rewards_.submit(*work.prompt_of.at(prompt), std::span(&kept, 1));
  }
}

// A whole group; what has a reward or failed already is not asked for.
void RolloutMaker::submit(Work& work, std::uint64_t prompt_id) {
  const auto n = static_cast<std::uint64_t>(work.setup.samples_per_prompt);
  std::vector<Sample> group;
  for (std::uint64_t id = prompt_id * n; id < (prompt_id + 1) * n; ++id) {
    Sample& sample = work.samples.at(id);
    if (sample.status == SampleStatus::failed || work.rewarded_by_maker.count(id))
      finish(work);
    else
      group.push_back(sample);
  }
  if (!group.empty()) rewards_.submit(*work.prompt_of.at(prompt_id), group);
}

void RolloutMaker::take_rewards(Work& work, double wait_seconds) {
  if (rewards_.num_open() == 0) return;
  for (SampleReward& result : rewards_.poll(Deadline::after(wait_seconds))) {
    const std::uint64_t id = result.id;
    set_reward(work.samples.at(id), std::move(result), work.setup.reward_key);
    finish(work);
  }
}

void RolloutMaker::finish(Work& work) {
  ++work.num_finished;
  if (work.setup.shown) progress_.advance(1);
}

std::optional<std::vector<Sample>> RolloutMaker::run(const std::vector<Prompt>& prompts,
                                                     const std::vector<RolloutItem>& items,
                                                     const RolloutSetup& setup) {
  Work work{.prompts = prompts,
            .items = items,
            .setup = setup,
            .deadline = Deadline::after(setup.timeout_seconds)};
  for (std::size_t i = 0; i < items.size(); ++i) {
    const RolloutItem& item = items[i];
    work.place_of[item.counter] = i;
    work.prompt_of[item.counter] = &prompts[item.index];
    work.missing[item.counter] = setup.samples_per_prompt;
  }
  work.num_samples = items.size() * static_cast<std::size_t>(setup.samples_per_prompt);
  if (setup.shown)
    progress_.begin(setup.phase, static_cast<std::int64_t>(work.num_samples), "samples");
  if (generation_)
    ask_function(work);
  else
    for (std::size_t i = 0; i < items.size(); ++i) ask_engine(work, i);
  while (work.num_finished < work.num_samples) {
    if (stop_()) return std::nullopt;
    const bool generating = work.generating();
    TD_CHECK(!generating || !work.deadline.expired(),
             "{}: {} of {} samples not generated by {} engine{} (the first at {}) after {}",
             setup.phase, work.num_samples - work.samples.size(), work.num_samples, engines_.size(),
             engines_.size() == 1 ? "" : "s", engines_.front()->address().name,
             work.deadline.describe());
    const double wait = rewards_.num_open() > 0 ? kSliceSeconds : kStopSeconds;
    if (generating && generation_) take_made(work, wait);
    if (generating && !generation_) take_groups(work, wait);
    take_rewards(work, work.generating() ? 0 : kStopSeconds);
  }
  if (setup.shown) progress_.end();
  std::vector<Sample> samples;
  for (auto& [id, sample] : work.samples) samples.push_back(std::move(sample));
  if (setup.mask_truncated) mask_truncated_samples(samples);
  return samples;
}

std::unique_ptr<FunctionPool> make_generation(const Config& config,
                                              const std::vector<std::string>& addresses,
                                              const std::string& token) {
  const std::string& path = config.rollout.custom_generate_function_path;
  if (path.empty()) return nullptr;
  const double timeout = config.engine.request_timeout_seconds;
  const Json load = {{"call", "load"},     {"kind", "generate"},
                     {"path", path},       {"engines", addresses},
                     {"token", token},     {"seed", config.algorithm.seed},
                     {"timeout", timeout}, {"arguments", function_arguments(config)}};
  auto pool = std::make_unique<FunctionPool>(
      FunctionOptions{.name = "--custom-generate-function-path " + path,
                      .load_json = dump_json(load),
                      .num_processes = 1,
                      .calls_per_process = 1024,
                      .call_timeout_seconds = timeout,
                      .memory_limit_mb = config.reward.rm_memory_limit_mb,
                      .log_path = function_log(config, "generate")});
  pool->check();
  return pool;
}

}  // namespace tandem
