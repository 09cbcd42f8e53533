// `tandem generate` and `tandem serve`: the engine without a trainer, in one process.
#include <csignal>
#include <cstdio>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "base/clock.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "cli/texts.h"
#include "cli/usage.h"
#include "config/resolve.h"
#include "engine/serve.h"
#include "rank/compute_queue.h"
#include "rank/worker.h"

namespace tandem {
namespace {

std::atomic<bool> stop_asked{false};

// KV room: what the config asks for, else max_running_requests of the longest request.
std::int64_t kv_tokens(const EngineConfig& config, std::int64_t longest) {
  return config.kv_cache_tokens.value_or(config.max_running_requests *
                                         (round_up(longest, 16) + 16));
}

SamplingParams sampling_of(const GenerateConfig& config) {
  SamplingParams params{.max_new_tokens = config.max_new_tokens,
                        .min_new_tokens = config.min_new_tokens,
                        .temperature = config.temperature,
                        .top_p = config.top_p,
                        .top_k = config.top_k,
                        .min_p = config.min_p,
                        .frequency_penalty = config.frequency_penalty,
                        .presence_penalty = config.presence_penalty,
                        .repetition_penalty = config.repetition_penalty,
                        .logit_bias = {},
                        .stop = config.stop,
                        .stop_token_ids = {},
                        .ignore_eos = config.ignore_eos,
                        .seed = static_cast<std::uint64_t>(config.seed)};
  for (const std::int64_t id : config.stop_token_ids)
    params.stop_token_ids.push_back(static_cast<TokenId>(id));
  return params;
}

}  // namespace

int command_generate(const std::vector<std::string>& words) {
  GenerateConfig config;
  const auto parsed = read_flags(
      words, config, "usage: tandem generate --hf-checkpoint DIR --prompt TEXT... [flags]\n");
  if (!parsed) return 0;
  resolve(config, this_host());
  start_log({});
  for (const auto& note : parsed->notes) TD_LOG(info, "{}", note);
  TD_LOG(info, "{}", start_compute(config.compute));
  TokenizerProcess tokenizer({.folder = config.model.hf_checkpoint});
  const bool has_tokenizer = file_exists(config.model.hf_checkpoint + "/tokenizer.json");
  if (!has_tokenizer)
    TD_LOG(info, "{}: no tokenizer.json; answers are ids, their text stays empty",
           config.model.hf_checkpoint);
  const auto prompts = config.input.empty()
                           ? tokenize_prompts(config.prompt, config.apply_chat_template, tokenizer)
                           : read_token_rows(config.input, tokenizer);
  std::size_t longest = 0;
  for (const auto& p : prompts) longest = std::max(longest, p.ids.size());

  Weights weights(config.model.hf_checkpoint, compute_element(config.model.dtype),
                  compute_place(config.compute.device));
  EngineWorker worker(
      weights.folder, weights.arena, config.engine,
      kv_tokens(config.engine, static_cast<std::int64_t>(longest) + config.max_new_tokens), {}, {},
      config.stop.empty()
          ? nullptr
          : std::make_shared<Vocabulary>(Vocabulary::load(config.model.hf_checkpoint)));
  worker.set_longest_sequence(static_cast<std::int64_t>(longest) + config.max_new_tokens);
  std::vector<GenerateResult> results(prompts.size());
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    GenerateRequest request{.rid = std::to_string(i),
                            .prompt = prompts[i].ids,
                            .n = config.n,
                            .first_sample_id = i * static_cast<std::uint64_t>(config.n),
                            .params = sampling_of(config)};
    worker.engine().add(std::move(request),
                        [&results, i](GenerateResult r) { results[i] = std::move(r); });
  }
  const double start = monotonic_seconds();
  while (worker.engine().run({})) {
  }
  const double seconds = monotonic_seconds() - start;
  std::int64_t tokens = 0;
  for (std::size_t i = 0; i < results.size(); ++i) {
    std::vector<std::vector<TokenId>> ids;
    for (const SampleResult& s : results[i].samples) ids.push_back(s.output_ids);
    // A folder without tokenizer still answers rows of ids with ids.
    const auto texts =
        has_tokenizer ? tokenizer.decode(ids) : std::vector<TokenizedRow>(ids.size());
    for (std::size_t j = 0; j < ids.size(); ++j) {
      TD_CHECK(texts[j].ok(), "answer {} of prompt {}: {}", j + 1, i + 1, texts[j].error);
      tokens += static_cast<std::int64_t>(ids[j].size());
      const SampleResult& s = results[i].samples[j];
      const auto bad = std::find_if_not(s.log_probs.begin(), s.log_probs.end(),
                                        [](float p) { return std::isfinite(p); });
      TD_CHECK(bad == s.log_probs.end(),
               "answer {} of prompt {}: the log-probability of token {} is {}, since the model's "
               "logits are not finite; look at the weights in {}",
               j + 1, i + 1, bad - s.log_probs.begin() + 1, *bad, config.model.hf_checkpoint);
      const std::string text = s.matched_text.empty()
                                   ? texts[j].text
                                   : texts[j].text.substr(0, texts[j].text.find(s.matched_text));
      fmt::print("{}\n",
                 dump_json(OrderedJson{
                     {"prompt", prompts[i].text},
                     {"text", text},
                     {"input_ids", prompts[i].ids},
                     {"output_ids", s.output_ids},
                     {"logprobs", s.log_probs},
                     {"finish_reason", s.finish == FinishReason::stop ? "stop" : "length"}}));
    }
  }
  TD_LOG(info, "{} tokens in {:.2f} s, {:.1f} tokens/s", tokens, seconds,
         static_cast<double>(tokens) / seconds);
  return 0;
}

