// Rewards of finished samples: a built-in rule at once, or a user's function (or a reward server)
// in helper processes, many at a time while others are still being generated.
//
// Invariant: every sample that is submitted comes back once, with a number or with a text that says
// why there is none; nothing that a function does ends the run by itself.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/json.h"
#include "config/config.h"
#include "data/function_pool.h"
#include "data/sample.h"
#include "rl/rewards.h"

namespace tandem {

// The settings by their flags' names in one flat object, as functions see them in `args`.
Json function_arguments(const Config& config);

// Where the processes of a kind of function write: the run's logs/, if there is a run.
std::string function_log(const Config& config, std::string_view kind);

// A sample as functions see it (python/tandem/samples.py); metadata keeps its digits. The reward,
// as the object it was if it was one, only where it is there already.
std::string function_sample(const Sample& sample, const Prompt& prompt, bool with_reward = false);

struct SampleReward {
  std::uint64_t id = 0;  // of the sample
  double reward = 0;
  std::map<std::string, double> parts;  // the numbers of a reward that is an object
  std::string error;                    // empty: reward holds
};

// A helper's {"reward", "parts"} or {"error"}.
SampleReward read_reward(std::uint64_t id, const Json& item, const std::string& where);

class RewardMaker {
 public:
  explicit RewardMaker(const Config& config);

  // Loads the function, if it is one; Error if it cannot be loaded.
  void check();
  // The rule, or null: a function rewards.
  const RewardRule* rule() const { return pool_ ? nullptr : &rule_; }

  // Whether a function wants whole groups; else samples may come one by one.
  bool by_group() const { return by_group_; }
  // Samples of one prompt, with text and label.
  void submit(const Prompt& prompt, std::span<const Sample> group);
  std::size_t num_open() const { return open_; }
  // Of the function's processes.
  std::int64_t resident_bytes() const { return pool_ ? pool_->resident_bytes() : 0; }
  // Those that are done; waits for one at most until the deadline.
  std::vector<SampleReward> poll(Deadline deadline);

 private:
  RewardRule rule_;
  bool by_group_;
  std::unique_ptr<FunctionPool> pool_;
  std::map<std::uint64_t, std::vector<std::uint64_t>> calls_;  // call id -> its samples
  std::uint64_t next_call_ = 0;
  std::vector<SampleReward> done_;
  std::size_t open_ = 0;
};

}  // namespace tandem
