// Generating and rewarding: prompts in, finished samples in order of id out. The same for training
// and for evaluation, which differ in their sampling parameters only.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "config/config.h"
#include "data/prompts.h"
#include "data/sample.h"
#include "data/tokenizer.h"
#include "engine/client.h"
#include "metrics/progress.h"
#include "rl/rewards.h"

namespace tandem {

// Prompt `index` of a set, drawn as number `counter`.
struct RolloutItem {
  std::uint64_t counter = 0;
  std::uint64_t index = 0;
};

struct RolloutSetup {
  std::string phase;  // "rollout", "evaluate": for the progress display
  std::int64_t samples_per_prompt = 1;
  SamplingParams params;
  bool skip_special_tokens = true;  // in the text of an answer
  bool mask_truncated = false;
  RewardRule rule;
  std::int64_t max_context = 0;  // tokens of prompt and answer; 0: no limit but the model's
  double timeout_seconds = 1800;
};

// How training and evaluation sample.
SamplingParams rollout_sampling(const Config& config);
SamplingParams evaluation_sampling(const Config& config);

// Sets the loss mask of truncated samples to 0; rewards stay.
void mask_truncated_samples(std::vector<Sample>& samples);

class RolloutMaker {
 public:
  // At least one engine; prompts are dealt to them in turn. `stop`: asked several times a second
  // whether to give up.
  RolloutMaker(std::vector<EngineClient*> engines, TokenizerProcess& tokenizer, Progress& progress,
               std::function<bool()> stop)
      : engines_(std::move(engines)),
        tokenizer_(tokenizer),
        progress_(progress),
        stop_(std::move(stop)) {}

  // All prompts at once; the engines batch them. Samples have ids counter × n + i, text, reward
  // and status; nothing if stop() said so. Throws Error if a prompt's call fails or the time is
  // over, naming what is missing.
  std::optional<std::vector<Sample>> run(const std::vector<Prompt>& prompts,
                                         const std::vector<RolloutItem>& items,
                                         const RolloutSetup& setup);

 private:
  std::optional<std::vector<Sample>> generate(const std::vector<Prompt>& prompts,
                                              const std::vector<RolloutItem>& items,
                                              const RolloutSetup& setup);
  void reward(const std::vector<Prompt>& prompts, const std::vector<RolloutItem>& items,
              const RolloutSetup& setup, std::vector<Sample>& samples);

  std::vector<EngineClient*> engines_;
  TokenizerProcess& tokenizer_;
  Progress& progress_;
  std::function<bool()> stop_;
};

}  // namespace tandem
