// Means over the loss tokens of an optimizer step, exact on any number of ranks and for any cut
// into micro-batches: one row of f64 sums a sample, filled by the rank that computed the sample
// (the others add 0), added in the order of sample ids at the end.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "comm/group.h"
#include "trainer/results.h"

namespace tandem {

enum class TokenMetric {
  loss,
  pg_loss,
  pg_clipfrac,
  ppo_kl,
  ess_ratio,
  entropy_loss,
  kl_loss,
  opsm_clipfrac,
  rollout_abs_diff,
  rollout_kl,
  ois,
  tis,
  tis_abs,
  tis_clipfrac,
  tis_weight,
  rs_rejected,
  log_probs,
  entropy,
};
inline constexpr std::array<std::string_view, 18> kTokenMetricNames = {
    "train/loss",
    "train/pg_loss",
    "train/pg_clipfrac",
    "train/ppo_kl",
    "train/ess_ratio",
    "train/entropy_loss",
    "train/kl_loss",
    "train/opsm_clipfrac",
    "train/train_rollout_logprob_abs_diff",
    "train/train_rollout_kl",
    "train/ois",
    "train/tis",
    "train/tis_abs",
    "train/tis_clipfrac",
    "train/tis_weight",
    "train/rs_rejected_frac",
    "rollout/log_probs",
    "rollout/entropy",
};

// How a sample of the step came about.
struct SampleOrigin {
  std::int64_t lag = 0;  // versions from its oldest token to the trainer's weights; 0: on-policy
  double weight = 0;     // of its loss tokens together, in the means
};

class TokenMeans {
 public:
  // `samples`: those of the step as indices into a batch of batch_size, in the order of their ids.
  TokenMeans(std::span<const std::int64_t> samples, std::size_t batch_size);

  // Adds weight·value to the row of the sample (an index into the batch).
  void add(std::int64_t sample, TokenMetric metric, double value);
  // |trainer's - engine's log-probability| of one token; NaN stays.
  void add_gap(std::int64_t sample, double gap);
  void add_micro_batch(std::int64_t first_sample, std::int64_t rows);

  // Collective: after it the rows hold what all ranks added.
  void reduce(Group& group);
  // Means of what was measured, the largest gap, micro-batches and their rows. The gap is told for
  // on-policy samples; for others as train/off_policy_logprob_abs_diff, in all and by lag.
  // origins: of the step's samples, in their order.
  void report(StepMetrics& metrics, std::span<const SampleOrigin> origins) const;

 private:
  double& at(std::int64_t sample, std::size_t column);
  void report_gaps(StepMetrics& metrics, std::span<const SampleOrigin> origins) const;

  std::vector<std::int64_t> row_of_;  // batch index -> row, -1: not of this step
  std::vector<double> values_;        // [samples, columns], then how often each column was used
  std::size_t rows_;
};

}  // namespace tandem
