// The nouns that travel between engine, driver and trainer: prompt, sampling parameters, sample.
//
// A sample's id is a 64-bit running number: prompt counter × n_samples_per_prompt + i. Its random
// numbers are keyed by (seed, sample id, position in the generated tokens), so the same seed gives
// the same tokens whatever the batch, schedule or number of engines. Invariant of every sample:
// response_length == log_probs.size() == loss_mask.size() == weight_versions.size(), and tokens
// holds the prompt's ids followed by exactly the sampled ids (never re-tokenised).
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tandem {

using TokenId = std::int32_t;

// SGLang's sampling_params, in its spelling and with its defaults.
struct SamplingParams {
  std::int64_t max_new_tokens = 128;
  std::int64_t min_new_tokens = 0;  // before that nothing but a length ends an answer
  double temperature = 1.0;         // 0: greedy
  double top_p = 1.0;
  std::int64_t top_k = -1;  // -1: all
  double min_p = 0.0;       // of the largest probability
  // Of tokens that stand in the answer so far: by how often, by whether, and as a factor.
  double frequency_penalty = 0.0, presence_penalty = 0.0, repetition_penalty = 1.0;
  std::vector<std::pair<TokenId, double>> logit_bias;
  std::vector<std::string> stop;        // texts that end an answer
  std::vector<TokenId> stop_token_ids;  // beside the model's own EOS list
  bool ignore_eos = false;              // stop_token_ids too, as in SGLang
  std::uint64_t seed = 0;               // key of the sampling generator
  bool evaluation = false;              // evaluation draws from a key space of its own
};

enum class FinishReason { none, stop, length, abort };

enum class SampleStatus { pending, completed, truncated, aborted, failed };

struct Sample {
  std::uint64_t id = 0;
  std::uint64_t prompt_id = 0;  // samples of one prompt form a group
  std::vector<TokenId> tokens;  // prompt ids, then response ids
  std::int64_t response_length = 0;
  std::vector<float> log_probs;               // engine's, one per response token
  std::vector<std::uint8_t> loss_mask;        // 1: trained; one per response token
  std::vector<std::int64_t> weight_versions;  // version that sampled each response token
  std::string response;                       // text, for rewards and display only
  std::string label;                          // the prompt's
  double reward = 0.0;
  std::int64_t cached_tokens = 0;  // prompt tokens that the engine had not to compute for it
  std::map<std::string, double> reward_parts;  // the numbers of a reward that was an object
  std::string error;                           // of a failed sample: why it has no reward
  SampleStatus status = SampleStatus::pending;
  FinishReason finish = FinishReason::none;

  std::int64_t prompt_length() const {
    return static_cast<std::int64_t>(tokens.size()) - response_length;
  }
  std::int64_t loss_tokens() const {
    return std::count(loss_mask.begin(), loss_mask.end(), std::uint8_t{1});
  }
};

// One row of a prompt file, templated and tokenised.
struct Prompt {
  std::uint64_t row = 0;  // 0-based row in the file
  std::string text;       // the templated prompt
  std::string label;      // digits unchanged, whatever the JSON type
  std::string label_json = "null";  // as the file has it: what users' functions get
  std::string metadata_json = "{}";
  std::vector<TokenId> ids;
};

}  // namespace tandem
