// SGLang's /generate in JSON: request in, answer out, and the same from the client's side.
#include "engine/wire.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "base/check.h"
#include "base/text.h"

namespace tandem {
namespace {

// A field that is known but not built: accepted with one of these values only.
struct DefaultOnly {
  const char* name;
  std::vector<Json> values;
};

bool holds_default(const Json& value, const std::vector<Json>& values) {
  return value.is_null() || std::find(values.begin(), values.end(), value) != values.end();
}

void check_fields(const Json& object, const std::string& prefix,
                  const std::vector<std::string>& honoured,
                  const std::vector<DefaultOnly>& default_only) {
  for (const auto& [name, value] : object.items()) {
    if (std::find(honoured.begin(), honoured.end(), name) != honoured.end()) continue;
    const auto known = std::find_if(default_only.begin(), default_only.end(),
                                    [&](const DefaultOnly& f) { return name == f.name; });
    TD_CHECK(known != default_only.end(),
             "{}{}: unknown field; wanted one of SGLang's, see the documentation of /generate",
             prefix, name);
    TD_CHECK(holds_default(value, known->values),
             "{}{}: {} found; this engine honours only the default ({}) so far; leave it out",
             prefix, name, dump_json(value),
             known->values.empty() ? "null" : dump_json(known->values.front()));
  }
}

void check_sampling_fields(const Json& params) {
  static const std::vector<std::string> kHonoured = {
      "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p",
      "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "n", "stop",
      "stop_token_ids", "ignore_eos", "sampling_seed", "skip_special_tokens", "no_stop_trim",
      // Texts have no spaces of their own between special tokens.
      "spaces_between_special_tokens", "stream_interval"};
  static const std::vector<DefaultOnly> kDefaultOnly = {
      {"stop_regex", {Json::array(), ""}},
      {"json_schema", {}},
      {"regex", {}},
      {"ebnf", {}},
      {"structural_tag", {}},
      {"custom_params", {Json::object()}},
  };
  check_fields(params, "sampling_params.", kHonoured, kDefaultOnly);
}

void check_request_fields(const Json& body) {
  static const std::vector<std::string> kHonoured = {
      "input_ids", "text", "sampling_params", "rid", "return_logprob", "stream", "sample_id",
      "evaluation",
      // These choose order, route or cache, never the tokens.
      "priority", "routing_key", "extra_key", "cache_salt", "data_parallel_rank", "routed_dp_rank"};
  static const std::vector<DefaultOnly> kDefaultOnly = {
      {"input_embeds", {}},
      {"image_data", {Json::array()}},
      {"video_data", {Json::array()}},
      {"audio_data", {Json::array()}},
      {"logprob_start_len", {-1}},
      {"top_logprobs_num", {0}},
      {"token_ids_logprob", {Json::array()}},
      {"return_text_in_logprobs", {false}},
      {"return_hidden_states", {false}},
      {"return_routed_experts", {false}},
      {"routed_experts_start_len", {0}},
      {"return_indexer_topk", {false}},
      {"return_prompt_token_ids", {false}},
      {"return_entropy", {false}},
      {"return_sampling_mask", {false}},
      {"session_params", {Json::object()}},
      {"lora_path", {}},
      {"lora_id", {}},
      {"custom_logit_processor", {}},
      {"bootstrap_host", {}},
      {"bootstrap_port", {}},
      {"bootstrap_room", {}},
  };
  check_fields(body, "", kHonoured, kDefaultOnly);
}

const Json* find_value(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

// The prompts, and whether the field held a list of them.
std::vector<std::vector<TokenId>> read_prompts(const Json& body, const TextHooks& text,
                                               bool& is_batch) {
  const Json* ids = find_value(body, "input_ids");
  const Json* words = find_value(body, "text");
  TD_CHECK(ids == nullptr || words == nullptr, "text: found beside input_ids; send one of them");
  if (ids != nullptr) {
    is_batch = ids->is_array() && !ids->empty() && ids->front().is_array();
    if (!is_batch) return {read_value<std::vector<TokenId>>(*ids, "input_ids")};
    return read_value<std::vector<std::vector<TokenId>>>(*ids, "input_ids");
  }
  TD_CHECK(words != nullptr, "input_ids: missing; send a list of token ids, or a list of lists");
  TD_CHECK(text.encode != nullptr,
           "text: this engine has no tokenizer; send the prompt as token ids in input_ids");
  is_batch = words->is_array();
  std::vector<std::vector<TokenId>> prompts;
  if (!is_batch) return {text.encode(read_value<std::string>(*words, "text"))};
  TD_CHECK(!words->empty() || !is_batch, "text: an empty list found, wanted at least one prompt");
  for (const auto& item : read_value<std::vector<std::string>>(*words, "text")) {
    prompts.push_back(text.encode(item));
  }
  return prompts;
}

// Item i of a field that is one value for all prompts or a list with one for each.
const Json& per_prompt(const Json& value, std::size_t i, std::size_t num_prompts,
                       const char* name) {
  if (!value.is_array()) return value;
  TD_CHECK(value.size() == num_prompts, "{}: a list of {} found for {} prompts; send one for each",
           name, value.size(), num_prompts);
  return value[i];
}

// SGLang's number for "no top_k".
constexpr std::int64_t kAllTokens = 1 << 30;

// {"15": -2.5, …}: token ids as keys.
void read_logit_bias(const Json& json, SamplingParams& params) {
  const std::string where = "sampling_params.logit_bias";
  TD_CHECK(json.is_object(), "{}: {} found, wanted an object of token ids", where,
           json.type_name());
  for (const auto& [key, bias] : json.items()) {
    const auto id = parse_int(key);
    TD_CHECK(id && *id >= 0 && *id <= INT32_MAX, "{}: key '{}' found, wanted a token id", where,
             key);
    params.logit_bias.emplace_back(static_cast<TokenId>(*id), read_value<double>(bias, where));
  }
}

void read_sampling(const Json& params, GenerateRequest& request, bool& has_seed) {
  TD_CHECK(params.is_object(), "sampling_params: {} found, wanted an object", dump_json(params));
  check_sampling_fields(params);
  SamplingParams& out = request.params;
  const auto read = [&]<class T>(const char* name, T& value) {
    const Json* found = find_value(params, name);
    if (found != nullptr) value = read_value<T>(*found, std::string("sampling_params.") + name);
    return found != nullptr;
  };
  read("max_new_tokens", out.max_new_tokens);
  read("min_new_tokens", out.min_new_tokens);
  read("temperature", out.temperature);
  // SGLang's threshold for greedy.
  if (out.temperature >= 0 && out.temperature < 1e-6) out.temperature = 0;
  read("top_p", out.top_p);
  read("top_k", out.top_k);
  if (out.top_k >= kAllTokens) out.top_k = -1;
  read("min_p", out.min_p);
  read("frequency_penalty", out.frequency_penalty);
  read("presence_penalty", out.presence_penalty);
  read("repetition_penalty", out.repetition_penalty);
  if (const Json* bias = find_value(params, "logit_bias")) read_logit_bias(*bias, out);
  if (const Json* stop = find_value(params, "stop")) {
    if (stop->is_string()) {
      if (!stop->get_ref<const std::string&>().empty()) out.stop = {stop->get<std::string>()};
    } else {
      out.stop = read_value<std::vector<std::string>>(*stop, "sampling_params.stop");
    }
  }
  read("stop_token_ids", out.stop_token_ids);
  read("ignore_eos", out.ignore_eos);
  read("n", request.n);
  has_seed = read("sampling_seed", out.seed);
}

void read_names(const Json& body, bool is_batch, std::size_t i, std::size_t num_prompts,
                bool has_seed, RequestNames& names, GenerateRequest& request) {
  if (const Json* rid = find_value(body, "rid")) {
    TD_CHECK(!is_batch || rid->is_array(), "rid: one name for a batch; send a list with {} names",
             num_prompts);
    request.rid = read_value<std::string>(per_prompt(*rid, i, num_prompts, "rid"), "rid");
  } else {
    request.rid = fmt::format("{:016x}", names.next_rid.fetch_add(1));
  }
  if (const Json* id = find_value(body, "sample_id")) {
    TD_CHECK(!is_batch || id->is_array(),
             "sample_id: one number for a batch; send a list with {} first ids", num_prompts);
    request.first_sample_id =
        read_value<std::uint64_t>(per_prompt(*id, i, num_prompts, "sample_id"), "sample_id");
  } else if (!has_seed && request.n > 0) {
    request.first_sample_id = names.next_sample_id.fetch_add(static_cast<std::uint64_t>(request.n));
  }
}

Json finish_json(const SampleResult& sample) {
  switch (sample.finish) {
    case FinishReason::stop:
      if (!sample.matched_text.empty()) {
        return {{"type", "stop"}, {"matched", sample.matched_text}};
      }
      return {{"type", "stop"}, {"matched", sample.matched_stop}};
    case FinishReason::abort:
      return {{"type", "abort"}, {"message", "Abort in progress"}};
    case FinishReason::length:
    case FinishReason::none:
      break;
  }
  return {{"type", "length"}, {"length", sample.output_ids.size()}};
}

// Runs of equal versions as half-open ranges over the output tokens.
Json version_spans(const std::vector<std::int64_t>& versions) {
  Json spans = Json::array();
  for (std::size_t begin = 0; begin < versions.size();) {
    std::size_t end = begin;
    while (end < versions.size() && versions[end] == versions[begin]) ++end;
    spans.push_back({{"version", std::to_string(versions[begin])}, {"start", begin}, {"end", end}});
    begin = end;
  }
  return spans;
}

// The answer's text as SGLang shows it: unless no_stop_trim, without what ended it. The ids and
// their log-probabilities are whole in any case.
std::string sample_text(const GenerateCall& call, const SampleResult& sample,
                        const TextHooks& text) {
  std::span<const TokenId> ids(sample.output_ids);
  const bool trims = !call.no_stop_trim && sample.finish == FinishReason::stop;
  if (trims && sample.matched_text.empty()) ids = ids.first(ids.size() - 1);
  std::string decoded = text.decode(ids, call.skip_special_tokens);
  if (trims && !sample.matched_text.empty()) {
    decoded = decoded.substr(0, decoded.find(sample.matched_text));
  }
  return decoded;
}

std::string sample_name(const GenerateRequest& request, std::size_t index) {
  return request.n == 1 ? request.rid : fmt::format("{}_{}", request.rid, index);
}

// [log-probability, id, null] of each token; the third place is a text that clients may ask for.
Json log_prob_list(const SampleResult& sample) {
  Json list = Json::array();
  for (std::size_t t = 0; t < sample.output_ids.size(); ++t) {
    list.push_back(
        Json::array({static_cast<double>(sample.log_probs[t]), sample.output_ids[t], nullptr}));
  }
  return list;
}

FinishReason read_finish(const Json& meta, const std::string& source, SampleResult& sample) {
  const Json reason = require<Json>(meta, "finish_reason", source);
  const auto type = require<std::string>(reason, "type", source);
  if (type == "stop") {
    const Json* matched = find_value(reason, "matched");
    if (matched != nullptr && matched->is_string()) {
      sample.matched_text = matched->get<std::string>();
    } else {
      sample.matched_stop = optional_key<TokenId>(reason, "matched", source, -1);
    }
    return FinishReason::stop;
  }
  if (type == "abort") return FinishReason::abort;
  TD_CHECK(type == "length", "{}: finish_reason '{}' found, wanted stop, length or abort", source,
           type);
  return FinishReason::length;
}

SampleResult read_sample(const Json& answer, const std::string& source) {
  SampleResult sample;
  const Json meta = require<Json>(answer, "meta_info", source);
  sample.finish = read_finish(meta, source, sample);
  sample.num_preemptions = optional_key<std::int64_t>(meta, "num_retractions", source, 0);
  sample.cached_tokens = optional_key<std::int64_t>(meta, "cached_tokens", source, 0);
  for (const Json& item : require<Json>(meta, "output_token_logprobs", source)) {
    TD_CHECK(item.is_array() && item.size() >= 2,
             "{}: output_token_logprobs: {} found, wanted [log-probability, id, text]", source,
             dump_json(item));
    // JSON has no NaN: null stands for it.
    TD_CHECK(!item[0].is_null(),
             "{}: the log-probability of a sampled token is not a number, since the model's logits "
             "are not finite; if `tandem selftest` says the same of --hf-checkpoint, its weights "
             "are damaged, else they ran away in training: lower --lr and go on from a checkpoint "
             "before that (--ckpt-step)",
             source);
    sample.log_probs.push_back(
        static_cast<float>(read_value<double>(item[0], source + ": output_token_logprobs")));
    sample.output_ids.push_back(read_value<TokenId>(item[1], source + ": output_token_logprobs"));
  }
  for (const Json& span : require<Json>(meta, "weight_versions", source)) {
    const auto begin = require<std::uint64_t>(span, "start", source);
    const auto end = require<std::uint64_t>(span, "end", source);
    const auto version = require<std::string>(span, "version", source);
    TD_CHECK(begin == sample.versions.size() && end >= begin && end <= sample.output_ids.size(),
             "{}: weight_versions: {} found, wanted ranges that follow each other over {} tokens",
             source, dump_json(span), sample.output_ids.size());
    sample.versions.resize(end, parse_weight_version(version, source));
  }
  TD_CHECK(sample.versions.size() == sample.output_ids.size(),
           "{}: {} output tokens and {} weight versions found, wanted one for each token", source,
           sample.output_ids.size(), sample.versions.size());
  return sample;
}

}  // namespace

std::int64_t parse_weight_version(const std::string& text, const std::string& source) {
  std::int64_t version = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), version);
  TD_CHECK(error == std::errc() && end == text.data() + text.size() && version >= 0,
           "{}: weight version '{}' found, wanted a number from 0", source, text);
  return version;
}

