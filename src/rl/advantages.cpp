// See advantages.h.
#include "rl/advantages.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <unordered_map>

#include "base/check.h"

namespace tandem {
namespace {

constexpr double kEpsilon = 1e-6;

using Members = std::vector<std::size_t>;  // places of one group's samples

std::vector<Members> group_by_prompt(std::span<const std::uint64_t> prompt_ids) {
  std::vector<Members> groups;
  std::unordered_map<std::uint64_t, std::size_t> group_of;
  for (std::size_t i = 0; i < prompt_ids.size(); ++i) {
    const auto [found, is_new] = group_of.try_emplace(prompt_ids[i], groups.size());
    if (is_new) groups.emplace_back();
    groups[found->second].push_back(i);
  }
  return groups;
}

}  // namespace

GroupAdvantages grpo_advantages(std::span<const std::uint64_t> prompt_ids,
                                std::span<const double> rewards, const AdvantageOptions& options) {
  assert(prompt_ids.size() == rewards.size());
  for (std::size_t i = 0; i < rewards.size(); ++i) {
    TD_CHECK(
        std::isfinite(rewards[i]),
        "reward: {} for a sample of prompt {}; a reward must be a finite number: mend the reward "
        "function",
        rewards[i], prompt_ids[i]);
  }
  GroupAdvantages result;
  result.advantages.resize(rewards.size(), 0.0f);
  for (const Members& members : group_by_prompt(prompt_ids)) {
    ++result.num_groups;
    if (members.size() == 1) ++result.single_sample_groups;
    double sum = 0, lowest = rewards[members[0]], highest = lowest;
    for (const std::size_t i : members) {
      sum += rewards[i];
      lowest = std::min(lowest, rewards[i]);
      highest = std::max(highest, rewards[i]);
    }
    const bool equal = highest == lowest;
    if (equal) ++result.zero_std_groups;
    if (!options.rewards_normalization) {
      for (const std::size_t i : members) result.advantages[i] = static_cast<float>(rewards[i]);
      continue;
    }
    if (equal) continue;  // exactly 0
    const auto count = static_cast<double>(members.size());
    const double mean = sum / count;
    double squares = 0;
    for (const std::size_t i : members) squares += (rewards[i] - mean) * (rewards[i] - mean);
    const double scale =
        options.grpo_std_normalization ? std::sqrt(squares / (count - 1)) + kEpsilon : 1.0;
    for (const std::size_t i : members) {
      result.advantages[i] = static_cast<float>((rewards[i] - mean) / scale);
    }
  }
  return result;
}

}  // namespace tandem
