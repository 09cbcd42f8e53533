// Requests, the ways to run them, and the comparison.
#include "rank/selftest.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <bit>
#include <random>
#include <thread>

#include "base/check.h"
#include "checkpoint/weights.h"
#include "comm/store.h"
#include "model/parameters.h"
#include "rank/worker.h"
#include "trainer/packed_batch.h"

namespace tandem {
namespace {

constexpr std::int64_t kSamples = 4;  // of a prompt

// Requests and what is right for them.
struct Exam {
  std::vector<GenerateRequest> requests;
  std::vector<Sample> samples;                // of all requests, in order of id
  std::vector<std::vector<float>> log_probs;  // the trainer's

  std::int64_t num_tokens() const {
    std::int64_t tokens = 0;
    for (const Sample& s : samples) tokens += s.response_length;
    return tokens;
  }
};

using Answers = std::vector<GenerateResult>;  // one a request

// A way to run an engine.
struct Way {
  std::string name;
  std::int64_t max_running = 64;
  std::int64_t max_prefill_tokens = 4096;
  std::int64_t kv_tokens = 0;  // 0: enough for all
  bool prefix_cache = true;
  std::int64_t retract_every = 0;       // steps; 0: never
  std::size_t num_requests = SIZE_MAX;  // the first so many
};

// Prompts of random ids and of different lengths, half of them with one beginning.
std::vector<GenerateRequest> make_requests(const ModelConfig& model, const SelftestOptions& options,
                                           std::int64_t count) {
  std::mt19937_64 random(options.seed);
  const auto below = [&](std::int64_t bound) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(bound));
  };
  const auto draw_id = [&] { return static_cast<TokenId>(below(model.vocab_size)); };
  std::vector<TokenId> system(static_cast<std::size_t>(options.prompt_tokens / 2));
  for (TokenId& id : system) id = draw_id();
  std::vector<GenerateRequest> requests;
  for (std::int64_t i = 0; i < count; ++i) {
    GenerateRequest request{.rid = fmt::format("selftest-{}", i),
                            .prompt = {},
                            .n = kSamples,
                            .first_sample_id = static_cast<std::uint64_t>(i * kSamples),
                            .params = {}};
    if (i % 2 == 1) request.prompt = system;
    const std::int64_t own =
        1 + below(options.prompt_tokens - static_cast<std::int64_t>(request.prompt.size()));
    for (std::int64_t t = 0; t < own; ++t) request.prompt.push_back(draw_id());
    request.params.max_new_tokens = options.new_tokens;
    request.params.ignore_eos = true;
    request.params.seed = options.seed;
    requests.push_back(std::move(request));
  }
  return requests;
}

// The next turn of each first sample: its prompt and answer, and a few ids more.
std::vector<GenerateRequest> next_turn(const Exam& exam, const SelftestOptions& options) {
  std::vector<GenerateRequest> requests;
  for (std::size_t i = 0; i < exam.requests.size(); ++i) {
    GenerateRequest request = exam.requests[i];
    request.rid += "-again";
    request.prompt = exam.samples[i * kSamples].tokens;
    for (TokenId id = 0; id < 5; ++id) request.prompt.push_back(id);
    request.n = 1;
    request.first_sample_id = (std::uint64_t{1} << 32) + i;
    request.params.max_new_tokens = std::max<std::int64_t>(options.new_tokens / 2, 1);
    requests.push_back(std::move(request));
  }
  return requests;
}

std::vector<Sample> samples_of(const std::vector<GenerateRequest>& requests,
                               const Answers& answers) {
  std::vector<Sample> samples;
  for (std::size_t r = 0; r < requests.size(); ++r) {
    for (std::size_t i = 0; i < answers[r].samples.size(); ++i) {
      const SampleResult& answer = answers[r].samples[i];
      Sample s;
      s.id = requests[r].first_sample_id + i;
      s.prompt_id = r;
      s.tokens = requests[r].prompt;
      s.tokens.insert(s.tokens.end(), answer.output_ids.begin(), answer.output_ids.end());
      s.response_length = static_cast<std::int64_t>(answer.output_ids.size());
      s.loss_mask.assign(answer.output_ids.size(), 1);
      samples.push_back(std::move(s));
    }
  }
  return samples;
}

