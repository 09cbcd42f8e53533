// The folder of a run's checkpoints:
//
//   <root>/iter_0000009/rank_00000_of_00001.safetensors, …   weights and optimizer, by the ranks
//   <root>/iter_0000009/state.json                           everything else, by the driver
//   <root>/latest_checkpointed_iteration.txt                 "9": the one to continue from
//
// The number is the last rollout done, counted from 0, as Miles counts; "none" stands in the
// pointer until the first checkpoint is whole. A checkpoint is made under another name, brought to
// disk, renamed, and only then the pointer moves; so whatever moment a crash picks, the pointer
// names a whole checkpoint. Nothing here chooses another one in silence: where the pointer's
// checkpoint cannot be used, the error says which newest one is whole and how to ask for it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "checkpoint/shards.h"

namespace tandem {

// state.json. `run` belongs to the driver: this folder knows no more of it than that it is there.
struct CheckpointState {
  std::int64_t rollout_id = 0;
  std::int64_t optimizer_steps = 0;
  std::vector<ShardFile> files;
  Json run = Json::object();
};

std::string checkpoint_folder(const std::string& root, std::int64_t rollout_id);

// Numbers of the iter_… folders under root, ascending; whether they are whole is not looked at.
std::vector<std::int64_t> checkpoint_ids(const std::string& root);

// state.json of a checkpoint's folder, after a look at the length and header of every file. One
// Error lists all faults.
CheckpointState read_checkpoint(const std::string& folder);

// The faults of a checkpoint; none: it is whole, as far as was looked.
enum class Look { at_headers, at_all_bytes };
std::vector<std::string> checkpoint_faults(const std::string& folder, Look look);

// The checkpoint to continue from: that of `step` if given (--ckpt-step), else the pointer's.
// Nothing if there is neither pointer nor checkpoint, or the first one never became whole. Error:
// the pointer is missing beside checkpoints, is no number, or names one that cannot be used; each
// with the newest whole one and the flag that takes it.
std::optional<std::int64_t> find_checkpoint(const std::string& root,
                                            std::optional<std::int64_t> step);

// "; the newest whole checkpoint is …: --ckpt-step 7 continues from it", or that there is none.
// Reads every byte of the candidates. `not_this`: the one that was found to be faulty.
std::string fallback_advice(const std::string& root, std::optional<std::int64_t> not_this);

// Makes one checkpoint. Without commit() nothing of it stays.
class CheckpointWriter {
 public:
  // Makes the folder for the parts and removes what a killed process left of earlier ones.
  CheckpointWriter(std::string root, std::int64_t rollout_id);
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  const std::string& folder() const { return temporary_; }  // where ranks write their parts

  // Writes state.json, gives the folder its name and moves the pointer. A checkpoint of the same
  // number is replaced.
  void commit(const CheckpointState& state);

 private:
  std::string root_;
  std::int64_t rollout_id_;
  std::string temporary_;
};

// Which of `ids` go once `newest` is whole and the pointer names it: all older ones beyond the
// `keep_last` newest (`newest` among them), those aside whose step number (id + 1) is a multiple of
// `retain_interval`. Never `newest`, never a later one. Without either limit: none.
std::vector<std::int64_t> checkpoints_to_remove(const std::vector<std::int64_t>& ids,
                                                std::int64_t newest,
                                                std::optional<std::int64_t> keep_last,
                                                std::optional<std::int64_t> retain_interval);

// Removes a checkpoint: first its name, so that what is left of it never looks like one.
void remove_checkpoint(const std::string& root, std::int64_t rollout_id);

}  // namespace tandem
