// The JSON of /generate: what is read, what is refused and how it is said, and that an answer
// arrives as it left, bit for bit.
#include "engine/wire.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <random>

#include "base/check.h"

namespace tandem {
namespace {

GenerateCall parse(const std::string& text, const TextHooks& hooks = {}) {
  RequestNames names;
  return parse_generate(parse_json(text, "test"), hooks, names);
}

std::string refusal(const std::string& text) {
  try {
    parse(text);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Wire, ReadsOnePrompt) {
  const GenerateCall call = parse(R"({"input_ids": [1, 2, 3], "rid": "me", "return_logprob": true,
      "sample_id": 40, "evaluation": true,
      "sampling_params": {"n": 4, "max_new_tokens": 7, "temperature": 0.5, "stop_token_ids": [9],
                          "ignore_eos": true, "sampling_seed": 12345678901234567890}})");
  ASSERT_EQ(call.requests.size(), 1u);
  const GenerateRequest& request = call.requests[0];
  EXPECT_EQ(request.prompt, (std::vector<TokenId>{1, 2, 3}));
  EXPECT_EQ(request.rid, "me");
  EXPECT_EQ(request.n, 4);
  EXPECT_EQ(request.first_sample_id, 40u);
  EXPECT_EQ(request.params.max_new_tokens, 7);
  EXPECT_EQ(request.params.temperature, 0.5);
  EXPECT_EQ(request.params.stop_token_ids, std::vector<TokenId>{9});
  EXPECT_TRUE(request.params.ignore_eos);
  EXPECT_TRUE(request.params.evaluation);
  EXPECT_EQ(request.params.seed, 12345678901234567890u);
  EXPECT_TRUE(call.return_logprob);
  EXPECT_TRUE(call.as_list);
}

TEST(Wire, DefaultsAreThoseOfSglang) {
  const GenerateCall call =
      parse(R"({"input_ids": [1], "sampling_params": {"temperature": null}})");
  EXPECT_EQ(call.requests[0].params.max_new_tokens, 128);
  EXPECT_EQ(call.requests[0].params.temperature, 1.0);
  EXPECT_EQ(call.requests[0].n, 1);
  EXPECT_FALSE(call.as_list);
  EXPECT_FALSE(call.return_logprob);
  EXPECT_EQ(parse(R"({"input_ids": [1], "sampling_params": {"temperature": 1e-7}})")
                .requests[0]
                .params.temperature,
            0.0);
}

TEST(Wire, ReadsABatch) {
  const GenerateCall call = parse(R"({"input_ids": [[1, 2], [3]], "sample_id": [8, 16],
      "rid": ["a", "b"],
      "sampling_params": [{"n": 2, "max_new_tokens": 1}, {"n": 2, "max_new_tokens": 2}]})");
  ASSERT_EQ(call.requests.size(), 2u);
  EXPECT_EQ(call.requests[1].prompt, std::vector<TokenId>{3});
  EXPECT_EQ(call.requests[1].first_sample_id, 16u);
  EXPECT_EQ(call.requests[1].rid, "b");
  EXPECT_EQ(call.requests[0].params.max_new_tokens, 1);
  EXPECT_EQ(call.requests[1].params.max_new_tokens, 2);
}

TEST(Wire, SampleIdsAreNeverUsedTwiceUnlessASeedAsksForIt) {
  RequestNames names;
  const Json body = parse_json(R"({"input_ids": [[1], [2]], "sampling_params": {"n": 3}})", "test");
  const GenerateCall first = parse_generate(body, {}, names);
  const GenerateCall second = parse_generate(body, {}, names);
  EXPECT_EQ(first.requests[0].first_sample_id, 0u);
  EXPECT_EQ(first.requests[1].first_sample_id, 3u);
  EXPECT_EQ(second.requests[0].first_sample_id, 6u);
  EXPECT_NE(first.requests[0].rid, second.requests[0].rid);
  const Json seeded =
      parse_json(R"({"input_ids": [1], "sampling_params": {"sampling_seed": 5}})", "test");
  EXPECT_EQ(parse_generate(seeded, {}, names).requests[0].first_sample_id, 0u);
}

TEST(Wire, AcceptsDefaultsOfWhatIsNotBuilt) {
  EXPECT_EQ(refusal(R"({"input_ids": [1], "stream": false, "lora_path": null, "image_data": [],
      "return_routed_experts": false, "logprob_start_len": -1, "priority": 3,
      "sampling_params": {"stop": null, "stop_regex": null, "json_schema": null, "regex": null,
        "logit_bias": null, "spaces_between_special_tokens": true}})"),
            "");
}

