// The loop of a run. `TrainLoop::step` is the algorithm of one step on one screen: generate,
// reward, advantages, train, update weights, log, evaluate. Everything a step needs was opened
// before the first one, so a fault of config, data or model shows before anything is generated.
#include "driver/train.h"

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <memory>
#include <optional>

#include "base/check.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "base/text.h"
#include "checkpoint/hf_folder.h"
#include "config/json.h"
#include "config/resolve.h"
#include "data/batch.h"
#include "driver/evaluate.h"
#include "driver/fleet.h"
#include "driver/metrics.h"
#include "driver/placement.h"
#include "driver/rollout.h"
#include "model/hf_config.h"
#include "rl/advantages.h"

namespace tandem {
namespace {

class TrainLoop {
 public:
  explicit TrainLoop(Config config)
      : config_(std::move(config)),
        rule_(parse_reward_rule(config_.reward.rm_type)),
        tokenizer_({.folder = config_.model.hf_checkpoint,
                    .chat_template_path = config_.data.chat_template_path,
                    .log_path = config_.logging.run_dir + "/logs/tokenizer.log"}),
        progress_(5.0, config_.logging.progress.value_or(true)) {}

  void open();
  void run();
  // Appends what the ranks died of to an error that ended the run.
  std::string with_cause(const std::string& what);
  void close() {
    if (fleet_) fleet_->stop(Deadline::after(10));
  }

 private:
  void load_data();
  void size_kv_cache();
  void step(std::int64_t id);
  void check_skipped(std::int64_t id, const TrainResult& trained);
  void evaluate_all(std::int64_t id);
  bool evaluates_after(std::int64_t id) const;
  void write_row(std::int64_t id, const Row& row);
  void save_rollout(std::int64_t id, const TrainBatch& batch);
  std::string save_folder() const;
  double control_seconds() const { return config_.cluster.control_timeout_seconds; }

