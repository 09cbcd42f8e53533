// What each rank of a placement will hold in memory, phase by phase, from shapes alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cluster/placement.h"
#include "config/config.h"
#include "model/hf_config.h"

namespace tandem {

struct RankMemory {
  std::int64_t program_bytes = 0;  // code and libraries, once in use
  std::int64_t weight_bytes = 0;   // compute weights: the trainer's, the engine's, a second copy
  std::int64_t kv_bytes = 0;
  std::int64_t optimizer_bytes = 0;
  std::int64_t gradient_bytes = 0;    // from the first train phase on
  std::int64_t activation_bytes = 0;  // in the train phase alone

  std::int64_t rollout_bytes() const {
    return program_bytes + weight_bytes + kv_bytes + optimizer_bytes + gradient_bytes;
  }
  std::int64_t train_bytes() const { return rollout_bytes() + activation_bytes; }
};

// config: resolved, kv_cache_tokens included; sample_tokens: prompt and answer of the longest.
std::vector<RankMemory> plan_memory(const Config& config, const ModelConfig& model,
                                    const Placement& placement, std::int64_t sample_tokens);

// A table: a row a rank, columns by part, then the sums by phase.
std::string memory_table(const std::vector<RankMemory>& ranks);

}  // namespace tandem
