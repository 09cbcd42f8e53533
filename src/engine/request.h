// What an engine is asked and what it answers, and the check that stands before the queue.
//
// A request is one prompt and n samples of it; the samples' ids are first_sample_id + i. All n come
// back in one result. Invariant of every SampleResult: output_ids, log_probs and versions have one
// length, also after abort, preemption and pause. No torch here: the HTTP face includes this file.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/sample.h"
#include "data/vocabulary.h"

namespace tandem {

// What one engine can serve; fixed at its start.
struct EngineLimits {
  std::int64_t num_blocks = 0;             // KV blocks of the pool
  std::int64_t block_tokens = 16;          // positions a block holds
  std::int64_t max_running = 256;          // samples that decode in one step
  std::int64_t max_prefill_tokens = 8192;  // prompt rows in one step
  std::int64_t context_length = 0;         // prompt + answer, in tokens
  std::int64_t vocab_size = 0;
  bool prefix_cache = true;            // changes no token and no log-probability
  std::vector<TokenId> eos_token_ids;  // ModelConfig::eos_ids
  // Null: this engine knows no texts, and requests with `stop` are refused.
  std::shared_ptr<const Vocabulary> vocabulary;
};

struct GenerateRequest {
  std::string rid;
  std::vector<TokenId> prompt;
  std::int64_t n = 1;
  std::uint64_t first_sample_id = 0;
  SamplingParams params;
};

struct SampleResult {
  std::vector<TokenId> output_ids;
  std::vector<float> log_probs;        // of each output id, at the request's temperature
  std::vector<std::int64_t> versions;  // weight version that sampled each output id
  FinishReason finish = FinishReason::none;
  TokenId matched_stop = -1;         // the id that ended it, when finish is stop
  std::string matched_text;          // or the text of `stop` that did; its tokens are kept
  std::int64_t num_preemptions = 0;  // how often its KV was dropped and computed again
  // Prompt tokens that were not computed for this sample: known beginnings, and the whole prompt
  // for all samples of a request but the first.
  std::int64_t cached_tokens = 0;
};

struct GenerateResult {
  std::string rid;
  std::int64_t prompt_tokens = 0;
  std::int64_t weight_version = 0;    // the engine's when the last sample ended
  std::vector<SampleResult> samples;  // [n], in order of sample id
};

// What becomes of the requests that an engine has when it is paused.
enum class PauseMode {
  abort,     // end every request with what it has
  retract,   // give all KV back, keep the tokens, compute the KV again after continue
  in_place,  // freeze as it is: the KV of the old weights stays in use
};

using GenerateCallback = std::function<void(GenerateResult)>;
// A token of sample `index` as soon as it is drawn.
using TokenCallback =
    std::function<void(std::int64_t index, TokenId token, float log_prob, std::int64_t version)>;

// KV positions that a sample of the request can come to hold (its last token is never written).
std::int64_t max_kv_positions(const GenerateRequest& request, const EngineLimits& limits);

// Throws Error beginning with the field's name (SGLang's spelling) when `limits` cannot serve the
// request: empty or too long prompt, id outside the vocabulary, a sampling parameter outside
// SGLang's range, n < 1, more KV than the whole pool. A prompt that fills the context exactly and
// max_new_tokens 0 are fine: they give an empty answer that finishes by length.
void check_request(const GenerateRequest& request, const EngineLimits& limits);

}  // namespace tandem
