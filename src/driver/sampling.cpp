// See sampling.h.
#include "driver/sampling.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "base/check.h"
#include "base/json.h"
#include "base/log.h"
#include "base/text.h"

namespace tandem {
namespace {

constexpr std::size_t kShownFailures = 10;
constexpr double kStopSeconds = 0.1;  // between two looks at stop()

// "12 zero_std_0.0, 3 surplus"
std::string counts_text(const std::map<std::string, std::int64_t>& counts) {
  std::vector<std::string> texts;
  for (const auto& [name, count] : counts) texts.push_back(fmt::format("{} {}", count, name));
  return fmt::format("{}", fmt::join(texts, ", "));
}

double judged_value(const Sample& sample, const std::string& key) {
  if (key.empty() || sample.status == SampleStatus::failed) return sample.reward;
  const auto part = sample.reward_parts.find(key);
  TD_CHECK(part != sample.reward_parts.end(),
           "--dynamic-sampling-reward-key: the reward of sample {} has no number '{}'", sample.id,
           key);
  return part->second;
}

bool is_finished(const Sample& sample) {
  return sample.status == SampleStatus::completed || sample.status == SampleStatus::truncated;
}

}  // namespace

GroupSelection::GroupSelection(const Config& config)
    : reward_key_(config.rollout.dynamic_sampling_reward_key) {
  const std::string& path = config.rollout.dynamic_sampling_filter_path;
  if (const auto built_in = parse_group_filter(path)) {
    filter_ = *built_in;
    return;
  }
  const Json load = {{"call", "load"},
                     {"kind", "filter"},
                     {"path", path},
                     {"timeout", config.reward.reward_timeout_seconds},
                     {"arguments", function_arguments(config)}};
  pool_ = std::make_unique<FunctionPool>(
      FunctionOptions{.name = "--dynamic-sampling-filter-path " + path,
                      .load_json = dump_json(load),
                      .call_timeout_seconds = config.reward.reward_timeout_seconds,
                      .memory_limit_mb = config.reward.rm_memory_limit_mb,
                      .log_path = function_log(config, "filter")});
}

void GroupSelection::check() {
  if (pool_) pool_->check();
}

std::optional<std::vector<GroupVerdict>> GroupSelection::judge(
    const std::vector<Sample>& samples, const std::map<std::uint64_t, const Prompt*>& prompt_of,
    const std::function<bool()>& stop) {
  if (!pool_) {
    std::vector<JudgedSample> judged;
    for (const Sample& s : samples)
      judged.push_back({.prompt_id = s.prompt_id,
                        .value = judged_value(s, reward_key_),
                        .finished = is_finished(s),
                        .has_value = s.status != SampleStatus::failed});
    return judge_groups(judged, filter_);
  }
  std::map<std::uint64_t, std::vector<std::string>> groups;
  for (const Sample& s : samples)
    groups[s.prompt_id].push_back(function_sample(s, *prompt_of.at(s.prompt_id), true));
  for (const auto& [id, texts] : groups)
    pool_->submit(id, fmt::format(R"("samples":[{}])", fmt::join(texts, ",")));
  std::vector<GroupVerdict> verdicts;
  while (pool_->num_open() > 0) {
    if (stop()) return std::nullopt;
    for (const FunctionResult& r : pool_->poll(Deadline::after(kStopSeconds))) {
      TD_CHECK(r.ok(), "--dynamic-sampling-filter-path: group {}: {}", r.id, r.error);
      verdicts.push_back({.prompt_id = r.id,
                          .keep = require<bool>(r.value, "keep", "filter"),
                          .reason = optional_key<std::string>(r.value, "reason", "filter", "")});
    }
  }
  return verdicts;
}

std::optional<DrawnGroups> draw_groups(const Config& config, PromptOrder& order,
                                       const std::vector<Prompt>& prompts, RolloutMaker& maker,
                                       const RolloutSetup& setup, GroupSelection& selection) {
  const std::int64_t wanted = config.rollout.rollout_batch_size.value();
  const std::int64_t at_once = config.rollout.over_sampling_batch_size.value_or(wanted);
  DrawnGroups out;
  std::map<std::uint64_t, std::vector<Sample>> kept;
  while (static_cast<std::int64_t>(kept.size()) < wanted) {
    TD_CHECK(
        out.num_drawn == 0 || out.num_drawn < static_cast<std::int64_t>(prompts.size()),
        "--dynamic-sampling-filter-path: {} groups of {} prompts were kept, {} are wanted, and "
        "every prompt was drawn (dropped: {}); let the filter keep more, or take prompts on which "
        "the "
        "model's answers differ",
        kept.size(), out.num_drawn, wanted, counts_text(out.dropped));
    std::vector<RolloutItem> items;
    std::map<std::uint64_t, const Prompt*> prompt_of;
    for (const auto& drawn : order.next(selection.active() ? at_once : wanted)) {
      items.push_back({drawn.counter, drawn.index});
      prompt_of[drawn.counter] = &prompts[drawn.index];
    }
    out.num_drawn += static_cast<std::int64_t>(items.size());
    auto made = maker.run(prompts, items, setup);
    if (!made) return std::nullopt;
    std::vector<Sample>& samples = *made;
    report_failures(samples, setup.phase, config.reward.stop_on_reward_failure);
    if (!selection.active())
      return DrawnGroups{.samples = std::move(samples), .num_drawn = out.num_drawn};
    std::set<std::uint64_t> dropped;
    const auto verdicts =
        selection.judge(samples, prompt_of, [&maker] { return maker.is_stopped(); });
    if (!verdicts) return std::nullopt;
    for (const GroupVerdict& verdict : *verdicts) {
      if (verdict.keep) continue;
      dropped.insert(verdict.prompt_id);
      ++out.dropped[verdict.reason.empty() ? "filter" : verdict.reason];
    }
    for (Sample& s : samples)
      if (!dropped.count(s.prompt_id)) kept[s.prompt_id].push_back(std::move(s));
  }
  for (auto& [id, group] : kept) {
    if (static_cast<std::int64_t>(out.samples.size()) == wanted * setup.samples_per_prompt) {
      ++out.dropped["surplus"];
      continue;
    }
    std::move(group.begin(), group.end(), std::back_inserter(out.samples));
  }
  return out;
}

GroupAdvantages set_advantages(TrainBatch& batch, const AlgorithmConfig& a) {
  std::vector<std::size_t> places;
  std::vector<std::uint64_t> prompt_ids;
  std::vector<double> rewards;
  for (std::size_t i = 0; i < batch.samples.size(); ++i) {
    Sample& s = batch.samples[i];
    if (s.status == SampleStatus::failed) {
      std::fill(s.loss_mask.begin(), s.loss_mask.end(), std::uint8_t{0});
      continue;
    }
    places.push_back(i);
    prompt_ids.push_back(s.prompt_id);
    rewards.push_back(s.reward);
  }
  TD_CHECK(!places.empty(), "rewards: all {} samples failed; the first: {}", batch.samples.size(),
           batch.samples.empty() ? "" : batch.samples.front().error);
  GroupAdvantages result = group_advantages(prompt_ids, rewards,
                                            {.estimator = a.advantage_estimator,
                                             .rewards_normalization = a.rewards_normalization,
                                             .grpo_std_normalization = a.grpo_std_normalization});
  batch.advantages.assign(batch.samples.size(), 0.0f);
  for (std::size_t k = 0; k < places.size(); ++k)
    batch.advantages[places[k]] = result.advantages[k];
  result.advantages = batch.advantages;
  return result;
}

void report_failures(const std::vector<Sample>& samples, const std::string& phase, bool stop) {
  std::size_t failed = 0;
  for (const Sample& s : samples) {
    if (s.status != SampleStatus::failed) continue;
    TD_CHECK(!stop, "--stop-on-reward-failure: {}: sample {} of prompt {}: {}", phase, s.id,
             s.prompt_id, s.error);
    if (failed++ < kShownFailures)
      TD_LOG(warn, "{}: sample {} of prompt {} failed: {}", phase, s.id, s.prompt_id, s.error);
  }
  if (failed > kShownFailures)
    TD_LOG(warn, "{}: {} samples failed in all; each one's text stands in rollouts/", phase,
           failed);
}

std::optional<std::string> ConstantReward::step(const std::vector<Sample>& samples) {
  if (steps_ == 0) return std::nullopt;
  std::optional<double> value;
  bool equal = true;
  for (const Sample& s : samples) {
    if (s.status == SampleStatus::failed) continue;
    equal = equal && (!value || *value == s.reward);
    value = s.reward;
  }
  if (!value) return std::nullopt;
  if (!equal || (count_ > 0 && value_ != value)) count_ = 0;
  value_ = value;
  if (!equal) return std::nullopt;
  if (++count_ % steps_ != 0) return std::nullopt;
  return fmt::format(
      "the reward was {} for every sample of the last {} steps, so nothing was learned; look at "
      "the "
      "answers in rollouts/ and at the reward",
      *value, count_);
}

}  // namespace tandem