TEST(Wire, ReadsAllOfSampling) {
  const GenerateCall call = parse(R"({"input_ids": [1], "sampling_params": {
      "min_new_tokens": 3, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "frequency_penalty": 0.5,
      "presence_penalty": -0.25, "repetition_penalty": 1.1, "logit_bias": {"7": -1.5, "12": 2},
      "stop": ["\n\n", "é"], "skip_special_tokens": false, "no_stop_trim": true}})");
  const SamplingParams& params = call.requests[0].params;
  EXPECT_EQ(params.min_new_tokens, 3);
  EXPECT_EQ(params.top_p, 0.9);
  EXPECT_EQ(params.top_k, 20);
  EXPECT_EQ(params.min_p, 0.05);
  EXPECT_EQ(params.frequency_penalty, 0.5);
  EXPECT_EQ(params.presence_penalty, -0.25);
  EXPECT_EQ(params.repetition_penalty, 1.1);
  auto bias = params.logit_bias;
  std::sort(bias.begin(), bias.end());
  EXPECT_EQ(bias, (std::vector<std::pair<TokenId, double>>{{7, -1.5}, {12, 2.0}}));
  EXPECT_EQ(params.stop, (std::vector<std::string>{"\n\n", "é"}));
  EXPECT_FALSE(call.skip_special_tokens);
  EXPECT_TRUE(call.no_stop_trim);
  // What the client sends is what the engine reads.
  const Json body = parse_json(dump_json(generate_body(call.requests[0])), "body");
  RequestNames names;
  const SamplingParams again = parse_generate(body, {}, names).requests[0].params;
  EXPECT_EQ(again.logit_bias.size(), 2u);
  EXPECT_EQ(again.stop, params.stop);
  EXPECT_EQ(again.top_p, params.top_p);
  EXPECT_EQ(again.presence_penalty, params.presence_penalty);
  EXPECT_EQ(parse(R"({"input_ids": [1], "sampling_params": {"stop": "x", "top_k": 1073741824}})")
                .requests[0]
                .params.stop,
            std::vector<std::string>{"x"});
}

TEST(Wire, RefusesByName) {
  struct Case {
    const char* body;
    const char* start;
  };
  const std::vector<Case> cases = {
      {R"([1])", "body: array"},
      {R"({})", "input_ids: missing"},
      {R"({"text": "hi"})", "text: this engine has no tokenizer"},
      {R"({"text": "hi", "input_ids": [1]})", "text: found beside input_ids"},
      {R"({"input_ids": "hi"})", "input_ids: found \"hi\""},
      {R"({"input_ids": [1.5]})", "input_ids: found 1.5"},
      {R"({"input_ids": [1, [2]]})", "input_ids: found [2]"},
      {R"({"input_ids": [3000000000]})", "input_ids: found 3000000000"},
      {R"({"input_ids": [1], "stream": 1})", "body: stream: found 1"},
      {R"({"input_ids": [1], "lora_path": "x"})", "lora_path:"},
      {R"({"input_ids": [1], "logprob_start_len": 0})", "logprob_start_len: 0"},
      {R"({"input_ids": [1], "max_new_tokens": 4})", "max_new_tokens: unknown field"},
      {R"({"input_ids": [1], "top_logprobs_num": 2})", "top_logprobs_num: 2"},
      {R"({"input_ids": [1], "sampling_params": {"top_k": 1.5}})", "sampling_params.top_k: found"},
      {R"({"input_ids": [1], "sampling_params": {"stop": [1]}})", "sampling_params.stop: found 1"},
      {R"({"input_ids": [1], "sampling_params": {"logit_bias": {"x": 1}}})",
       "sampling_params.logit_bias: key 'x'"},
      {R"({"input_ids": [1], "sampling_params": {"stop_regex": "a*"}})",
       "sampling_params.stop_regex:"},
      {R"({"input_ids": [1], "sampling_params": {"json_schema": "{}"}})",
       "sampling_params.json_schema:"},
      {R"({"input_ids": [1], "sampling_params": {"regex": "a*"}})", "sampling_params.regex:"},
      {R"({"input_ids": [1], "sampling_params": {"tempereture": 1}})",
       "sampling_params.tempereture: unknown field"},
      {R"({"input_ids": [1], "sampling_params": {"max_new_tokens": "8"}})",
       "sampling_params.max_new_tokens: found \"8\""},
      {R"({"input_ids": [1], "sampling_params": {"sampling_seed": -1}})",
       "sampling_params.sampling_seed: found -1"},
      {R"({"input_ids": [1], "sampling_params": [{}]})", "sampling_params: array"},
      {R"({"input_ids": [[1], [2]], "sampling_params": [{}]})", "sampling_params: a list of 1"},
      {R"({"input_ids": [[1], [2]], "sampling_params": [{"n": 1}, {"n": 2}]})",
       "sampling_params.n: 1 and 2"},
      {R"({"input_ids": [[1], [2]], "sample_id": 3})", "sample_id: one number"},
      {R"({"input_ids": [[1], [2]], "rid": "x"})", "rid: one name"},
      {R"({"input_ids": [1], "sample_id": -3})", "sample_id: found -3"},
  };
  for (const Case& c : cases) {
    EXPECT_TRUE(refusal(c.body).starts_with(c.start)) << c.body << "\n" << refusal(c.body);
  }
}

