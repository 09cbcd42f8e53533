// The bounds are those of Miles; exact mode asks for 0.
#include "driver/ci_test.h"

#include <fmt/format.h>

#include <cmath>

#include "config/validate.h"

namespace tandem {
namespace {

constexpr double kMostKl = 1e-9, kMostClipped = 1e-10, kMostMeanGap = 0.03;

// The name and value of a mean that is not measured are no fault; NaN is one.
void expect_small(const StepMetrics& m, const char* name, double most, const char* meaning,
                  std::vector<std::string>& faults) {
  const auto found = m.means.find(name);
  if (found != m.means.end() && !(std::abs(found->second) <= most))
    faults.push_back(
        fmt::format("{} = {}, at most {} wanted: {}", name, found->second, most, meaning));
}

void check_kl(const Config& config, const TrainResult& result, const CiStep& step,
              std::vector<std::string>& faults) {
  const AlgorithmConfig& a = config.algorithm;
  const StepMetrics& m = result.steps.front();
  // The engine's log-probabilities as the old ones are the other check's.
  if (!a.use_rollout_logprobs) {
    const char* same = "the first step of a rollout repeats the forward-only pass before it";
    expect_small(m, "train/ppo_kl", kMostKl, same, faults);
    expect_small(m, "train/pg_clipfrac", kMostClipped, same, faults);
  }
  if (!step.first_of_run || !a.uses_reference() ||
      !same_path(a.ref_load, config.model.hf_checkpoint))
    return;
  const char* equal = "the first step of a run has the reference's weights";
  expect_small(m, "train/kl_loss", kMostKl, equal, faults);
  const auto kl = result.rollout_means.find("rollout/kl");
  if (kl != result.rollout_means.end() && !(std::abs(kl->second) <= kMostKl))
    faults.push_back(
        fmt::format("rollout/kl = {}, at most {} wanted: {}", kl->second, kMostKl, equal));
}

void check_log_probs(const Config& config, const TrainResult& result,
                     std::vector<std::string>& faults) {
  const bool exact = config.compute.is_exact();
  const bool synchronous =
      config.rollout.async_steps == 0 && config.transfer.update_weights_interval == 1;
  for (std::size_t i = 0; i < result.steps.size(); ++i) {
    const StepMetrics& m = result.steps[i];
    if (synchronous && i == 0 && m.loss_tokens > 0 && m.on_policy_samples == 0)
      faults.push_back(fmt::format(
          "train/on_policy_samples = 0 of {} samples with {} loss tokens: a synchronous run trains "
          "on what its present weights generated",
          m.num_samples, m.loss_tokens));
    if (m.on_policy_samples == 0) continue;
    if (exact && m.rollout_abs_diff_max != 0.0)
      faults.push_back(fmt::format(
          "train/train_rollout_logprob_abs_diff_max = {} over {} samples of the present weights "
          "(optimizer step {}), 0 wanted: trainer and engine compute the same bits",
          m.rollout_abs_diff_max, m.on_policy_samples, i));
    if (!exact)
      expect_small(m, "train/train_rollout_logprob_abs_diff", kMostMeanGap,
                   "trainer and engine agree", faults);
  }
}

}  // namespace

std::vector<std::string> ci_faults(const Config& config, const TrainResult& result,
                                   const CiStep& step) {
  std::vector<std::string> faults;
  if (result.steps.empty()) return faults;
  if (!config.train.ci_disable_kl_checker) check_kl(config, result, step, faults);
  if (!config.train.ci_disable_logprobs_checker && !step.recorded)
    check_log_probs(config, result, faults);
  return faults;
}

}  // namespace tandem
