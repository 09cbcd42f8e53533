// What a trainer rank needs, from shapes alone: for `--dry-run` and the line at
// a run's start. An upper bound of the tensors that training keeps; the allocator's slack is not in
// it.
#pragma once

#include <cstdint>

#include "config/config.h"
#include "model/hf_config.h"

namespace tandem {

struct TrainerMemory {
  std::int64_t weight_bytes = 0;      // compute weights of one role: all, or a shard and its slots
  std::int64_t optimizer_bytes = 0;   // this rank's f32 master weights and two moments
  std::int64_t gradient_bytes = 0;    // f32 buffers of the gradient tree
  std::int64_t activation_bytes = 0;  // of the largest micro-batch, forward to backward
};

struct TrainerLoad {
  std::int64_t flat_elements = 0;  // parameters
  std::int64_t num_ranks = 1;      // trainer ranks
  std::int64_t element_bytes = 2;  // of compute
  std::int64_t samples = 1;        // of an optimizer step
  std::int64_t sample_tokens = 1;  // prompt and answer of the longest
};

TrainerMemory estimate_trainer_memory(const ModelConfig& model, const TrainConfig& train,
                                      const TrainerLoad& load);

}  // namespace tandem
