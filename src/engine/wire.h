// The JSON of /generate, both ends in one file: what serve reads and answers, what client sends and
// reads. Field names are SGLang's; `sample_id` and `evaluation` are ours (the keys of sampling).
//
// A parameter that would change the answer and is not built is refused by name unless it has its
// default value; nothing is ignored silently. Log-probabilities cross as the shortest decimal of
// the float's double, so the f32 bits arrive as they left.
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "engine/request.h"

namespace tandem {

// Text at the engine's face; without it, prompts are token ids and answers carry no text.
struct TextHooks {
  std::function<std::vector<TokenId>(const std::string& text)> encode;
  std::function<std::string(std::span<const TokenId> ids, bool skip_special_tokens)> decode;
};

// Where names come from that a request leaves out.
struct RequestNames {
  std::uint64_t default_seed = 0;
  std::atomic<std::uint64_t> next_sample_id{0};
  std::atomic<std::uint64_t> next_rid{0};
};

struct GenerateCall {
  std::vector<GenerateRequest> requests;  // one per prompt; one n for all
  bool as_list = false;                   // answer with a list even for one sample
  bool return_logprob = false;
  bool skip_special_tokens = true;
  bool no_stop_trim = false;
  bool stream = false;  // answer by server-sent events
};

// The body of POST /generate. Throws Error beginning with the field. Without `sample_id` the ids
// are drawn from `names`; with `sampling_seed` alone they count from 0, so that a seed repeats.
GenerateCall parse_generate(const Json& body, const TextHooks& text, RequestNames& names);

// The answer: one object, or a list of prompts × n objects, samples of a prompt side by side.
Json generate_answer(const GenerateCall& call, std::span<const GenerateResult> results,
                     const TextHooks& text);

// One of them: sample `index` of prompt `i`.
Json sample_answer(const GenerateCall& call, std::size_t i, const GenerateResult& result,
                   std::size_t index, const TextHooks& text);

// An event of a stream before the sample's end, with all of it so far, as SGLang streams:
// finish_reason is null, `text` is missing without a vocabulary.
Json partial_answer(const GenerateCall& call, std::size_t i, const SampleResult& so_far,
                    std::size_t index, std::optional<std::string_view> text);

// The body for one request, always with return_logprob, sample_id and seed.
Json generate_body(const GenerateRequest& request);

// Reads the answer to generate_body. Throws Error beginning with `source` if it is not one, or if
// a sample's tokens, log-probabilities and versions differ in number.
std::vector<SampleResult> parse_generate_answer(const Json& answer, std::int64_t n,
                                                const std::string& source);

// A version as it stands in JSON, a decimal string; Error beginning with `source` if it is not one.
std::int64_t parse_weight_version(const std::string& text, const std::string& source);

}  // namespace tandem