class Selftest {
 public:
  Selftest(const HfFolder& folder, Arena& arena, const SelftestOptions& options,
           const std::function<void(const SelftestRow&)>& on_row)
      : folder_(folder),
        arena_(arena),
        options_(options),
        on_row_(on_row),
        model_(folder.config(), arena, nullptr, nullptr) {}

  std::vector<SelftestRow> run();

 private:
  void try_engine(const Way& way, const Exam& exam);
  void try_next_turn(const Exam& exam);
  void try_sampling(const Exam& exam);
  void try_trainer(const std::string& name, const Exam& exam, bool share_prompt,
                   std::int64_t max_tokens);
  void try_tensor_parallel(const Exam& exam);
  Exam make_exam(std::vector<GenerateRequest> requests, const Answers& answers, double temperature);
  std::vector<std::vector<float>> through_trainer(std::span<const Sample> samples,
                                                  bool share_prompt, std::int64_t max_tokens,
                                                  double temperature);
  std::int64_t kv_tokens(const std::vector<GenerateRequest>& requests) const;
  std::unique_ptr<EngineWorker> make_worker(const Way& way, std::int64_t kv) const;
  static Answers run_engine(Engine& engine, std::span<const GenerateRequest> requests,
                            std::int64_t retract_every);
  void report(SelftestRow row);
  static void compare(const Exam& exam, const Answers& answers, SelftestRow& row);

  const HfFolder& folder_;
  Arena& arena_;
  SelftestOptions options_;
  const std::function<void(const SelftestRow&)>& on_row_;
  Model model_;
  std::vector<SelftestRow> rows_;
};

void Selftest::report(SelftestRow row) {
  if (on_row_) on_row_(row);
  rows_.push_back(std::move(row));
}

void compare_sample(const Sample& sample, const std::vector<float>& right,
                    std::span<const TokenId> tokens, std::span<const float> log_probs,
                    SelftestRow& row) {
  const TokenId* wanted = sample.tokens.data() + sample.prompt_length();
  bool same_so_far = true;
  for (std::size_t t = 0; t < right.size(); ++t) {
    same_so_far = same_so_far && t < tokens.size() && tokens[t] == wanted[t];
    const bool equal = same_so_far && std::bit_cast<std::uint32_t>(log_probs[t]) ==
                                          std::bit_cast<std::uint32_t>(right[t]);
    ++row.tokens;
    row.differ += equal ? 0 : 1;
    if (!equal && row.note.find("first at") == std::string::npos) {
      row.note +=
          fmt::format("{}first at sample {}, token {}", row.note.empty() ? "" : "; ", sample.id, t);
      if (same_so_far) row.note += fmt::format(": {:a}, not {:a}", log_probs[t], right[t]);
    }
  }
}

void Selftest::compare(const Exam& exam, const Answers& answers, SelftestRow& row) {
  std::size_t at = 0;
  for (const GenerateResult& answer : answers) {
    for (const SampleResult& s : answer.samples) {
      compare_sample(exam.samples[at], exam.log_probs[at], s.output_ids, s.log_probs, row);
      ++at;
    }
  }
}

std::int64_t Selftest::kv_tokens(const std::vector<GenerateRequest>& requests) const {
  std::int64_t tokens = 0;
  for (const GenerateRequest& r : requests) {
    const auto longest = static_cast<std::int64_t>(r.prompt.size()) + r.params.max_new_tokens;
    tokens += r.n * (round_up(longest, kBlockTokens) + kBlockTokens);
  }
  return tokens;
}

std::unique_ptr<EngineWorker> Selftest::make_worker(const Way& way, std::int64_t kv) const {
  EngineConfig config;
  config.max_running_requests = way.max_running;
  config.max_prefill_tokens = way.max_prefill_tokens;
  config.prefix_cache = way.prefix_cache;
  auto worker = std::make_unique<EngineWorker>(folder_, arena_, config, kv, [] {});
  if (options_.perturb_engine) worker->perturb();
  return worker;
}

