// Sharded data parallel: every rank computes whole layers on its share of the samples; master
// weights and moments are sharded (ZeRO, Rajbhandari et al. 2020), compute weights are resident in
// the arena, and the gather after a step is the weight update.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "data/packing.h"
#include "model/model.h"
#include "trainer/gradients.h"
#include "trainer/optimizer.h"
#include "trainer/packed_batch.h"
#include "trainer/trainer.h"

namespace tandem {

class FsdpTrainer final : public Trainer {
 public:
  FsdpTrainer(const TrainerSetup& setup, const HfFolder& folder, Arena& arena, Group& group);

  TrainResult train(const TrainBatch& batch, std::int64_t total_steps) override;
  std::vector<std::vector<float>> log_probs(const TrainBatch& batch) override;
  void save_hf(const std::string& target) override;
  std::int64_t optimizer_steps() const override { return optimizer_.steps(); }

 private:
  struct TokenMeans;  // per-sample metrics of a step, exchanged once at its end
  struct StepInput {
    const TrainBatch& batch;
    std::vector<std::int64_t> samples;                     // indices, in id order
    const std::vector<std::vector<float>>* old_log_probs;  // null: the forward's own
    double sample_weight = 0;                              // 1 / samples, sample mean
    double token_weight = 0;                               // 1 / loss tokens, token mean
  };

  std::vector<Leaf> plan(const TrainBatch& batch, const std::vector<std::int64_t>& samples) const;
  StepMetrics train_step(const StepInput& input, std::int64_t total_steps, TrainResult& result);
  void run_micro_batch(const StepInput& input, const MicroBatch& micro, TokenMeans& means);
  at::Tensor forward(PackedBatch& packed);
  std::vector<TokenId> loss_ids(const PackedBatch& packed) const;
  at::Tensor loss_hidden(const at::Tensor& hidden, const PackedBatch& packed) const;

  TrainerSetup setup_;
  const HfFolder& folder_;
  Arena& arena_;
  Group& group_;
  Model model_;
  ShardedAdamW optimizer_;
  GradientTree gradients_;
  std::optional<KvPool> pool_;  // one layer, as many blocks as the largest micro-batch yet
};

}  // namespace tandem