GenerateCall parse_generate(const Json& body, const TextHooks& text, RequestNames& names) {
  TD_CHECK(body.is_object(), "body: {} found, wanted a JSON object with input_ids",
           body.type_name());
  check_request_fields(body);
  GenerateCall call;
  bool is_batch = false;
  std::vector<std::vector<TokenId>> prompts = read_prompts(body, text, is_batch);
  const auto evaluation = optional_key<bool>(body, "evaluation", "body", false);
  call.return_logprob = optional_key<bool>(body, "return_logprob", "body", false);
  call.stream = optional_key<bool>(body, "stream", "body", false);
  const Json* params = find_value(body, "sampling_params");
  TD_CHECK(params == nullptr || is_batch || params->is_object(),
           "sampling_params: {} found for one prompt, wanted an object", params->type_name());
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    GenerateRequest request;
    request.params.seed = names.default_seed;
    request.params.evaluation = evaluation;
    bool has_seed = false;
    if (params != nullptr) {
      const Json& own = per_prompt(*params, i, prompts.size(), "sampling_params");
      read_sampling(own, request, has_seed);
      if (i == 0) {
        call.skip_special_tokens =
            optional_key<bool>(own, "skip_special_tokens", "sampling_params", true);
        call.no_stop_trim = optional_key<bool>(own, "no_stop_trim", "sampling_params", false);
      }
    }
    TD_CHECK(i == 0 || request.n == call.requests.front().n,
             "sampling_params.n: {} and {} found in one batch; send one n for all prompts",
             call.requests.front().n, request.n);
    read_names(body, is_batch, i, prompts.size(), has_seed, names, request);
    request.prompt = std::move(prompts[i]);
    call.requests.push_back(std::move(request));
  }
  call.as_list = is_batch || (!call.requests.empty() && call.requests.front().n != 1);
  return call;
}

