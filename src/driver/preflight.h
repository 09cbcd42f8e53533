// What the flags ask of the model that they name, looked at before a rank starts: the same checks
// in a run and in its dry run.
#pragma once

#include <cstdint>

#include "config/config.h"
#include "model/hf_config.h"

namespace tandem {

// Tokens of the longest sample that a run may hold, prompt and answer. Errors: a prompt of that
// length does not fit the model's context, or one such sample not --kv-cache-tokens.
std::int64_t longest_sample(const Config& config, const ModelConfig& model,
                            std::int64_t longest_prompt);

// --kv-cache-tokens where it is not given: room for max_running_requests of the longest samples.
std::int64_t default_kv_cache_tokens(const Config& config, std::int64_t longest_sample);

// Tokens of the longest answer asked for, evaluation included.
std::int64_t longest_answer(const Config& config);

// Error: --rollout-stop-token-ids names an id that the model cannot sample.
void check_stop_ids(const Config& config, const ModelConfig& model);

// Error: --save-hf names the folder of --hf-checkpoint.
void check_save_hf(const Config& config);

}  // namespace tandem
