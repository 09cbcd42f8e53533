// The checks of a request against what this engine can serve.
#include "engine/request.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace tandem {

std::int64_t max_kv_positions(const GenerateRequest& request, const EngineLimits& limits) {
  const auto prompt = static_cast<std::int64_t>(request.prompt.size());
  const std::int64_t answer =
      std::min(request.params.max_new_tokens, limits.context_length - prompt);
  return answer <= 0 ? 0 : prompt + answer - 1;
}

void check_request(const GenerateRequest& request, const EngineLimits& limits) {
  const auto prompt = static_cast<std::int64_t>(request.prompt.size());
  TD_CHECK(prompt > 0, "input_ids: the prompt is empty; send at least one token id");
  TD_CHECK(prompt <= limits.context_length,
           "input_ids: the prompt has {} tokens, the context length is {}; shorten the prompt",
           prompt, limits.context_length);
  for (std::int64_t i = 0; i < prompt; ++i) {
    const TokenId id = request.prompt[i];
    TD_CHECK(id >= 0 && id < limits.vocab_size,
             "input_ids: id {} at position {} is outside the vocabulary [0, {}); "
             "use this model's tokenizer",
             id, i, limits.vocab_size);
  }
  const SamplingParams& params = request.params;
  TD_CHECK(params.max_new_tokens >= 0,
           "sampling_params.max_new_tokens: {} is negative; send 0 or more", params.max_new_tokens);
  TD_CHECK(std::isfinite(params.temperature) && params.temperature >= 0,
           "sampling_params.temperature: {} found, wanted 0 (greedy) or a positive number",
           params.temperature);
  constexpr std::int64_t kMaxSamples = 1 << 16;
  TD_CHECK(request.n >= 1 && request.n <= kMaxSamples,
           "sampling_params.n: {} found, wanted 1 to {}", request.n, kMaxSamples);
  const std::int64_t capacity = limits.num_blocks * limits.block_tokens;
  TD_CHECK(max_kv_positions(request, limits) <= capacity,
           "sampling_params.max_new_tokens: prompt of {} and answer of up to {} tokens need more "
           "than the {} positions of the whole KV cache; lower it or give the engine more memory",
           prompt, params.max_new_tokens, capacity);
}

}  // namespace tandem