Json sample_answer(const GenerateCall& call, std::size_t i, const GenerateResult& result,
                   std::size_t index, const TextHooks& text) {
  const SampleResult& sample = result.samples[index];
  Json meta = {{"id", sample_name(call.requests[i], index)},
               {"finish_reason", finish_json(sample)},
               {"prompt_tokens", result.prompt_tokens},
               {"completion_tokens", sample.output_ids.size()},
               {"cached_tokens", sample.cached_tokens},
               {"num_retractions", sample.num_preemptions},
               {"weight_version", std::to_string(result.weight_version)},
               {"weight_versions", version_spans(sample.versions)}};
  if (call.return_logprob) meta["output_token_logprobs"] = log_prob_list(sample);
  Json json = {{"output_ids", sample.output_ids}, {"meta_info", std::move(meta)}};
  if (text.decode) json["text"] = sample_text(call, sample, text);
  if (call.stream) json["index"] = index;
  return json;
}

Json partial_answer(const GenerateCall& call, std::size_t i, const SampleResult& so_far,
                    std::size_t index, std::optional<std::string_view> text) {
  const GenerateRequest& request = call.requests[i];
  Json meta = {{"id", sample_name(request, index)},
               {"finish_reason", nullptr},
               {"prompt_tokens", request.prompt.size()},
               {"completion_tokens", so_far.output_ids.size()},
               {"weight_version", std::to_string(so_far.versions.back())}};
  if (call.return_logprob) meta["output_token_logprobs"] = log_prob_list(so_far);
  Json json = {{"output_ids", so_far.output_ids}, {"meta_info", std::move(meta)}, {"index", index}};
  if (text) json["text"] = *text;
  return json;
}