int command_serve(const std::vector<std::string>& words) {
  ServeConfig config;
  const auto parsed =
      read_flags(words, config, "usage: tandem serve --hf-checkpoint DIR [--port N] [flags]\n");
  if (!parsed) return 0;
  resolve(config, this_host());
  start_log({});
  for (const auto& note : parsed->notes) TD_LOG(info, "{}", note);
  TD_LOG(info, "{}", start_compute(config.compute));
  Weights weights(config.model.hf_checkpoint, compute_element(config.model.dtype),
                  compute_place(config.compute.device));
  TokenizerProcess tokenizer({.folder = config.model.hf_checkpoint});
  tokenizer.info();  // starts the helper now, not inside the first request
  ComputeQueue queue;
  const auto vocabulary =
      std::make_shared<Vocabulary>(Vocabulary::load(config.model.hf_checkpoint));
  EngineWorker worker(
      weights.folder, weights.arena, config.engine, kv_tokens(config.engine, 1024),
      [&queue] { queue.wake(); }, {}, vocabulary);
  const std::int64_t context = worker.limits().context_length;
  const std::size_t most_bytes = static_cast<std::size_t>(context) * vocabulary->longest_bytes();
  // Both are called on one thread (engine/generate_route.h).
  const TextHooks text{.encode =
                           [&](const std::string& prompt) {
                             // Said before the tokenizer, which all requests share, is busy.
                             TD_CHECK(prompt.size() <= most_bytes,
                                      "text: {} bytes found, at most {} wanted: the context of {} "
                                      "tokens of at most {} bytes",
                                      prompt.size(), most_bytes, context,
                                      vocabulary->longest_bytes());
                             auto rows = tokenizer.encode(std::vector<std::string>{prompt});
                             TD_CHECK(rows[0].ok(), "text: {}", rows[0].error);
                             return rows[0].ids;
                           },
                       .decode =
                           [&](std::span<const TokenId> ids, bool skip_special_tokens) {
                             const std::vector<std::vector<TokenId>> one{{ids.begin(), ids.end()}};
                             const auto rows = tokenizer.decode(one, skip_special_tokens);
                             TD_CHECK(rows[0].ok(), "answer: {}", rows[0].error);
                             return rows[0].text;
                           }};
  http::Server server({.host = config.host, .port = static_cast<int>(config.port)});
  add_engine_routes(server, worker.mailbox(),
                    {.limits = worker.limits(),
                     .model_path = config.model.hf_checkpoint,
                     .model_type = weights.folder.config().family,
                     .architectures = {weights.folder.config().architecture},
                     .version = TANDEM_VERSION,
                     .default_seed = static_cast<std::uint64_t>(config.seed),
                     .text = text});
  server.start();
  TD_LOG(info, "serving {} on http://{}:{}; Ctrl-C ends", config.model.hf_checkpoint, config.host,
         server.port());
  std::signal(SIGINT, [](int) { stop_asked = true; });
  std::signal(SIGTERM, [](int) { stop_asked = true; });
  while (!stop_asked) {
    const bool worked = queue.run();
    const bool more = worker.engine().run([&] { return stop_asked || queue.waiting(); });
    if (!worked && !more) queue.wait(Deadline::after(0.2));
  }
  TD_LOG(info, "stopped");
  server.stop();
  return 0;
}

}  // namespace tandem