Answers Selftest::run_engine(Engine& engine, std::span<const GenerateRequest> requests,
                             std::int64_t retract_every) {
  Answers answers(requests.size());
  for (std::size_t i = 0; i < requests.size(); ++i) {
    engine.add(requests[i], [&answers, i](GenerateResult r) { answers[i] = std::move(r); });
  }
  while (retract_every == 0 && engine.run({})) {
  }
  for (std::int64_t step = 1; engine.step(); ++step) {
    if (retract_every == 0 || step % retract_every != 0) continue;
    engine.pause(PauseMode::retract);
    engine.resume();
  }
  return answers;
}

// The trainer's forward over micro-batches of at most max_tokens rows (one sample at least).
std::vector<std::vector<float>> Selftest::through_trainer(std::span<const Sample> samples,
                                                          bool share_prompt,
                                                          std::int64_t max_tokens,
                                                          double temperature) {
  const c10::AutoGradMode no_gradients(false);
  std::vector<std::vector<float>> all;
  for (std::size_t begin = 0; begin < samples.size();) {
    std::vector<const Sample*> micro{&samples[begin]};
    auto rows = static_cast<std::int64_t>(samples[begin].tokens.size());
    std::size_t end = begin + 1;
    for (; end < samples.size(); ++end) {
      rows += static_cast<std::int64_t>(samples[end].tokens.size());
      if (rows > max_tokens) break;
      micro.push_back(&samples[end]);
    }
    PackedBatch packed(micro, share_prompt);
    KvPool pool(model_.attention_shape(), model_.element(), 1, packed.num_blocks(), model_.place());
    packed.context.pool = &pool;
    const at::Tensor hidden = model_.forward(packed.tokens, packed.positions, packed.context);
    const at::Tensor loss_rows =
        at::empty({static_cast<std::int64_t>(packed.loss.size())}, at::dtype(at::kLong));
    std::vector<TokenId> ids;
    for (std::size_t i = 0; i < packed.loss.size(); ++i) {
      loss_rows.data_ptr<std::int64_t>()[i] = packed.loss[i].row;
      ids.push_back(packed.loss[i].id);
    }
    const at::Tensor log_probs =
        head_log_probs(hidden.index_select(0, loss_rows.to(hidden.device())), ids, model_.head(),
                       static_cast<float>(temperature), false)
            .log_probs.cpu();
    for (std::size_t i = begin; i < end; ++i) {
      all.emplace_back(static_cast<std::size_t>(samples[i].response_length));
    }
    for (std::size_t i = 0; i < packed.loss.size(); ++i) {
      all[begin + static_cast<std::size_t>(packed.loss[i].sample)][packed.loss[i].position] =
          log_probs.data_ptr<float>()[i];
    }
    begin = end;
  }
  return all;
}

Exam Selftest::make_exam(std::vector<GenerateRequest> requests, const Answers& answers,
                         double temperature) {
  Exam exam;
  exam.samples = samples_of(requests, answers);
  exam.requests = std::move(requests);
  exam.log_probs = through_trainer(exam.samples, true, 4096, temperature);
  for (const auto& of_sample : exam.log_probs)
    TD_CHECK(
        std::ranges::all_of(of_sample, [](float v) { return std::isfinite(v); }), "{}",
        "the model's log-probabilities are not finite, so equal bits mean nothing; look at its "
        "weights");
  return exam;
}

