// What a trainer rank needs, from shapes alone: for `--dry-run` and the line at
// a run's start. An upper bound of the tensors that training keeps; the allocator's slack is not in
// it, nor what FlashAttention takes for shared prompts beyond kMaxCudnnWorkspace, or more of in
// deterministic mode.
#pragma once

#include <cstdint>

#include "config/config.h"
#include "model/hf_config.h"

namespace tandem {

struct TrainerMemory {
  std::int64_t weight_bytes = 0;     // compute weights of one role: all, or a shard and its slots
  std::int64_t optimizer_bytes = 0;  // this rank's f32 master weights and two moments
  std::int64_t gradient_bytes = 0;   // f32 buffers of the gradient tree
  // Of the largest micro-batch, forward to backward, with what attention's backward takes beside.
  std::int64_t activation_bytes = 0;
};

struct TrainerLoad {
  std::int64_t flat_elements = 0;  // parameters
  std::int64_t num_ranks = 1;      // trainer ranks
  std::int64_t element_bytes = 2;  // of compute
  std::int64_t samples = 1;        // of an optimizer step
  std::int64_t sample_tokens = 1;  // prompt and answer of the longest
  bool on_gpu = false;
  bool shares_prompts = false;  // several samples may have one, which stands once in a micro-batch
};

TrainerMemory estimate_trainer_memory(const ModelConfig& model, const TrainConfig& train,
                                      const TrainerLoad& load);

}  // namespace tandem