Json generate_answer(const GenerateCall& call, std::span<const GenerateResult> results,
                     const TextHooks& text) {
  Json list = Json::array();
  for (std::size_t r = 0; r < results.size(); ++r) {
    for (std::size_t i = 0; i < results[r].samples.size(); ++i) {
      list.push_back(sample_answer(call, r, results[r], i, text));
    }
  }
  if (call.as_list) return list;
  return std::move(list.front());
}

Json generate_body(const GenerateRequest& request) {
  const SamplingParams& params = request.params;
  Json bias = Json::object();
  for (const auto& [id, value] : params.logit_bias) bias[std::to_string(id)] = value;
  return {{"input_ids", request.prompt},
          {"rid", request.rid},
          {"return_logprob", true},
          {"sample_id", request.first_sample_id},
          {"evaluation", params.evaluation},
          {"sampling_params",
           {{"n", request.n},
            {"max_new_tokens", params.max_new_tokens},
            {"min_new_tokens", params.min_new_tokens},
            {"temperature", params.temperature},
            {"top_p", params.top_p},
            {"top_k", params.top_k},
            {"min_p", params.min_p},
            {"frequency_penalty", params.frequency_penalty},
            {"presence_penalty", params.presence_penalty},
            {"repetition_penalty", params.repetition_penalty},
            {"logit_bias", std::move(bias)},
            {"stop", params.stop},
            {"stop_token_ids", params.stop_token_ids},
            {"ignore_eos", params.ignore_eos},
            {"sampling_seed", params.seed}}}};
}

std::vector<SampleResult> parse_generate_answer(const Json& answer, std::int64_t n,
                                                const std::string& source) {
  std::vector<SampleResult> samples;
  if (answer.is_array()) {
    for (const Json& item : answer) samples.push_back(read_sample(item, source));
  } else {
    samples.push_back(read_sample(answer, source));
  }
  TD_CHECK(static_cast<std::int64_t>(samples.size()) == n, "{}: {} samples found, wanted {}",
           source, samples.size(), n);
  return samples;
}

}  // namespace tandem
