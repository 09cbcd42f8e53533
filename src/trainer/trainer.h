// The seam of the trainers: what a rank asks of its trainer, whatever its mesh and sharding. All
// ranks of the trainer's group call the same function with the same batch; the results are equal
// on all of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/hf_folder.h"
#include "checkpoint/shards.h"
#include "comm/group.h"
#include "config/config.h"
#include "data/batch.h"
#include "model/arena.h"
#include "model/layer_gather.h"
#include "trainer/results.h"

namespace tandem {

// How far a train() call is, readable from any thread.
struct TrainProgress {
  std::atomic<std::int64_t> done{0}, total{0};  // micro-batches of this rank
  std::atomic<double> last_write{0};            // monotonic seconds of the last optimizer step
};

// What of the trainer's state goes into a checkpoint, or is taken from one.
struct SaveOptions {
  bool optimizer = true;  // false: the weights alone, the optimizer begins anew
  bool reference = true;  // where it moves (--ref-update-interval): its weights too
};

class Trainer {
 public:
  virtual ~Trainer() = default;

  TrainProgress progress;

  // The optimizer steps of one rollout. A step with a non-finite gradient changes no state.
  // total_steps: of the whole run, for the schedule.
  virtual TrainResult train(const TrainBatch& batch, std::int64_t total_steps) = 0;
  // The trainer's log-probability of every response token of every sample with loss_mask 1 (0 for
  // others), without a gradient.
  virtual std::vector<std::vector<float>> log_probs(const TrainBatch& batch) = 0;
  // The present weights become the reference's; Error without one (--ref-update-interval).
  virtual void update_reference() = 0;
  // Writes the present weights as a Hugging Face folder (the group's rank 0 writes).
  virtual void save_hf(const std::string& target) = 0;
  virtual std::int64_t optimizer_steps() const = 0;
  // Writes this rank's part of a checkpoint into the folder. No rank waits for another.
  virtual ShardFile save(const std::string& folder, const SaveOptions& options) = 0;
  // Takes this rank's part of the state from a checkpoint of any number of ranks. No rank waits for
  // another; once all have done it, publish() brings the weights into the arenas.
  virtual void load(const std::string& folder, const SaveOptions& options) = 0;
  // The present weights of all ranks into this rank's arena.
  virtual void publish() = 0;
  // The master weights, in the flat order of this rank's arena and rounded to nothing: what the
  // arena must hold once it is rounded. All ranks call it together.
  virtual void gather(std::span<float> flat) = 0;
};

struct TrainerSetup {
  TrainConfig train;
  AlgorithmConfig algorithm;
  OptimizerConfig optimizer;
  std::int64_t longest_sequence = 0;  // that the run may ask for (long rope); 0: the model's limit
  double temperature = 1.0;           // of the rollout: logits are divided by it on both sides
  bool perturb = false;               // --debug-perturb-kernel trainer
};

// A role's folder and its arena, which holds the folder's weights: all, or where there is `layers`
// this rank's shard of them.
struct RoleWeights {
  const HfFolder& folder;
  Arena& arena;
  LayerGather* layers = nullptr;
};

// The trainer of setup.train.train_backend. Weights (of both roles sharded alike) and group must
// outlive it. `reference`: there if setup.algorithm.uses_reference(); its vocabulary must be the
// actor's.
std::unique_ptr<Trainer> make_trainer(const TrainerSetup& setup, RoleWeights actor,
                                      std::optional<RoleWeights> reference, Group& group);

}  // namespace tandem
