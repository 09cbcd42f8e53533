// The checks of a request against what this engine can serve.
#include "engine/request.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace tandem {
namespace {

constexpr std::size_t kMaxStopBytes = 1024;

void check_ids(const char* field, const std::vector<TokenId>& ids, std::int64_t vocab_size) {
  for (const TokenId id : ids) {
    TD_CHECK(id >= 0 && id < vocab_size,
             "sampling_params.{}: id {} is outside the vocabulary [0, {})", field, id, vocab_size);
  }
}

// The ranges are SGLang's.
void check_sampling(const SamplingParams& params, const EngineLimits& limits) {
  const auto check = [](const char* field, double value, bool fits, const char* wanted) {
    TD_CHECK(std::isfinite(value) && fits, "sampling_params.{}: {} found, wanted {}", field, value,
             wanted);
  };
  TD_CHECK(params.max_new_tokens >= 0,
           "sampling_params.max_new_tokens: {} is negative; send 0 or more", params.max_new_tokens);
  TD_CHECK(params.min_new_tokens >= 0 && params.min_new_tokens <= params.max_new_tokens,
           "sampling_params.min_new_tokens: {} found, wanted 0 to max_new_tokens {}",
           params.min_new_tokens, params.max_new_tokens);
  check("temperature", params.temperature, params.temperature >= 0,
        "0 (greedy) or a positive number");
  check("top_p", params.top_p, params.top_p > 0 && params.top_p <= 1, "above 0, at most 1");
  TD_CHECK(params.top_k == -1 || params.top_k >= 1,
           "sampling_params.top_k: {} found, wanted -1 (all) or at least 1", params.top_k);
  check("min_p", params.min_p, params.min_p >= 0 && params.min_p <= 1, "0 to 1");
  check("frequency_penalty", params.frequency_penalty, std::abs(params.frequency_penalty) <= 2,
        "-2 to 2");
  check("presence_penalty", params.presence_penalty, std::abs(params.presence_penalty) <= 2,
        "-2 to 2");
  check("repetition_penalty", params.repetition_penalty,
        params.repetition_penalty > 0 && params.repetition_penalty <= 2,
        "above 0, at most 2 (1: none)");
  for (const auto& [id, bias] : params.logit_bias) {
    check_ids("logit_bias", {id}, limits.vocab_size);
    check("logit_bias", bias, true, "a finite number");
  }
  for (const std::string& text : params.stop) {
    TD_CHECK(!text.empty() && text.size() <= kMaxStopBytes,
             "sampling_params.stop: a text of {} bytes found, wanted 1 to {}", text.size(),
             kMaxStopBytes);
  }
  TD_CHECK(params.stop.empty() || limits.vocabulary != nullptr,
           "sampling_params.stop: this engine does not know the tokens' texts; send "
           "stop_token_ids");
}

}  // namespace

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
  check_sampling(request.params, limits);
  constexpr std::int64_t kMaxSamples = 1 << 16;
  TD_CHECK(request.n >= 1 && request.n <= kMaxSamples,
           "sampling_params.n: {} found, wanted 1 to {}", request.n, kMaxSamples);
  const std::int64_t capacity = limits.num_blocks * limits.block_tokens;
  TD_CHECK(max_kv_positions(request, limits) <= capacity,
           "sampling_params.max_new_tokens: prompt of {} and answer of up to {} tokens need more "
           "than the {} positions of the whole KV cache; lower it or give the engine more memory",
           prompt, request.params.max_new_tokens, capacity);
}

}  // namespace tandem
