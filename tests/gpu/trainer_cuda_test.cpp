// The trainer on a GPU against the same steps on the CPU: in f32 equal to rounding, in bf16 near.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "checkpoint/weights.h"
#include "gpu/gpu.h"
#include "trainer/fsdp.h"

namespace tandem {
namespace {

const std::string kTiny = std::string(TANDEM_SOURCE_DIR) + "/tests/golden/tiny/";

// Prompts with several answers each, of lengths that fill and do not fill blocks.
TrainBatch random_batch(std::int64_t groups, std::int64_t n, TokenId vocab) {
  std::mt19937 random(7);
  auto token = [&] {
    return static_cast<TokenId>(3 + random() % static_cast<unsigned>(vocab - 3));
  };
  TrainBatch batch;
  for (std::int64_t g = 0; g < groups; ++g) {
    std::vector<TokenId> prompt(5 + random() % 40);
    for (TokenId& t : prompt) t = token();
    for (std::int64_t i = 0; i < n; ++i) {
      Sample s;
      s.id = static_cast<std::uint64_t>(g * n + i);
      s.prompt_id = static_cast<std::uint64_t>(g);
      s.tokens = prompt;
      s.response_length = 1 + static_cast<std::int64_t>(random() % 30);
      for (std::int64_t t = 0; t < s.response_length; ++t) {
        s.tokens.push_back(token());
        s.log_probs.push_back(-2.0f);
        s.loss_mask.push_back(1);
        s.weight_versions.push_back(1);
      }
      batch.samples.push_back(s);
      batch.advantages.push_back(static_cast<float>(static_cast<int>(random() % 200) - 100) /
                                 50.0f);
    }
  }
  return batch;
}

struct Outcome {
  std::vector<StepMetrics> steps;
  std::vector<float> weights;                 // flat, after the last step
  std::vector<std::vector<float>> log_probs;  // before the first step
};

Outcome run(const std::string& model, Element element, Place place, bool share) {
  const HfFolder folder = HfFolder::open(kTiny + model);
  Arena arena(make_arena_layout(folder.config(), element, 0, 1, place));
  load_arena(folder, arena);
  TrainerSetup setup;
  setup.train.share_prompt = share;
  setup.train.max_tokens_per_gpu = 256;
  setup.train.num_steps_per_rollout = 1;
  setup.optimizer.lr = 1e-4;
  Group one = Group::alone("trainer");
  FsdpTrainer trainer(setup, {folder, arena}, std::nullopt, one);
  const auto batch = random_batch(4, 4, static_cast<TokenId>(folder.config().vocab_size));
  Outcome out;
  out.log_probs = trainer.log_probs(batch);
  for (int s = 0; s < 3; ++s) out.steps.push_back(trainer.train(batch, 3).steps.at(0));
  out.weights.resize(static_cast<std::size_t>(arena.layout().flat_elements));
  arena.read_flat(out.weights.data());
  return out;
}

class CudaTrainer : public testing::TestWithParam<const char*> {};

TEST_P(CudaTrainer, ThreeStepsAreTheCpus) {
  TD_NEED_GPU();
  for (const Element e : {Element::f32, Element::bf16}) {
    SCOPED_TRACE(e == Element::f32 ? "f32" : "bf16");
    const Outcome cpu = run(GetParam(), e, Place::cpu, true);
    for (const bool share : {true, false}) {
      const Outcome gpu = run(GetParam(), e, Place::cuda, share);
      const double tol = e == Element::f32 ? 1e-4 : 0.15;
      double worst = 0;
      for (std::size_t i = 0; i < cpu.log_probs.size(); ++i)
        for (std::size_t t = 0; t < cpu.log_probs[i].size(); ++t)
          worst = std::max(worst, std::abs(double{cpu.log_probs[i][t]} - gpu.log_probs[i][t]));
      EXPECT_LT(worst, tol);
      for (int s = 0; s < 3; ++s) {
        const double relative = e == Element::f32 ? 1e-4 : 2e-2;
        EXPECT_NEAR(cpu.steps[s].means.at("train/loss"), gpu.steps[s].means.at("train/loss"),
                    e == Element::f32 ? 1e-5 : 1e-2);
        EXPECT_NEAR(cpu.steps[s].grad_norm, gpu.steps[s].grad_norm,
                    relative * cpu.steps[s].grad_norm);
      }
      // AdamW moves a weight whose gradient is all rounding by its full step either way.
      std::int64_t far = 0;
      for (std::size_t i = 0; i < cpu.weights.size(); ++i)
        far += std::abs(cpu.weights[i] - gpu.weights[i]) >
               (e == Element::f32 ? 1e-5f : 1e-2f * std::abs(cpu.weights[i]) + 6e-4f);
      EXPECT_LT(far, static_cast<std::int64_t>(cpu.weights.size() / 200));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Tiny, CudaTrainer, testing::Values("llama_odd", "qwen2", "qwen3"),
                         [](const auto& p) { return std::string(p.param); });

}  // namespace
}  // namespace tandem
