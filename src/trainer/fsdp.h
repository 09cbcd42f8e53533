// Sharded data parallel: every rank computes whole layers on its share of the samples; master
// weights and moments are sharded (ZeRO, Rajbhandari et al. 2020). Compute weights are resident in
// the arena, and the gather after a step is the weight update; or they are sharded too and each
// layer's are gathered when it runs (model/layer_gather.h), which changes no bit.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "checkpoint/weights.h"
#include "data/packing.h"
#include "rl/advantages.h"
#include "rl/losses.h"
#include "rl/mismatch.h"
#include "trainer/gradients.h"
#include "trainer/optimizer.h"
#include "trainer/packed_model.h"
#include "trainer/token_means.h"
#include "trainer/trainer.h"

namespace tandem {

class FsdpTrainer final : public Trainer {
 public:
  FsdpTrainer(const TrainerSetup& setup, RoleWeights actor, std::optional<RoleWeights> reference,
              Group& group);

  TrainResult train(const TrainBatch& batch, std::int64_t total_steps) override;
  TokenValues log_probs(const TrainBatch& batch) override;
  void update_reference() override;
  void save_hf(const std::string& target) override;
  std::int64_t optimizer_steps() const override { return optimizer_.steps(); }
  ShardFile save(const std::string& folder, const SaveOptions& options) override;
  void load(const std::string& folder, const SaveOptions& options) override;
  void publish() override { optimizer_.publish(weights_.arena, held_); }
  void gather(std::span<float> flat) override { optimizer_.gather(held_, flat); }

 private:
  // What is fixed before the first optimizer step of a rollout.
  struct RolloutValues {
    TokenValues old_log_probs;        // of the rollout's weights; empty: each step's own forward
    TokenValues entropies;            // beside them, or empty
    TokenValues reference_log_probs;  // empty: no reference
    TokenValues advantages;
    std::vector<MismatchCorrection> corrections;  // empty: made from the step's own forward
  };
  struct StepInput {
    const TrainBatch& batch;  // its masks without rejected tokens
    const TrainBatch& whole;  // its masks as they came
    const RolloutValues& values;
    std::vector<std::int64_t> samples;  // indices, in id order
    TokenWeights weights, whole_weights;
    bool first;  // no optimizer step of this rollout lies before it
    bool last;   // none lies after it
  };
  struct Scored;  // one micro-batch's forward, with what it is compared with

  const ArenaLayout& layout() const { return actor_.layout(); }  // of the whole model
  std::vector<Leaf> plan(const TrainBatch& batch, const std::vector<std::int64_t>& samples) const;
  // Samples of each optimizer step of a rollout, as indices in id order.
  using Steps = std::vector<std::vector<std::int64_t>>;
  Steps cut_into_steps(const TrainBatch& batch) const;
  // Log-probabilities (and entropies) of every loss token, gathered over ranks; 0 elsewhere. Each
  // step's samples are packed as the step packs them.
  std::pair<TokenValues, TokenValues> score(PackedModel& model, const TrainBatch& batch,
                                            const Steps& steps, bool with_entropy);
  RolloutValues fix_values(const TrainBatch& batch, const Steps& steps, TrainResult& result);
  StepMetrics train_step(const StepInput& input, std::int64_t total_steps, TrainResult& result);
  // Whether the model ran: some token of the micro-batch has a loss.
  bool run_micro_batch(const StepInput& input, const MicroBatch& micro, TokenMeans& means);
  bool learns(const StepInput& input, const MicroBatch& micro) const;
  // How often the busiest rank runs the model on its leaves of all steps, and in which of these
  // passes any rank has a backward.
  std::vector<bool> joint_passes(const TrainBatch& batch,
                                 const std::vector<std::vector<Leaf>>& steps,
                                 const std::function<bool(const MicroBatch&)>& has_backward) const;
  Scored compare(const StepInput& input, const MicroBatch& micro, const PackedBatch& packed,
                 const LogProbs& now, TokenMeans& means) const;
  void record(const StepInput& input, const Scored& scored, const LossTerms& terms,
              TokenMeans& means) const;
  void record_mismatch(const StepInput& input, std::int64_t sample,
                       const MismatchCorrection& correction, TokenMeans& means) const;
  std::vector<SampleOrigin> origins(const StepInput& input) const;
  bool reference_moves() const;
  std::vector<FlatPiece> reference_pieces() const;
  bool measures_mismatch() const;
  bool measures_rollout_entropy(const StepInput& input) const;
  TokenWeights token_weights(const TrainBatch& batch,
                             const std::vector<std::int64_t>& samples) const;

  TrainerSetup setup_;
  RoleWeights weights_;
  std::optional<RoleWeights> reference_weights_;
  Group& group_;
  PackedModel actor_;
  std::optional<PackedModel> reference_;
  std::vector<FlatRange> held_;  // what the arena of each rank holds of the flat vector
  ShardedAdamW optimizer_;
  GradientTree gradients_;
};

}  // namespace tandem
