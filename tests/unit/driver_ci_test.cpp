// --ci-test: which numbers of a step pass, and what is said of those that do not.
#include "driver/ci_test.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

namespace tandem {
namespace {

Config config_of() {
  Config c;
  c.train.ci_test = true;
  c.compute.device = Device::cpu;
  c.model.hf_checkpoint = c.algorithm.ref_load = "models/a";
  c.algorithm.use_kl_loss = true;
  return c;
}

TrainResult good() {
  StepMetrics m;
  m.means = {{"train/ppo_kl", 1e-10},
             {"train/pg_clipfrac", 0},
             {"train/kl_loss", -1e-10},
             {"train/train_rollout_logprob_abs_diff", 0}};
  m.num_samples = m.on_policy_samples = 8;
  m.loss_tokens = 40;
  TrainResult r;
  r.steps = {m, m};
  r.steps[1].means["train/ppo_kl"] = 0.1;  // later steps may move
  return r;
}

struct Case {
  const char* name;
  std::function<void(Config&, TrainResult&, CiStep&)> change;
  std::vector<std::string> faults;  // what each begins with
};

TEST(CiTest, EachInvariantHasItsBound) {
  const double nan = std::nan("");
  for (const Case& c : std::vector<Case>{
           {"good", [](auto&, auto&, auto&) {}, {}},
           {"kl",
            [](auto&, auto&r, auto&) { r.steps[0].means["train/ppo_kl"] = -2e-9; },
            {"train/ppo_kl = -2e-09"}},
           {"not a number",
            [=](auto&, auto&r, auto&) { r.steps[0].means["train/ppo_kl"] = nan; },
            {"train/ppo_kl = nan"}},
           {"clipped",
            [](auto&, auto&r, auto&) { r.steps[0].means["train/pg_clipfrac"] = 0.01; },
            {"train/pg_clipfrac = 0.01"}},
           {"reference",
            [](auto&, auto&r, auto&) { r.steps[0].means["train/kl_loss"] = 1e-6; },
            {"train/kl_loss = 1e-06"}},
           {"reference later",
            [](auto&, auto&r, auto&s) {
              r.steps[0].means["train/kl_loss"] = 1e-6;
              s.first_of_run = false;
            },
            {}},
           {"another reference",
            [](auto&c2, auto&r, auto&) {
              r.steps[0].means["train/kl_loss"] = 1e-6;
              c2.algorithm.ref_load = "models/b";
            },
            {}},
           {"gap",
            [](auto&, auto&r, auto&) { r.steps[1].rollout_abs_diff_max = 1e-7; },
            {"train/train_rollout_logprob_abs_diff_max = 1e-07 over 8 samples"}},
           {"gap of a fast mode",
            [](auto&c2, auto&r, auto&) {
              c2.compute.true_on_policy_mode = false;
              r.steps[0].rollout_abs_diff_max = 1e-7;
              r.steps[1].means["train/train_rollout_logprob_abs_diff"] = 0.04;
            },
            {"train/train_rollout_logprob_abs_diff = 0.04"}},
           {"nothing on policy",
            [](auto&, auto&r, auto&) {
              for (auto& m : r.steps) m.on_policy_samples = 0;
            },
            {"train/on_policy_samples = 0 of 8 samples with 40 loss tokens"}},
           {"nothing on policy, and none expected",
            [](auto&c2, auto&r, auto&) {
              c2.rollout.async_steps = 1;
              for (auto& m : r.steps) m.on_policy_samples = 0;
            },
            {}},
           {"nothing to train on",
            [](auto&, auto&r, auto&) {
              for (auto& m : r.steps) m.on_policy_samples = m.loss_tokens = 0;
            },
            {}},
           {"switched off",
            [](auto&c2, auto&r, auto&) {
              c2.train.ci_disable_kl_checker = c2.train.ci_disable_logprobs_checker = true;
              r.steps[0].means["train/ppo_kl"] = r.steps[0].rollout_abs_diff_max = 1;
            },
            {}},
           {"recorded",
            [](auto&, auto&r, auto&s) {
              r.steps[0].rollout_abs_diff_max = 1;
              s.recorded = true;
            },
            {}},
       }) {
    Config config = config_of();
    TrainResult result = good();
    CiStep step{.first_of_run = true};
    c.change(config, result, step);
    const auto faults = ci_faults(config, result, step);
    ASSERT_EQ(faults.size(), c.faults.size()) << c.name;
    for (std::size_t i = 0; i < faults.size(); ++i)
      EXPECT_TRUE(faults[i].starts_with(c.faults[i])) << c.name << ": " << faults[i];
  }
}

}  // namespace
}  // namespace tandem