  Config config_;
  RewardRule rule_;
  TokenizerProcess tokenizer_;
  Progress progress_;
  std::vector<Prompt> prompts_;
  std::vector<EvaluationSet> evaluation_;
  std::optional<PromptOrder> order_;
  std::vector<std::unique_ptr<Sink>> sinks_;
  std::optional<Fleet> fleet_;
  std::optional<RolloutMaker> maker_;
  std::int64_t skipped_steps_ = 0;  // in a row, up to the last one
};

void TrainLoop::load_data() {
  const DataConfig& d = config_.data;
  const PromptSet set =
      load_prompts({.path = d.prompt_data,
                    .input_key = d.input_key,
                    .label_key = d.label_key,
                    .metadata_key = "",
                    .tool_key = d.tool_key,
                    .apply_chat_template = d.apply_chat_template,
                    .apply_chat_template_kwargs = d.apply_chat_template_kwargs,
                    .max_prompt_tokens = config_.rollout.rollout_max_prompt_len.value_or(0)},
                   tokenizer_);
  check_labels(d.prompt_data, set.prompts, rule_);
  prompts_ = set.prompts;
  evaluation_ = load_evaluation_sets(config_, tokenizer_, rule_);
  for (const auto& line : resolve_num_rollout(config_, static_cast<std::int64_t>(prompts_.size())))
    TD_LOG(info, "{}", line);
  order_.emplace(prompts_.size(), static_cast<std::uint64_t>(d.rollout_seed), d.rollout_shuffle);
}

// Room for max_running_requests samples of the longest prompt and answer, unless given. Every
// prompt must fit the model, and one sample the cache: said now, not at the step that draws it.
void TrainLoop::size_kv_cache() {
  const ModelConfig model = read_model_config(config_.model.hf_checkpoint);
  const std::int64_t context = model.max_position_embeddings;
  std::size_t prompt = 0;
  for (const Prompt& p : prompts_) prompt = std::max(prompt, p.ids.size());
  for (const EvaluationSet& set : evaluation_)
    for (const Prompt& p : set.prompts) prompt = std::max(prompt, p.ids.size());
  const std::int64_t answer = std::max(config_.rollout.rollout_max_response_len.value(),
                                       config_.evaluate.eval_max_response_len.value());
  const auto longest_prompt = static_cast<std::int64_t>(prompt);
  TD_CHECK(longest_prompt <= context,
           "--rollout-max-prompt-len: a prompt has {} tokens, the model's context is {}; give at "
           "most that to leave such prompts out",
           prompt, context);
  const std::int64_t longest = std::min(
      {longest_prompt + answer, context,
       std::max(longest_prompt, config_.rollout.rollout_max_context_len.value_or(context))});
  if (model.has_longrope() && !config_.rollout.rollout_max_context_len) {
    config_.rollout.rollout_max_context_len = longest;
    TD_LOG(info,
           "rollout_max_context_len = {} (prompt {} + answer {}): long rope turns all sequences of "
           "a run by the factors that suit its longest",
           longest, prompt, answer);
  }
  if (const auto& kv = config_.engine.kv_cache_tokens) {
    TD_CHECK(*kv >= longest, "--kv-cache-tokens: found {}, one sample may need {}", *kv, longest);
    return;
  }
  const std::int64_t blocks = (longest + 15) / 16 + 1;
  config_.engine.kv_cache_tokens = blocks * 16 * config_.engine.max_running_requests;
  TD_LOG(info,
         "kv_cache_tokens = {} (max_running_requests {} x {} blocks of 16: prompt {} + answer {})",
         *config_.engine.kv_cache_tokens, config_.engine.max_running_requests, blocks, prompt,
         answer);
}

void TrainLoop::open() {
  const std::string& folder = config_.logging.run_dir;
  const Placement placement = make_placement(
      config_.cluster, {.num_nodes = 1, .gpus_per_node = config_.cluster.num_gpus_per_node});
  load_data();
  size_kv_cache();
  write_file_atomic(folder + "/config.json", dump_json_pretty(to_json(config_)));
  sinks_.push_back(std::make_unique<JsonlSink>(folder + "/metrics.jsonl"));
  sinks_.push_back(std::make_unique<ConsoleSink>(*config_.data.num_rollout));
  if (config_.logging.use_tensorboard)
    sinks_.push_back(std::make_unique<TensorBoardSink>(folder + "/tensorboard"));
  if (config_.logging.save_rollouts) std::filesystem::create_directories(folder + "/rollouts");
  if (!config_.checkpoint.save_hf.empty()) {
    std::error_code none;
    check_hf_target(save_folder());
    TD_CHECK(!std::filesystem::equivalent(save_folder(), config_.model.hf_checkpoint, none),
             "--save-hf: {} is the folder of --hf-checkpoint; name another", save_folder());
  }
  fleet_.emplace(config_, placement);
  maker_.emplace(fleet_->engines(), tokenizer_, progress_);
}

// --save-hf with its {rollout_id} filled in, absolute.
std::string TrainLoop::save_folder() const {
  std::string folder = config_.checkpoint.save_hf;
  const std::string field = "{rollout_id}";
  if (const auto at = folder.find(field); at != std::string::npos)
    folder.replace(at, field.size(), std::to_string(*config_.data.num_rollout - 1));
  return std::filesystem::absolute(folder).string();
}

void TrainLoop::write_row(std::int64_t id, const Row& row) {
  for (auto& sink : sinks_) sink->write(id, row);
}

void TrainLoop::save_rollout(std::int64_t id, const TrainBatch& batch) {
  if (!config_.logging.save_rollouts) return;
  write_file_atomic(
      fmt::format("{}/rollouts/rollout_{:07d}.safetensors", config_.logging.run_dir, id),
      encode_batch(batch));
}

void TrainLoop::step(std::int64_t id) {
  const double start = monotonic_seconds();
  Row row(train_declarations());

  std::vector<RolloutItem> items;
  for (const auto& drawn : order_->next(*config_.rollout.rollout_batch_size))
    items.push_back({drawn.counter, drawn.index});
  RolloutSetup setup{.phase = fmt::format("step {} rollout", id + 1),
                     .samples_per_prompt = config_.rollout.n_samples_per_prompt,
                     .params = rollout_sampling(config_),
                     .skip_special_tokens = config_.rollout.rollout_skip_special_tokens,
                     .mask_truncated = config_.rollout.mask_truncated_samples,
                     .rule = rule_,
                     .max_context = config_.rollout.rollout_max_context_len.value_or(0),
                     .timeout_seconds = config_.engine.request_timeout_seconds};
  TrainBatch batch{
      .samples = maker_->run(prompts_, items, setup), .advantages = {}, .trainer_log_probs = {}};
  const double generated = monotonic_seconds();

  std::vector<std::uint64_t> prompt_ids;
  std::vector<double> rewards;
  for (const Sample& s : batch.samples) {
    prompt_ids.push_back(s.prompt_id);
    rewards.push_back(s.reward);
  }
  const auto advantages =
      group_advantages(prompt_ids, rewards,
                       {.estimator = config_.algorithm.advantage_estimator,
                        .rewards_normalization = config_.algorithm.rewards_normalization,
                        .grpo_std_normalization = config_.algorithm.grpo_std_normalization});
  batch.advantages = advantages.advantages;
  add_rollout_metrics(row, batch.samples, advantages, generated - start,
                      config_.cluster.rollout_num_gpus.value());
  save_rollout(id, batch);

  progress_.begin(fmt::format("step {} train", id + 1), 0, "micro-batches");  // total comes later
  std::int64_t shown = 0;
  const double train_start = monotonic_seconds();
  const TrainResult trained = fleet_->trainer().train(
      batch, *config_.data.num_rollout * config_.train.num_steps_per_rollout.value(),
      Deadline::after(control_seconds()), [&](std::int64_t done, std::int64_t total) {
        progress_.set_total(total);
        if (done > shown) progress_.advance(done - shown);
        shown = std::max(shown, done);
      });
  progress_.end();
  add_train_metrics(row, trained, monotonic_seconds() - train_start);
  check_skipped(id, trained);
  if (const auto every = config_.algorithm.ref_update_interval; every && (id + 1) % *every == 0) {
    fleet_->trainer().update_reference(Deadline::after(control_seconds()));
    TD_LOG(info, "step {}: the present model is the reference from here on", id + 1);
  }

  add_update_metrics(row, fleet_->update_weights(Deadline::after(control_seconds())));
  const double seconds = monotonic_seconds() - start;
  row.add("perf/step_time", seconds);
  row.add("perf/train_wait_time", seconds - row.value("perf/train_time"));
  write_row(id, row);
  if (evaluates_after(id)) evaluate_all(id);
}

// A gradient that is not finite again and again will not mend itself.
void TrainLoop::check_skipped(std::int64_t id, const TrainResult& trained) {
  for (const StepMetrics& m : trained.steps) {
    skipped_steps_ = m.skipped ? skipped_steps_ + 1 : 0;
    if (!m.skipped) continue;
    TD_LOG(warn, "step {}: gradient norm {}: the optimizer step was skipped, no state changed",
           id + 1, m.grad_norm);
    const std::int64_t most = config_.train.max_skipped_steps;
    TD_CHECK(most == 0 || skipped_steps_ < most,
             "--max-skipped-steps: {} optimizer steps in a row had a gradient that is not finite, "
             "the last at step {}; the samples are in {}/rollouts; lower --lr, or bound the ratio "
             "or the KL that grew",
             skipped_steps_, id + 1, config_.logging.run_dir);
  }
}

bool TrainLoop::evaluates_after(std::int64_t id) const {
  const bool last = id + 1 == *config_.data.num_rollout;
  const auto interval = config_.evaluate.eval_interval;
  return !evaluation_.empty() && (last || (interval && (id + 1) % *interval == 0));
}

void TrainLoop::evaluate_all(std::int64_t id) {
  Row row(train_declarations());
  for (EvaluationSet& set : evaluation_) {
    evaluate(set, config_, *maker_, row);
    if (id < 0) set.first = set.last;
    console_line(fmt::format("evaluation '{}': mean reward {:.3f} over {} prompts", set.name,
                             set.last, set.prompts.size()));
  }
  for (auto& sink : sinks_)
    if (!dynamic_cast<ConsoleSink*>(sink.get())) sink->write(id, row);
}

void TrainLoop::run() {
  fleet_->update_weights(Deadline::after(control_seconds()));
  if (!evaluation_.empty() && !config_.evaluate.skip_eval_before_train) evaluate_all(-1);
  for (std::int64_t id = 0; id < *config_.data.num_rollout; ++id) step(id);
  if (!config_.checkpoint.save_hf.empty()) {
    fleet_->trainer().save_hf(save_folder(), Deadline::after(control_seconds()));
    TD_LOG(info, "{}: the trained model, a Hugging Face folder", save_folder());
  }
  for (const EvaluationSet& set : evaluation_)
    console_line(evaluation_block(summarize(set, config_.logging.run_dir)));
  if (evaluation_.empty()) console_line("run folder: " + config_.logging.run_dir);
}

std::string TrainLoop::with_cause(const std::string& what) {
  std::string text = what;
  if (fleet_)
    for (const RankDeath& death : fleet_->deaths(Deadline::after(2))) text += "\n" + death.text;
  return text;
}

}  // namespace

int run_train(Config config, const std::vector<std::string>& notes) {
  const auto resolved = resolve(config, this_host());
  const std::string& folder = config.logging.run_dir;
  TD_CHECK(!file_exists(folder + "/metrics.jsonl"),
           "--run-dir: {} already holds a run; name another folder or remove it", folder);
  std::signal(SIGPIPE, SIG_IGN);  // a console that is gone is no reason to end the run
  std::filesystem::create_directories(folder + "/logs");
  start_log({.role = "",
             .level = config.logging.log_level,
             .console_fd = 1,
             .file = folder + "/log.txt"});
  TD_LOG(info, "run folder: {}", folder);
  for (const auto& line : notes) TD_LOG(info, "{}", line);
  for (const auto& line : resolved) TD_LOG(info, "{}", line);
  TrainLoop loop(std::move(config));
  try {
    loop.open();
    loop.run();
  } catch (const Error& e) {
    // The rank's own last words are the cause; without them only its closed socket would show.
    throw Error(loop.with_cause(e.what()));
  }
  loop.close();
  return 0;
}

}  // namespace tandem
