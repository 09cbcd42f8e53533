// See turns.h.
#include "data/turns.h"

#include <algorithm>

#include "base/check.h"

namespace tandem {
namespace {

Sample sample_of_prompt(const std::vector<TokenId>& prompt) {
  Sample sample;
  sample.tokens = prompt;
  return sample;
}

void append(Sample& sample, TokenId id, float log_prob, std::int64_t version, bool trained) {
  sample.tokens.push_back(id);
  sample.log_probs.push_back(log_prob);
  sample.weight_versions.push_back(version);
  sample.loss_mask.push_back(trained ? 1 : 0);
  ++sample.response_length;
}

}  // namespace

void TurnJoiner::add(const Turn& turn) {
  TD_CHECK(!turn.prompt.empty(), "turn {}: its prompt is empty", samples_.size() + 1);
  TD_CHECK(turn.log_probs.size() == turn.answer.size() &&
               turn.weight_versions.size() == turn.answer.size(),
           "turn: {} ids sampled, {} log-probabilities, {} weight versions; wanted one each",
           turn.answer.size(), turn.log_probs.size(), turn.weight_versions.size());
  const bool continues =
      !samples_.empty() && samples_.back().tokens.size() <= turn.prompt.size() &&
      std::equal(samples_.back().tokens.begin(), samples_.back().tokens.end(), turn.prompt.begin());
  if (!continues) {
    num_mismatches_ += samples_.empty() ? 0 : 1;
    samples_.push_back(sample_of_prompt(turn.prompt));
  }
  Sample& open = samples_.back();
  const std::int64_t before = open.weight_versions.empty() ? 0 : open.weight_versions.back();
  for (std::size_t i = open.tokens.size(); i < turn.prompt.size(); ++i)
    append(open, turn.prompt[i], 0.0f, before, false);
  for (std::size_t i = 0; i < turn.answer.size(); ++i)
    append(open, turn.answer[i], turn.log_probs[i], turn.weight_versions[i], true);
}

std::vector<TokenId> append_only_prompt(const Turn& last, std::span<const TokenId> added) {
  std::vector<TokenId> prompt = last.prompt;
  prompt.insert(prompt.end(), last.answer.begin(), last.answer.end());
  prompt.insert(prompt.end(), added.begin(), added.end());
  return prompt;
}

std::string_view added_text(std::string_view before, std::string_view now) {
  const auto [place, other] = std::mismatch(before.begin(), before.end(), now.begin(), now.end());
  const auto at = static_cast<std::size_t>(place - before.begin());
  TD_CHECK(
      place == before.end(),
      "chat template: the conversation so far is rendered differently after another turn, from "
      "byte {} on: '{}' has become '{}'",
      at, before.substr(at, 40), now.substr(at, 40));
  return now.substr(before.size());
}

}  // namespace tandem