void Selftest::try_engine(const Way& way, const Exam& exam) {
  const std::size_t count = std::min(way.num_requests, exam.requests.size());
  const auto worker =
      make_worker(way, way.kv_tokens > 0 ? way.kv_tokens : kv_tokens(exam.requests));
  const Answers answers =
      run_engine(worker->engine(), std::span(exam.requests).first(count), way.retract_every);
  const EngineStats stats = worker->engine().stats();
  SelftestRow row{.way = way.name};
  row.note = fmt::format("{} steps", stats.steps);
  if (stats.rows_cached > 0)
    row.note += fmt::format(", {} rows from known prefixes", stats.rows_cached);
  if (stats.preemptions > 0) row.note += fmt::format(", {} preemptions", stats.preemptions);
  compare(exam, answers, row);
  report(std::move(row));
}

// The second turn finds the first one's KV, and gives the bits of an engine that does not.
void Selftest::try_next_turn(const Exam& exam) {
  const std::vector<GenerateRequest> requests = next_turn(exam, options_);
  const std::int64_t kv = kv_tokens(exam.requests) + kv_tokens(requests);
  const auto cold = make_worker({.name = "", .prefix_cache = false}, kv);
  const Exam second = make_exam(requests, run_engine(cold->engine(), requests, 0), 1.0);
  const auto warm = make_worker({.name = ""}, kv);
  run_engine(warm->engine(), exam.requests, 0);
  const std::int64_t before = warm->engine().stats().rows_cached;
  SelftestRow row{.way = "engine, second turn over known prefixes"};
  const Answers answers = run_engine(warm->engine(), requests, 0);
  row.note =
      fmt::format("{} rows from known prefixes", warm->engine().stats().rows_cached - before);
  compare(second, answers, row);
  report(std::move(row));
}

// Whatever decides which token is drawn, recorded is the full softmax at the temperature.
void Selftest::try_sampling(const Exam& exam) {
  std::vector<GenerateRequest> requests(
      exam.requests.begin(),
      exam.requests.begin() + static_cast<std::ptrdiff_t>((exam.requests.size() + 1) / 2));
  for (GenerateRequest& r : requests) {
    r.params.temperature = 0.7;
    r.params.top_p = 0.9;
    r.params.top_k = 50;
    r.params.frequency_penalty = 0.3;
    r.params.logit_bias = {{1, 2.0}};
  }
  const auto worker = make_worker({.name = ""}, kv_tokens(requests));
  const Answers answers = run_engine(worker->engine(), requests, 0);
  SelftestRow row{.way = "engine, temperature 0.7, top-p, top-k, penalties, bias"};
  compare(make_exam(requests, answers, 0.7), answers, row);
  report(std::move(row));
}

void Selftest::try_trainer(const std::string& name, const Exam& exam, bool share_prompt,
                           std::int64_t max_tokens) {
  SelftestRow row{.way = name};
  const auto found = through_trainer(exam.samples, share_prompt, max_tokens, 1.0);
  for (std::size_t i = 0; i < exam.samples.size(); ++i) {
    const Sample& s = exam.samples[i];
    compare_sample(s, exam.log_probs[i],
                   std::span(s.tokens).subspan(static_cast<std::size_t>(s.prompt_length())),
                   found[i], row);
  }
  report(std::move(row));
}

