// What a trainer reports of the optimizer steps of a rollout, and its form on the wire. No torch:
// the driver reads it.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace tandem {

// One optimizer step. Means are those of the loss: mean per sample over its loss tokens, then over
// samples (token mean with --calculate-per-token-loss).
struct StepMetrics {
  double loss = 0, pg_clipfrac = 0, ppo_kl = 0;
  double rollout_abs_diff = 0;      // |trainer's - engine's log-probability|, mean as above
  double rollout_abs_diff_max = 0;  // over all loss tokens of the step
  double rollout_kl = 0;            // k3 of engine against trainer
  double grad_norm = 0;             // before clipping; NaN or infinite: the step was skipped
  double lr = 0;
  bool skipped = false;
  std::int64_t num_samples = 0, loss_tokens = 0, forward_tokens = 0, micro_batches = 0;
};

struct TrainResult {
  std::vector<StepMetrics> steps;
  double forward_backward_seconds = 0, optimizer_seconds = 0, log_probs_seconds = 0;
};

Json to_json(const TrainResult& result);
// Throws Error beginning with `source` if a field is missing or of another type.
TrainResult train_result_from_json(const Json& json, std::string_view source);

}  // namespace tandem
