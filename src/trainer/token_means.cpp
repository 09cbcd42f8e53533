// Rows of sums, a column a metric.
#include "trainer/token_means.h"

#include <fmt/format.h>

#include <cmath>
#include <map>
#include <string>

namespace tandem {
namespace {

constexpr std::size_t kMetrics = kTokenMetricNames.size();
constexpr auto kGap = static_cast<std::size_t>(TokenMetric::rollout_abs_diff);
enum Extra : std::size_t { kMaxGap = kMetrics, kForwardTokens, kMicroBatches, kColumns };

}  // namespace

TokenMeans::TokenMeans(std::span<const std::int64_t> samples, std::size_t batch_size)
    : row_of_(batch_size, -1),
      values_((samples.size() + 1) * kColumns, 0.0),
      rows_(samples.size()) {
  for (std::size_t i = 0; i < samples.size(); ++i)
    row_of_[samples[i]] = static_cast<std::int64_t>(i);
}

double& TokenMeans::at(std::int64_t sample, std::size_t column) {
  return values_[static_cast<std::size_t>(row_of_[sample]) * kColumns + column];
}

void TokenMeans::add(std::int64_t sample, TokenMetric metric, double value) {
  const auto column = static_cast<std::size_t>(metric);
  at(sample, column) += value;
  ++values_[rows_ * kColumns + column];
}

void TokenMeans::add_gap(std::int64_t sample, double gap) {
  double& max = at(sample, kMaxGap);
  if (gap > max || gap != gap) max = gap;
}

void TokenMeans::add_micro_batch(std::int64_t first_sample, std::int64_t rows) {
  at(first_sample, kForwardTokens) += static_cast<double>(rows);
  at(first_sample, kMicroBatches) += 1;
}

void TokenMeans::reduce(Group& group) {
  if (group.size() > 1) group.all_reduce_sum(std::span<double>(values_));
}

void TokenMeans::report(StepMetrics& metrics, std::span<const SampleOrigin> origins) const {
  std::array<double, kColumns> sums{};
  for (std::size_t row = 0; row < rows_; ++row)
    for (std::size_t c = 0; c < kColumns; ++c) sums[c] += values_[row * kColumns + c];
  const auto always = [](std::size_t m) {  // 0 for a step without any loss token
    return m == static_cast<std::size_t>(TokenMetric::loss) ||
           m == static_cast<std::size_t>(TokenMetric::pg_loss);
  };
  for (std::size_t m = 0; m < kMetrics; ++m)
    if (m != kGap && (always(m) || values_[rows_ * kColumns + m] > 0))
      metrics.means.emplace(kTokenMetricNames[m], sums[m]);
  metrics.forward_tokens = static_cast<std::int64_t>(sums[kForwardTokens]);
  metrics.micro_batches = static_cast<std::int64_t>(sums[kMicroBatches]);
  if (values_[rows_ * kColumns + kGap] > 0) report_gaps(metrics, origins);
}

void TokenMeans::report_gaps(StepMetrics& metrics, std::span<const SampleOrigin> origins) const {
  struct Mean {
    double sum = 0, weight = 0;
    double value() const { return sum / weight; }
  };
  std::map<std::int64_t, Mean> by_lag;
  Mean off;
  double all = 0;
  for (std::size_t row = 0; row < rows_; ++row) {
    const SampleOrigin& origin = origins[row];
    if (origin.weight == 0) continue;
    const double sum = values_[row * kColumns + kGap];
    all += sum;
    for (Mean* mean : {&by_lag[origin.lag], origin.lag == 0 ? nullptr : &off})
      if (mean) *mean = {mean->sum + sum, mean->weight + origin.weight};
    if (origin.lag != 0) continue;
    ++metrics.on_policy_samples;
    const double gap = values_[row * kColumns + kMaxGap];
    if (gap > metrics.rollout_abs_diff_max || gap != gap) metrics.rollout_abs_diff_max = gap;
  }
  metrics.rollout_abs_diff = all;  // the weights add up to 1
  const std::string on(kTokenMetricNames[kGap]), name = "train/off_policy_logprob_abs_diff";
  if (off.weight == 0) {
    metrics.means.emplace(on, all);
    return;
  }
  metrics.means.emplace(name, off.value());
  for (const auto& [lag, mean] : by_lag)
    metrics.means.emplace(lag == 0 ? on : fmt::format("{}/lag_{}", name, lag), mean.value());
}

}  // namespace tandem