TEST(Wire, TextGoesThroughTheHooks) {
  const TextHooks hooks = {
      .encode = [](const std::string& text) { return std::vector<TokenId>(text.size(), 7); },
      .decode = [](std::span<const TokenId> ids, bool) { return std::string(ids.size(), 'x'); }};
  const GenerateCall call = parse(R"({"text": ["ab", "c"]})", hooks);
  ASSERT_EQ(call.requests.size(), 2u);
  EXPECT_EQ(call.requests[0].prompt, (std::vector<TokenId>{7, 7}));
  std::vector<GenerateResult> results(2);
  results[0].samples.resize(1);
  results[1].samples.resize(1);
  results[1].samples[0].output_ids = {1, 2, 3};
  results[1].samples[0].log_probs = {0, 0, 0};
  results[1].samples[0].versions = {0, 0, 0};
  const Json answer = generate_answer(call, results, hooks);
  EXPECT_EQ(answer[0]["text"], "");
  EXPECT_EQ(answer[1]["text"], "xxx");
}

// One answer of all ends, with versions that change inside, through text and back.
TEST(Wire, AnswerArrivesBitForBit) {
  GenerateRequest request;
  request.rid = "r";
  request.prompt = {5, 6};
  request.n = 3;
  request.first_sample_id = 0xFFFFFFFFFFFFFFF0u;
  request.params.seed = 0xFFFFFFFFFFFFFFFFu;
  request.params.temperature = 0.1;
  const Json body = parse_json(dump_json(generate_body(request)), "body");
  RequestNames names;
  const GenerateCall call = parse_generate(body, {}, names);
  EXPECT_EQ(call.requests[0].first_sample_id, request.first_sample_id);
  EXPECT_EQ(call.requests[0].params.seed, request.params.seed);
  EXPECT_EQ(call.requests[0].params.temperature, 0.1);

  std::mt19937 random(3);
  GenerateResult result;
  result.prompt_tokens = 2;
  result.weight_version = 12;
  result.samples.resize(3);
  SampleResult& first = result.samples[0];
  for (int i = 0; i < 5000; ++i) {
    const auto bits = static_cast<std::uint32_t>((random() & 0x7FFFFFu) |
                                                 ((100u + random() % 33) << 23) | 0x80000000u);
    first.output_ids.push_back(static_cast<TokenId>(random() % 50000));
    first.log_probs.push_back(std::bit_cast<float>(bits));
    first.versions.push_back(i < 2000 ? 11 : 12);
  }
  first.log_probs[0] = 0.0f;
  first.log_probs[1] = std::numeric_limits<float>::lowest();
  first.log_probs[2] = -std::numeric_limits<float>::denorm_min();
  first.finish = FinishReason::stop;
  first.matched_stop = 4;
  result.samples[1].finish = FinishReason::length;
  result.samples[2] = first;
  result.samples[2].finish = FinishReason::abort;

  const Json answer = parse_json(dump_json(generate_answer(call, {&result, 1}, {})), "answer");
  const Json& meta = answer[0]["meta_info"];
  EXPECT_EQ(meta["id"], "r_0");
  EXPECT_EQ(meta["finish_reason"], (Json{{"type", "stop"}, {"matched", 4}}));
  EXPECT_EQ(meta["prompt_tokens"], 2);
  EXPECT_EQ(meta["completion_tokens"], 5000);
  EXPECT_EQ(meta["cached_tokens"], 0);
  EXPECT_EQ(meta["weight_version"], "12");
  EXPECT_EQ(meta["weight_versions"], Json::parse(R"([{"version": "11", "start": 0, "end": 2000},
                            {"version": "12", "start": 2000, "end": 5000}])"));
  EXPECT_EQ(answer[1]["meta_info"]["finish_reason"], (Json{{"type", "length"}, {"length", 0}}));
  const std::vector<SampleResult> samples = parse_generate_answer(answer, 3, "answer");
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(samples[i].output_ids, result.samples[i].output_ids);
    EXPECT_EQ(samples[i].log_probs, result.samples[i].log_probs);
    EXPECT_EQ(samples[i].versions, result.samples[i].versions);
    EXPECT_EQ(samples[i].finish, result.samples[i].finish);
  }
  EXPECT_EQ(samples[0].matched_stop, 4);
}

