// See preflight.h.
#include "driver/preflight.h"

#include <algorithm>
#include <filesystem>

#include "base/check.h"

namespace tandem {

std::int64_t longest_answer(const Config& config) {
  return std::max(config.rollout.rollout_max_response_len.value(),
                  config.evaluate.eval_max_response_len.value());
}

std::int64_t longest_sample(const Config& config, const ModelConfig& model,
                            std::int64_t longest_prompt) {
  const std::int64_t context = model.max_position_embeddings;
  TD_CHECK(longest_prompt <= context,
           "--rollout-max-prompt-len: a prompt has {} tokens, the model's context is {}; give at "
           "most that to leave such prompts out",
           longest_prompt, context);
  const std::int64_t longest = std::min(
      {longest_prompt + longest_answer(config), context,
       std::max(longest_prompt, config.rollout.rollout_max_context_len.value_or(context))});
  if (const auto& kv = config.engine.kv_cache_tokens)
    TD_CHECK(*kv >= longest, "--kv-cache-tokens: found {}, one sample may need {}", *kv, longest);
  return longest;
}

std::int64_t default_kv_cache_tokens(const Config& config, std::int64_t longest_sample) {
  return ((longest_sample + 15) / 16 + 1) * 16 * config.engine.max_running_requests;
}

void check_stop_ids(const Config& config, const ModelConfig& model) {
  for (const std::int64_t id : config.rollout.rollout_stop_token_ids)
    TD_CHECK(id < model.vocab_size,
             "--rollout-stop-token-ids: {} is outside the model's vocabulary of {} tokens, so it "
             "could never end an answer",
             id, model.vocab_size);
}

void check_save_hf(const Config& config) {
  std::error_code none;
  TD_CHECK(
      config.checkpoint.save_hf.empty() ||
          !std::filesystem::equivalent(config.checkpoint.save_hf, config.model.hf_checkpoint, none),
      "--save-hf: {} is the folder of --hf-checkpoint; name another", config.checkpoint.save_hf);
}

}  // namespace tandem
