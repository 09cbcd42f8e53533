// Rule or function: the choice, the requests, the answers.
#include "driver/rewards.h"

#include <fmt/ranges.h>

#include <filesystem>

#include "base/check.h"
#include "config/json.h"
#include "data/batch.h"

namespace tandem {
namespace {

constexpr std::string_view kRemote = "remote_rm";

std::string function_path(const RewardConfig& reward) {
  if (!reward.custom_rm_path.empty()) return reward.custom_rm_path;
  return reward.rm_type == kRemote ? "tandem.remote_rm.remote_rm" : "";
}

}  // namespace

SampleReward read_reward(std::uint64_t id, const Json& item, const std::string& where) {
  SampleReward out{.id = id, .reward = 0, .parts = {}, .error = {}};
  out.error = optional_key<std::string>(item, "error", where, "");
  if (!out.error.empty()) return out;
  out.reward = require<double>(item, "reward", where);
  if (const auto parts = item.find("parts"); parts != item.end())
    for (const auto& part : parts->items())
      out.parts[part.key()] = read_value<double>(part.value(), where);
  return out;
}

Json function_arguments(const Config& config) {
  Json flat = Json::object();
  const Json sections = parse_json(dump_json_pretty(to_json(config)), "config");
  for (const auto& section : sections.items())
    for (const auto& member : section.value().items()) flat[member.key()] = member.value();
  return flat;
}

std::string function_log(const Config& config, std::string_view kind) {
  const std::string folder = config.logging.run_dir + "/logs";
  return std::filesystem::is_directory(folder) ? fmt::format("{}/{}.log", folder, kind) : "";
}

std::string function_sample(const Sample& sample, const Prompt& prompt, bool with_reward) {
  Json fields = {
      {"index", sample.id},
      {"group_index", sample.prompt_id},
      {"prompt", prompt.text},
      {"tokens", sample.tokens},
      {"response", sample.response},
      {"response_length", sample.response_length},
      // None until there is a response: generate functions give it or leave it.
      {"loss_mask", sample.status == SampleStatus::pending ? Json() : Json(sample.loss_mask)},
      {"status", sample_status_name(sample.status)}};
  if (with_reward)
    fields["reward"] =
        sample.reward_parts.empty() ? Json(sample.reward) : Json(sample.reward_parts);
  std::string text = dump_json(fields);
  text.pop_back();
  return fmt::format(R"({},"label":{},"metadata":{}}})", text, prompt.label_json,
                     prompt.metadata_json);
}

RewardMaker::RewardMaker(const Config& config) : by_group_(config.reward.group_rm) {
  const RewardConfig& reward = config.reward;
  const std::string path = function_path(reward);
  if (path.empty()) {
    rule_ = parse_reward_rule(reward.rm_type);
    return;
  }
  const std::string name =
      reward.custom_rm_path.empty() ? "--rm-url " + reward.rm_url : "--custom-rm-path " + path;
  const Json load = {{"call", "load"},
                     {"kind", "reward"},
                     {"path", path},
                     {"batch", by_group_},
                     {"timeout", reward.reward_timeout_seconds},
                     {"arguments", function_arguments(config)}};
  pool_ = std::make_unique<FunctionPool>(
      FunctionOptions{.name = name,
                      .load_json = dump_json(load),
                      .num_processes = reward.rm_num_processes,
                      .calls_per_process = reward.rm_max_concurrency,
                      .call_timeout_seconds = reward.reward_timeout_seconds,
                      .memory_limit_mb = reward.rm_memory_limit_mb,
                      .log_path = function_log(config, "reward")});
}

void RewardMaker::check() {
  if (pool_) pool_->check();
}

void RewardMaker::submit(const Prompt& prompt, std::span<const Sample> group) {
  open_ += group.size();
  if (!pool_) {
    for (const Sample& s : group)
      done_.push_back({.id = s.id,
                       .reward = rule_reward(rule_, s.response, s.label),
                       .parts = {},
                       .error = {}});
    return;
  }
  std::vector<std::string> samples;
  std::vector<std::uint64_t> ids;
  const auto call = [&] {
    calls_[next_call_] = ids;
    pool_->submit(next_call_++, fmt::format(R"("samples":[{}])", fmt::join(samples, ",")));
    samples.clear();
    ids.clear();
  };
  for (const Sample& s : group) {
    samples.push_back(function_sample(s, prompt));
    ids.push_back(s.id);
    if (!by_group_) call();
  }
  if (by_group_) call();
}

std::vector<SampleReward> RewardMaker::poll(Deadline deadline) {
  std::vector<SampleReward> done = std::move(done_);
  done_.clear();
  if (pool_ && done.empty())
    for (const FunctionResult& result : pool_->poll(deadline)) {
      const auto call = calls_.extract(result.id);
      for (std::size_t i = 0; i < call.mapped().size(); ++i) {
        const std::uint64_t id = call.mapped()[i];
        done.push_back(
            result.ok() ? read_reward(id, result.value.at(i), "reward")
                        : SampleReward{.id = id, .reward = 0, .parts = {}, .error = result.error});
      }
    }
  open_ -= done.size();
  return done;
}

}  // namespace tandem