// C32: what ended an answer leaves its text, never its ids or log-probabilities.
TEST(Wire, TrimsTheStopFromTheTextAlone) {
  TextHooks hooks;
  hooks.decode = [](std::span<const TokenId> ids, bool) {
    std::string text;
    for (const TokenId id : ids) text += static_cast<char>('a' + id);
    return text;
  };
  struct Case {
    const char* name;
    TokenId stop_id;
    const char* stop_text;
    bool keep;
    const char* text;
    Json matched;
  };
  const std::vector<Case> cases = {
      {"a token", 3, "", false, "abc", 3},
      {"a token, kept", 3, "", true, "abcd", 3},
      {"a text", -1, "bc", false, "a", "bc"},
      {"a text, kept", -1, "bc", true, "abcd", "bc"},
  };
  for (const Case& c : cases) {
    GenerateCall call;
    call.requests.resize(1);
    call.return_logprob = true;
    call.no_stop_trim = c.keep;
    GenerateResult result;
    result.samples.push_back({.output_ids = {0, 1, 2, 3},
                              .log_probs = {-1, -2, -3, -4},
                              .versions = {0, 0, 0, 0},
                              .finish = FinishReason::stop,
                              .matched_stop = c.stop_id,
                              .matched_text = c.stop_text});
    const Json answer = generate_answer(call, {&result, 1}, hooks);
    EXPECT_EQ(answer["text"], c.text) << c.name;
    EXPECT_EQ(answer["output_ids"].size(), 4u) << c.name;
    EXPECT_EQ(answer["meta_info"]["output_token_logprobs"].size(), 4u) << c.name;
    EXPECT_EQ(answer["meta_info"]["completion_tokens"], 4) << c.name;
    EXPECT_EQ(answer["meta_info"]["finish_reason"]["matched"], c.matched) << c.name;
    const auto samples = parse_generate_answer(answer, 1, "test");
    EXPECT_EQ(samples[0].matched_text, c.stop_text) << c.name;
    EXPECT_EQ(samples[0].matched_stop, c.stop_id) << c.name;
  }
}

TEST(Wire, RefusesAnswersThatDoNotAddUp) {
  const auto fault = [](const std::string& text, std::int64_t n) -> std::string {
    try {
      parse_generate_answer(parse_json(text, "engine"), n, "engine");
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const std::string head = R"({"meta_info": {"finish_reason": {"type": "length"}, )";
  const std::string whole = head + R"("output_token_logprobs": [[-1.0, 3, null]],
                "weight_versions": [{"version": "1", "start": 0, "end": 1}]}})";
  EXPECT_EQ(fault(whole, 1), "");
  EXPECT_EQ(fault(whole, 2), "engine: 1 samples found, wanted 2");
  EXPECT_NE(
      fault(head + R"("output_token_logprobs": [[-1.0, 3, null]], "weight_versions": []}})", 1),
      "");
  EXPECT_NE(fault(head + R"("output_token_logprobs": [], "weight_versions":
                            [{"version": "1", "start": 0, "end": 1}]}})",
                  1),
            "");
  EXPECT_NE(fault(R"({"error": 1})", 1), "");
  EXPECT_NE(fault(head + R"("output_token_logprobs": [[null, 3, null]], "weight_versions":
                            [{"version": "1", "start": 0, "end": 1}]}})",
                  1)
                .find("not finite"),
            std::string::npos);
}

}  // namespace
}  // namespace tandem
