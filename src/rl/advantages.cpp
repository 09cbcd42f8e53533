// See advantages.h.
#include "rl/advantages.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <numeric>
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

// What a group's r - mean is divided by; `squares` is the sum of its squares.
double group_scale(const AdvantageOptions& options, double count, double squares) {
  switch (options.estimator) {
    case AdvantageEstimator::grpo:
    case AdvantageEstimator::gspo:
      return options.grpo_std_normalization ? std::sqrt(squares / (count - 1)) + kEpsilon : 1.0;
    case AdvantageEstimator::rloo:
      return (count - 1) / count;
    case AdvantageEstimator::reinforce_plus_plus:
    case AdvantageEstimator::reinforce_plus_plus_baseline:
    case AdvantageEstimator::ppo:
      break;
  }
  return 1.0;
}

}  // namespace

GroupAdvantages group_advantages(std::span<const std::uint64_t> prompt_ids,
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
    if (!options.rewards_normalization ||
        options.estimator == AdvantageEstimator::reinforce_plus_plus) {
      for (const std::size_t i : members) result.advantages[i] = static_cast<float>(rewards[i]);
      continue;
    }
    if (equal) continue;  // exactly 0
    const auto count = static_cast<double>(members.size());
    const double mean = sum / count;
    double squares = 0;
    for (const std::size_t i : members) squares += (rewards[i] - mean) * (rewards[i] - mean);
    const double scale = group_scale(options, count, squares);
    for (const std::size_t i : members) {
      result.advantages[i] = static_cast<float>((rewards[i] - mean) / scale);
    }
  }
  return result;
}

std::vector<float> discounted_returns(float reward, std::span<const float> kl,
                                      std::span<const std::uint8_t> loss_mask, double kl_coef,
                                      double gamma) {
  assert(kl.empty() || kl.size() == loss_mask.size());
  std::vector<float> returns(loss_mask.size(), 0.0f);
  double following = 0;
  bool last = true;  // no loss token seen yet
  for (std::size_t t = loss_mask.size(); t-- > 0;) {
    double own = 0;
    if (loss_mask[t]) {
      if (!kl.empty()) own = -kl_coef * static_cast<double>(kl[t]);
      if (last) own += static_cast<double>(reward);
      last = false;
    }
    following = own + gamma * following;
    returns[t] = static_cast<float>(following);
  }
  return returns;
}

std::vector<std::int64_t> order_by_id(const TrainBatch& batch) {
  std::vector<std::int64_t> order(batch.samples.size());
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return batch.samples[a].id < batch.samples[b].id;
  });
  return order;
}

void whiten(TokenValues& values, const TrainBatch& batch) {
  assert(values.size() == batch.samples.size());
  const auto order = order_by_id(batch);
  const auto each = [&](auto&& visit) {
    for (const std::int64_t s : order)
      for (std::size_t t = 0; t < values[s].size(); ++t)
        if (batch.samples[s].loss_mask[t]) visit(values[s][t]);
  };
  double count = 0, sum = 0, squares = 0;
  float lowest = std::numeric_limits<float>::infinity(), highest = -lowest;
  each([&](float v) {
    ++count;
    sum += v;
    lowest = std::min(lowest, v);
    highest = std::max(highest, v);
  });
  const double mean = sum / count;
  each([&](float v) { squares += (v - mean) * (v - mean); });
  const double scale = 1.0 / std::sqrt(squares / (count - 1) + 1e-8);
  const bool equal = lowest == highest;
  each([&](float& v) { v = equal ? 0.0f : static_cast<float>((v - mean) * scale); });
}

TokenAdvantages token_advantages(const TrainBatch& batch, const TokenValues& kl,
                                 const AlgorithmConfig& a) {
  assert(kl.empty() || kl.size() == batch.samples.size());
  TokenAdvantages out;
  for (std::size_t i = 0; i < batch.samples.size(); ++i) {
    const Sample& s = batch.samples[i];
    const float advantage = batch.advantages[i];
    if (a.advantage_estimator == AdvantageEstimator::reinforce_plus_plus) {
      const auto own_kl = kl.empty() ? std::span<const float>() : std::span<const float>(kl[i]);
      out.returns.push_back(discounted_returns(advantage, own_kl, s.loss_mask, a.kl_coef, a.gamma));
      continue;
    }
    std::vector<float> values(s.loss_mask.size(), advantage);
    if (a.advantage_estimator == AdvantageEstimator::reinforce_plus_plus_baseline && !kl.empty())
      for (std::size_t t = 0; t < values.size(); ++t)
        values[t] = static_cast<float>(advantage - a.kl_coef * kl[i][t]);
    out.returns.push_back(std::move(values));
  }
  out.advantages = out.returns;
  if (a.normalize_advantages) whiten(out.advantages, batch);
  return out;
}

}  // namespace tandem
