// How a run continues: which checkpoint, what of the driver's state it holds, and where the run's
// folder is. The random numbers need no state of their own: they are keyed by seed and sample id,
// and the ids follow from the position in the prompts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "checkpoint/checkpoints.h"
#include "config/config.h"
#include "data/sample.h"
#include "driver/sampling.h"

namespace tandem {

// The driver's part of state.json.
struct RunState {
  std::int64_t weight_version = 0;  // that the engines served after the step
  Json prompt_order;                // PromptOrder::save(), after the step and what is ahead of it
  std::int64_t skipped_steps = 0;   // optimizer steps skipped in a row, up to the last one
  std::string prompts_xxh3;         // of the prompts' ids and labels
  std::string run_dir;              // relative to the folder of checkpoints
  Json config;                      // resolved
  Json ahead = Json();              // of save_ahead(); null: no rollout was made ahead
};

Json to_json(const RunState& state);
RunState run_state_from_json(const Json& json, std::string_view where);

// A rollout that was made ahead of its step (--async-steps) goes into the checkpoint: the weights
// that wrote it are gone. Writes its samples into the checkpoint's folder and returns what tells of
// them; the other way round, Error naming the file if it is not what was written.
Json save_ahead(const std::string& folder, const DrawnGroups& rollout);
DrawnGroups load_ahead(const std::string& folder, const Json& ahead);

struct Resume {
  std::string root;    // folder of checkpoints
  std::string folder;  // of the checkpoint, absolute
  CheckpointState checkpoint;
  RunState run;

  std::int64_t rollout_id() const { return checkpoint.rollout_id; }
};

// The checkpoint that --load and --ckpt-step ask for. Nothing: no --load, or --load names the
// folder that --save fills and it is still empty. Errors: see find_checkpoint(); a --load without
// any checkpoint.
std::optional<Resume> find_resume(const Config& config);

// Error if --save holds checkpoints that this run does not continue: it would mix its own with
// them.
void check_save_folder(const Config& config, const std::optional<Resume>& resume);

// Tells the prompts of one file from those of another: ids and labels, in order.
std::string prompts_xxh3(const std::vector<Prompt>& prompts);

// The folder of the run that made the checkpoint, if its metrics still lie there; else empty.
std::string saved_run_dir(const Resume& resume);

// "optimizer.lr was 1e-05, is 2e-05": what of the config differs from that of the saved run, the
// places of files and the length of the log aside.
std::vector<std::string> config_changes(const Json& saved, const Config& config);

}  // namespace tandem
