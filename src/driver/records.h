// What a run's folder holds of its steps, and how a run that continues cuts it back: rows and
// rollouts of steps after the restored one are removed, for they are done again. What stays is byte
// for byte what the unbroken run had written by then.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace tandem {

// Of a rollout id that is before everything, the evaluation before training (step -1) included.
inline constexpr std::int64_t kBeforeAll = -2;

struct Records {
  std::int64_t removed_rows = 0;
  std::int64_t num_steps = 0;           // rows of steps that stay
  bool has_step = false;                // a row of the last step that stays
  bool has_evaluation = false;          // an evaluation after that step
  std::map<std::string, double> first;  // mean reward by set, of the evaluation before training
};

// Cuts metrics.jsonl and rollouts/ of the run's folder back to `last_step`. Files that are not
// there are empty. Throws Error naming file and line of a row that cannot be read.
Records cut_records(const std::string& run_dir, std::int64_t last_step);

}  // namespace tandem
