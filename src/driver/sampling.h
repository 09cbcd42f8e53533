// From prompts to a training batch: draws prompts until a rollout is full of groups that the filter
// keeps (dynamic sampling), leaves samples without a reward out of groups and loss, and says when a
// reward teaches nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "data/batch.h"
#include "data/function_pool.h"
#include "driver/rollout.h"
#include "rl/advantages.h"
#include "rl/filters.h"

namespace tandem {

struct DrawnGroups {
  std::vector<Sample> samples;  // whole groups, by id: rollout_batch_size of them
  std::map<std::string, std::int64_t> dropped = {};  // groups by the filter's reason
  std::int64_t num_drawn = 0;                        // prompts
  double seconds = 0;                                // of all this
};

// The filter of --dynamic-sampling-filter-path: a built-in one or a user's function.
class GroupSelection {
 public:
  explicit GroupSelection(const Config& config);
  // Loads the function, if it is one.
  void check();
  bool active() const { return filter_ != GroupFilter::none || pool_; }
  // Of the function's processes.
  std::int64_t resident_bytes() const { return pool_ ? pool_->resident_bytes() : 0; }
  // Nothing if stop() said so; the selection is then of no further use.
  std::optional<std::vector<GroupVerdict>> judge(
      const std::vector<Sample>& samples, const std::map<std::uint64_t, const Prompt*>& prompt_of,
      const std::function<bool()>& stop);

 private:
  GroupFilter filter_ = GroupFilter::none;
  std::string reward_key_;
  std::unique_ptr<FunctionPool> pool_;
};

// Without a filter one draw of rollout_batch_size prompts. With one, further draws of
// over_sampling_batch_size until that many groups are kept; those kept beyond it are dropped by
// number, so the same seed gives the same batch. Failed samples are reported, those of dropped
// groups too. Nothing if the maker was stopped. Error when as many prompts as the file has were
// drawn and the rollout is still not full.
std::optional<DrawnGroups> draw_groups(const Config& config, PromptOrder& order,
                                       const std::vector<Prompt>& prompts, RolloutMaker& maker,
                                       const RolloutSetup& setup, GroupSelection& selection);

// Advantages of a batch, by group. A failed sample gets the advantage 0 and no loss token and does
// not count in its group's mean. Error if no sample has a reward.
GroupAdvantages set_advantages(TrainBatch& batch, const AlgorithmConfig& algorithm);

// Logs what failed, at most ten samples with their texts; with `stop` the first is an Error.
void report_failures(const std::vector<Sample>& samples, const std::string& phase, bool stop);

// Watches for a reward that is the same for every sample of many steps.
class ConstantReward {
 public:
  explicit ConstantReward(std::int64_t steps) : steps_(steps) {}
  // A notice, once each time that the last `steps` steps had one and the same reward throughout.
  std::optional<std::string> step(const std::vector<Sample>& samples);

 private:
  std::int64_t steps_;
  std::int64_t count_ = 0;
  std::optional<double> value_;
};

}  // namespace tandem