// Two ranks as threads. Each runs the whole scheduler; the gathered logits give both the same
// tokens, so they need no other agreement.
void Selftest::try_tensor_parallel(const Exam& exam) {
  const ModelConfig& config = folder_.config();
  const std::string fault = tensor_parallel_fault(config, 2);
  SelftestRow row{.way = "engine, tensor parallel over 2 ranks"};
  if (!fault.empty() || arena_.place() != Place::cpu) {
    row.note = fault.empty() ? "not on this device" : "not possible: " + fault;
    return report(std::move(row));
  }
  const Store server = Store::serve("127.0.0.1", 0, 60);
  const std::int64_t kv = kv_tokens(exam.requests);
  Answers answers[2];
  std::vector<std::thread> ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.emplace_back([&, r] {
      const Store client = Store::connect("127.0.0.1", server.port(), 60);
      Group group = Group::gloo(client, "selftest", r, 2);
      Arena part(make_arena_layout(config, arena_.layout().element, r, 2));
      load_arena(folder_, part);
      Model model(config, part, &group, nullptr);
      KvPool pool(model.attention_shape(), model.element(), config.num_layers,
                  (kv + kBlockTokens - 1) / kBlockTokens, part.place());
      Runner runner(model, pool);
      Mailbox mailbox;
      Engine engine(
          {.num_blocks = pool.num_blocks(),
           .block_tokens = kBlockTokens,
           .max_running = 64,
           .max_prefill_tokens = 4096,
           .context_length = config.max_position_embeddings,
           .vocab_size = config.vocab_size,
           .eos_token_ids = {},
           .vocabulary = {}},
          [&](const StepPlan& plan, std::span<SampledToken> sampled) { runner.run(plan, sampled); },
          mailbox);
      answers[r] = run_engine(engine, exam.requests, 0);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const Answers& rank : answers) compare(exam, rank, row);
  report(std::move(row));
}

std::vector<SelftestRow> Selftest::run() {
  const ModelConfig& config = folder_.config();
  // A second turn's prompt holds a first one's prompt and answer.
  const std::int64_t longest = options_.prompt_tokens + 2 * options_.new_tokens + 8;
  TD_CHECK(config.max_position_embeddings >= longest,
           "selftest: the model's context is {} tokens, {} wanted for prompts of {} and answers of "
           "{}",
           config.max_position_embeddings, longest, options_.prompt_tokens, options_.new_tokens);
  constexpr std::int64_t kWholeWays = 9;  // those below that run all requests, two halves as one
  const std::int64_t per_request = kWholeWays * kSamples * options_.new_tokens;
  const std::int64_t count =
      std::max<std::int64_t>(2, (options_.tokens + per_request - 1) / per_request);
  std::vector<GenerateRequest> requests = make_requests(config, options_, count);
  const Way plain{.name = "engine, batches of up to 64, nothing known", .prefix_cache = false};
  const auto first = make_worker(plain, kv_tokens(requests));
  const Answers answers = run_engine(first->engine(), requests, 0);
  const Exam exam = make_exam(std::move(requests), answers, 1.0);

  SelftestRow row{.way = plain.name};
  row.note = fmt::format("{} steps", first->engine().stats().steps);
  compare(exam, answers, row);
  report(std::move(row));
  try_trainer("trainer, each sample with its own prompt", exam, false, 4096);
  try_trainer("trainer, one sample at a time", exam, true, 1);
  try_engine({.name = "engine, one sample at a time", .max_running = 1, .num_requests = 1}, exam);
  for (const std::int64_t batch : {2, 7, 16, 33}) {
    try_engine({.name = fmt::format("engine, batches of up to {}", batch),
                .max_running = batch,
                .num_requests = static_cast<std::size_t>(std::max<std::int64_t>(1, batch / 4))},
               exam);
  }
  try_engine({.name = "engine, batches of up to 64, prefixes known"}, exam);
  for (const std::int64_t chunk : {1, 5, 16, 50}) {
    try_engine({.name = fmt::format("engine, prompts in chunks of {}", chunk),
                .max_prefill_tokens = chunk,
                .num_requests = static_cast<std::size_t>(std::max<std::int64_t>(2, count / 2))},
               exam);
  }
  const std::int64_t scarce =
      std::max(2 * (round_up(longest, kBlockTokens) + kBlockTokens), kv_tokens(exam.requests) / 4);
  try_engine({.name = "engine, a quarter of the KV wanted", .kv_tokens = scarce}, exam);
  try_engine(
      {.name = "engine, the same with nothing known", .kv_tokens = scarce, .prefix_cache = false},
      exam);
  try_engine({.name = "engine, all KV given back every 10 steps", .retract_every = 10}, exam);
  try_next_turn(exam);
  try_sampling(exam);
  try_tensor_parallel(exam);
  return rows_;
}

}  // namespace

std::vector<SelftestRow> run_selftest(const HfFolder& folder, Arena& arena,
                                      const SelftestOptions& options,
                                      const std::function<void(const SelftestRow&)>& on_row) {
  return Selftest(folder, arena, options, on_row).run();
}

}  // namespace tandem
