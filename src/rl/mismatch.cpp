// See mismatch.h.
#include "rl/mismatch.h"

#include <algorithm>
#include <cassert>
#include <cmath>

namespace tandem {
namespace {

constexpr double kLogRatioBound = 20.0;

struct LogRatios {
  std::vector<double> token;  // 0 outside of the loss
  double sum = 0, count = 0;
};

LogRatios log_ratios(std::span<const float> trainer, std::span<const float> engine,
                     std::span<const std::uint8_t> mask) {
  LogRatios out{.token = std::vector<double>(mask.size(), 0.0)};
  for (std::size_t t = 0; t < mask.size(); ++t) {
    if (!mask[t]) continue;
    out.token[t] = static_cast<double>(trainer[t]) - static_cast<double>(engine[t]);
    out.sum += out.token[t];
    ++out.count;
  }
  return out;
}

double ratio_at(const LogRatios& logs, std::size_t t, RatioLevel level) {
  double log = logs.token[t];
  if (level == RatioLevel::sequence) log = logs.sum;
  if (level == RatioLevel::geometric) log = logs.sum / logs.count;
  return std::exp(std::clamp(log, -kLogRatioBound, kLogRatioBound));
}

// Written so that NaN is inside.
bool outside(double ratio, double low, double high) { return ratio < low || ratio > high; }

}  // namespace

MismatchCorrection correct_mismatch(std::span<const float> trainer_log_probs,
                                    std::span<const float> engine_log_probs,
                                    std::span<const std::uint8_t> loss_mask,
                                    const AlgorithmConfig& a) {
  assert(trainer_log_probs.size() == loss_mask.size());
  assert(engine_log_probs.size() == loss_mask.size());
  const LogRatios logs = log_ratios(trainer_log_probs, engine_log_probs, loss_mask);
  MismatchCorrection out{.ratio = std::vector<float>(loss_mask.size(), 1.0f),
                         .weights = std::vector<float>(loss_mask.size(), 1.0f),
                         .mask = {loss_mask.begin(), loss_mask.end()}};
  bool vetoed = false;
  for (std::size_t t = 0; t < loss_mask.size(); ++t) {
    if (!loss_mask[t]) continue;
    const double ratio = ratio_at(logs, t, a.tis_level);
    out.ratio[t] = static_cast<float>(ratio);
    if (a.uses_tis()) {
      const bool out_of_bounds = outside(ratio, a.tis_clip_low, a.tis_clip);
      double weight = ratio;
      if (a.tis_mode == TisMode::clip) weight = std::clamp(ratio, a.tis_clip_low, a.tis_clip);
      if (a.tis_mode == TisMode::icepop && out_of_bounds) weight = 0.0;
      if (a.tis_mode == TisMode::mask && out_of_bounds) out.mask[t] = 0;
      out.weights[t] = static_cast<float>(weight);
    }
    if (a.use_rs) {
      const double kept = ratio_at(logs, t, a.rs_level);
      if (outside(kept, a.rs_lower_bound.value(), a.rs_upper_bound.value())) out.mask[t] = 0;
      if (a.rs_veto_threshold && logs.token[t] < std::log(*a.rs_veto_threshold)) vetoed = true;
    }
  }
  if (vetoed) std::fill(out.mask.begin(), out.mask.end(), std::uint8_t{0});
  return out;
}

MismatchSums mismatch_sums(const MismatchCorrection& c, std::span<const std::uint8_t> loss_mask) {
  MismatchSums sums;
  for (std::size_t t = 0; t < loss_mask.size(); ++t) {
    if (!loss_mask[t]) continue;
    const auto ratio = static_cast<double>(c.ratio[t]);
    sums.ratio += ratio;
    sums.distance += std::abs(ratio - 1.0);
    if (!c.mask[t]) {
      ++sums.rejected;
      continue;
    }
    sums.weight += static_cast<double>(c.weights[t]);
    if (c.weights[t] != c.ratio[t]) ++sums.bounded;
  }
  return sums;
}

}  // namespace tandem
