// A conversation of several turns as samples to train on. Only ids that an engine sampled are ever
// trained, at the place where it sampled them; text is never tokenised again.
//
// A turn is the prompt that the engine was given and the answer it sampled. If the ids so far are
// the beginning of the next prompt, that turn continues the open sample: what the prompt adds (tool
// output, the next question) is context, mask 0. If not (a template that drops old thinking, a
// tokenizer that joins two sampled tokens), the open sample ends as it is and a new one begins with
// the prompt as it was given. So a mask can never lie over other tokens than those it was made for.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "data/sample.h"

namespace tandem {

struct Turn {
  std::vector<TokenId> prompt;                // all ids that the engine was given
  std::vector<TokenId> answer;                // sampled
  std::vector<float> log_probs;               // one per id of the answer
  std::vector<std::int64_t> weight_versions;  // one per id of the answer
};

class TurnJoiner {
 public:
  // Error if the numbers of ids, log-probabilities and versions differ or the prompt is empty.
  void add(const Turn& turn);

  // Samples so far, in order: tokens, response_length, loss_mask, log_probs, weight_versions.
  // Context inside a response has log-probability 0 and the version of the answer before it.
  const std::vector<Sample>& samples() const { return samples_; }
  std::int64_t num_mismatches() const { return num_mismatches_; }  // turns that began a new sample

 private:
  std::vector<Sample> samples_;
  std::int64_t num_mismatches_ = 0;
};

// The append-only way: the ids of the next prompt are the ids so far and `added`, the ids of the
// text by which the conversation grew; nothing before them is rendered or tokenised again.
std::vector<TokenId> append_only_prompt(const Turn& last, std::span<const TokenId> added);

// The text that `now` adds to `before`. Error naming the place where they part if `before` is not
// the beginning of `now`: such a template cannot be used append-only.
std::string_view added_text(std::string_view before, std::string_view now);

}  // namespace tandem
