// What a trainer reports of the optimizer steps of a rollout, and its form on the wire. No torch:
// the driver reads it.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace tandem {

// One optimizer step.
struct StepMetrics {
  // By full name ("train/loss"), what was measured: means over loss tokens with the weights of the
  // loss, that is per sample over its loss tokens, then over samples (over tokens with
  // --calculate-per-token-loss).
  std::map<std::string, double, std::less<>> means;
  // |trainer's - engine's log-probability| over the loss tokens of on-policy samples.
  double rollout_abs_diff_max = 0;
  // Its mean over all loss tokens of the step, whichever weights generated them; NaN: not measured.
  double rollout_abs_diff = std::numeric_limits<double>::quiet_NaN();
  double grad_norm = 0;  // before clipping; NaN or infinite: the step was skipped
  double lr = 0;
  bool skipped = false;
  std::int64_t num_samples = 0, loss_tokens = 0, forward_tokens = 0, micro_batches = 0;
  // Samples with loss tokens that the trainer's present weights generated from the first token to
  // the last (all of them where no version is known), of those that were compared.
  std::int64_t on_policy_samples = 0;

  // NaN for what was not measured.
  double mean(std::string_view name) const;
};

struct TrainResult {
  std::vector<StepMetrics> steps;
  // What is fixed before the first step: "rollout/advantages", "rollout/kl", …
  std::map<std::string, double, std::less<>> rollout_means;
  double forward_backward_seconds = 0, optimizer_seconds = 0, log_probs_seconds = 0;
  double reference_seconds = 0;
  double gather_wait_seconds = 0;  // for sharded weights, that no computing hid
};

Json to_json(const TrainResult& result);
// Throws Error beginning with `source` if a field is missing or of another type.
TrainResult train_result_from_json(const Json& json, std::string_view source);

}  // namespace tandem
