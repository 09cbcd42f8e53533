// The loop of a run. `TrainLoop::step` is the algorithm of one step on one screen: generate,
// reward, advantages, train, update weights, log and save; then evaluation. With --async-steps the
// next rollout is generated on a thread of its own while the step trains. Everything a step needs
// was opened before the first one, so a fault of config, data or model shows before anything is
// generated. Invariant: a step's row is on disk before the checkpoint that holds the step is, and
// what a checkpoint holds is the state after a whole step, a rollout that is ahead of it included.
#include "driver/train.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "base/text.h"
#include "checkpoint/checkpoints.h"
#include "checkpoint/hf_folder.h"
#include "config/json.h"
#include "config/resolve.h"
#include "config/validate.h"
#include "data/batch.h"
#include "driver/ahead.h"
#include "driver/ci_test.h"
#include "driver/dry_run.h"
#include "driver/evaluate.h"
#include "driver/fleet.h"
#include "driver/interrupt.h"
#include "driver/metrics.h"
#include "driver/placement.h"
#include "driver/preflight.h"
#include "driver/prompt_options.h"
#include "driver/records.h"
#include "driver/resume.h"
#include "driver/rollout.h"
#include "driver/sampling.h"
#include "model/hf_config.h"
#include "rl/advantages.h"

namespace tandem {
namespace {

PauseMode pause_mode(PauseGeneration mode) {
  switch (mode) {
    case PauseGeneration::abort:
      return PauseMode::abort;
    case PauseGeneration::in_place:
      return PauseMode::in_place;
    case PauseGeneration::retract:
      break;
  }
  return PauseMode::retract;
}

class TrainLoop {
 public:
  TrainLoop(Config config, std::optional<Resume> resume)
      : config_(std::move(config)),
        resume_(std::move(resume)),
        rewards_(config_),
        selection_(config_),
        constant_reward_(config_.reward.constant_reward_steps),
        tokenizer_({.folder = config_.model.hf_checkpoint,
                    .chat_template_path = config_.data.chat_template_path,
                    .log_path = config_.logging.run_dir + "/logs/tokenizer.log"}),
        progress_(5.0, config_.logging.progress.value_or(true)) {}
  ~TrainLoop() { giving_up_ = true; }  // and then ahead_ waits for its thread

  // False: every rollout asked for is done, and there is nothing left to do.
  bool open();
  // False: interrupted, and ended in order.
  bool run();
  void say_all_done() const {
    console_line(
        fmt::format("nothing to do: {} holds step {}, the last of --num-rollout {}; a larger "
                    "--num-rollout goes "
                    "on from there",
                    resume_->folder, first_, *config_.data.num_rollout));
  }
  // Whether all checks are done: what stops a run before that is a fault of what it was given.
  bool is_checked() const { return checked_; }
  // Appends what the ranks died of to an error that ended the run.
  std::string with_cause(const std::string& what);
  void close() {
    if (fleet_) fleet_->stop(Deadline::after(10));
  }

 private:
  // A checkpoint whose parts the ranks have written; commit makes it one.
  struct Parts {
    CheckpointWriter writer;
    CheckpointState state;
  };

  void load_data(std::int64_t vocab_size);
  void check_recordings() const;
  void restore_data();
  void size_kv_cache(const ModelConfig& model);
  void restore_ranks();
  bool all_done() const { return first_ >= *config_.data.num_rollout; }
  bool step(std::int64_t id);
  std::optional<DrawnGroups> make_rollout(std::int64_t id, bool shown);
  std::vector<Sample> recorded_samples(std::int64_t id) const;
  std::optional<DrawnGroups> take_rollout(std::int64_t id);
  void start_ahead(std::int64_t id);
  void finish_ahead();
  TrainBatch make_batch(DrawnGroups rollout, Row& row);
  void check_staleness(std::int64_t id, std::span<const Sample> samples) const;
  void train(std::int64_t id, const TrainBatch& batch, Row& row);
  void check_gap(std::int64_t id, const TrainResult& trained) const;
  void check_ci(std::int64_t id, const TrainResult& trained) const;
  UpdateTimes update_weights();
  // After the last step always: the last evaluation measures the weights that are saved.
  bool updates_after(std::int64_t id) const {
    return is_last(id) || (id + 1) % config_.transfer.update_weights_interval == 0;
  }
  // Whether no other rollout was begun since the engines got the weights that this one began with.
  bool is_first_after_update(std::int64_t id) const {
    const std::int64_t before = id - 1 - config_.rollout.async_steps;  // what an update followed
    return !config_.debug.debug_train_only && (id == 0 || (before >= 0 && updates_after(before)));
  }
  void check_skipped(std::int64_t id, const TrainResult& trained);
  bool evaluate_all(std::int64_t id);
  bool evaluates_after(std::int64_t id) const;
  bool saves_after(std::int64_t id) const;
  std::unique_ptr<Parts> write_parts(std::int64_t id);
  void commit(Parts& parts);
  void end_early();
  void write_row(std::int64_t id, const Row& row);
  void save_rollout(std::int64_t id, const TrainBatch& batch);
  std::string save_folder() const;
  bool interrupted() const { return interrupts_.asked(); }
  // Whether what is being generated is not wanted any more; any thread.
  bool stops_generating() const { return giving_up_ || (interrupted() && !must_finish_ahead_); }
  // A run that continues: the evaluation after its last step was cut short.
  bool owes_evaluation() const {
    return first_ > 0 && evaluates_after(first_ - 1) && !records_.has_evaluation;
  }
  RankUsage note_memory(const std::string& phase, Row& row) {
    RankUsage usage = fleet_->usage(control());
    add_rank_memory(row, phase, usage.most);
    return usage;
  }
  // Resident memory of all helper processes.
  std::int64_t helper_bytes() {
    return process_memory(tokenizer_.process().pid()).resident_bytes + rewards_.resident_bytes() +
           selection_.resident_bytes() + (generation_ ? generation_->resident_bytes() : 0);
  }
  bool is_last(std::int64_t id) const { return id + 1 == *config_.data.num_rollout; }
  Deadline control() const { return Deadline::after(config_.cluster.control_timeout_seconds); }

  Interrupts interrupts_;  // stands before anything is started
  Config config_;
  std::optional<Resume> resume_;
  RewardMaker rewards_;
  GroupSelection selection_;
  ConstantReward constant_reward_;
  TokenizerProcess tokenizer_;
  Progress progress_;
  std::vector<Prompt> prompts_;
  std::vector<EvaluationSet> evaluation_;
  std::optional<PromptOrder> order_;
  std::vector<std::unique_ptr<Sink>> sinks_;
  std::optional<Fleet> fleet_;
  std::unique_ptr<FunctionPool> generation_;  // null: the engines' own answers
  std::optional<RolloutMaker> maker_;
  std::int64_t skipped_steps_ = 0;    // in a row, up to the last one
  Records records_;                   // of a run that continues
  bool checked_ = false;              // open has come to where ranks start
  bool restoring_ = false;            // the ranks read the checkpoint
  std::int64_t first_ = 0;            // rollout of this process
  std::int64_t done_ = -1;            // last rollout whose step is whole
  std::int64_t saved_ = -1;           // last rollout that a checkpoint holds
  Json order_after_step_;             // state of order_ after step done_ and what is ahead
  std::int64_t trainer_version_ = 1;  // of the trainer's weights: one more a rollout
  std::int64_t served_version_ = 0;   // of the engines'
  std::atomic<bool> giving_up_ = false;
  std::optional<DrawnGroups> next_;  // the next step's rollout, made ahead
  std::atomic<bool> must_finish_ahead_ = false;
  // Makes it; nothing else generates or draws meanwhile. Last: its thread uses what is above.
  Ahead<std::optional<DrawnGroups>> ahead_;
};

void TrainLoop::load_data(std::int64_t vocab_size) {
  const DataConfig& d = config_.data;
  const PromptSet set = load_prompts(train_prompt_options(config_, vocab_size), tokenizer_);
  if (rewards_.rule()) check_labels(d.prompt_data, set.prompts, *rewards_.rule());
  prompts_ = set.prompts;
  if (config_.debug.debug_train_only)
    TD_LOG(info, "recorded rollouts are trained on: nothing is generated, nothing evaluated");
  else
    evaluation_ = load_evaluation_sets(config_, vocab_size, tokenizer_, rewards_.rule());
  for (const auto& line : resolve_num_rollout(config_, static_cast<std::int64_t>(prompts_.size())))
    TD_LOG(info, "{}", line);
  order_.emplace(prompts_.size(), static_cast<std::uint64_t>(d.rollout_seed), d.rollout_shuffle);
}

// The driver's part of the checkpoint: where the run goes on, and its records cut back to there.
void TrainLoop::restore_data() {
  const std::string& folder = config_.logging.run_dir;
  if (resume_ && !config_.checkpoint.finetune) {
    order_->restore(resume_->run.prompt_order, resume_->folder + "/state.json");
    done_ = saved_ = resume_->rollout_id();
    skipped_steps_ = resume_->run.skipped_steps;
    trainer_version_ = resume_->run.weight_version;
    first_ = done_ + 1;
    if (!resume_->run.ahead.is_null()) {
      next_ = load_ahead(resume_->folder, resume_->run.ahead);
      if (config_.rollout.async_steps == 0 && !config_.algorithm.uses_tis())
        TD_LOG(warn,
               "step {}: its rollout comes from the checkpoint and was written by older weights; "
               "without --async-steps nothing corrects for that in this one step",
               first_ + 1);
    }
  }
  order_after_step_ = order_->save();
  if (config_.checkpoint.load.empty() || config_.checkpoint.finetune) return;
  records_ = cut_records(folder, resume_ ? done_ : kBeforeAll);
  const std::string removed =
      records_.removed_rows > 0 ? fmt::format("; {} rows of later steps removed from metrics.jsonl",
                                              records_.removed_rows)
                                : "";
  if (!resume_)
    TD_LOG(info, "{}: no checkpoint yet, the run begins at step 1{}", config_.checkpoint.load,
           removed);
  else
    TD_LOG(info, "{}: {} of {} steps are done, {}{}", resume_->folder, first_,
           *config_.data.num_rollout,
           all_done() ? "all that --num-rollout asks for"
                      : fmt::format("the run goes on with step {}", first_ + 1),
           removed);
  if (resume_ && records_.num_steps < first_)
    TD_LOG(warn,
           "{}/metrics.jsonl: has rows of {} of the {} steps that are done; the others' are "
           "not made again",
           folder, records_.num_steps, first_);
  for (EvaluationSet& set : evaluation_)
    if (const auto first = records_.first.find(set.name); first != records_.first.end())
      set.first = first->second;
}

// Room for max_running_requests samples of the longest prompt and answer, unless given. Every
// prompt must fit the model, and one sample the cache: said now, not at the step that draws it.
void TrainLoop::size_kv_cache(const ModelConfig& model) {
  std::size_t prompt = 0;
  for (const Prompt& p : prompts_) prompt = std::max(prompt, p.ids.size());
  for (const EvaluationSet& set : evaluation_)
    for (const Prompt& p : set.prompts) prompt = std::max(prompt, p.ids.size());
  const auto longest_prompt = static_cast<std::int64_t>(prompt);
  const std::int64_t answer = longest_answer(config_), context = model.max_position_embeddings;
  const std::int64_t longest = longest_sample(config_, model, longest_prompt);
  if (model.has_longrope() && !config_.rollout.rollout_max_context_len) {
    config_.rollout.rollout_max_context_len = longest;
    TD_LOG(info,
           "rollout_max_context_len = {} (prompt {} + answer {}): long rope turns all sequences of "
           "a run by the factors that suit its longest",
           longest, prompt, answer);
  }
  if (config_.debug.debug_train_only) {
    config_.engine.kv_cache_tokens = 16;
    return;
  }
  if (longest_prompt + answer > context)
    TD_LOG(
        warn,
        "the longest prompt of {} tokens and an answer of {} are more than the model's context of "
        "{}: answers to long prompts are cut there, as truncated",
        prompt, answer, context);
  if (config_.engine.kv_cache_tokens) return;
  const std::int64_t tokens = default_kv_cache_tokens(config_, longest);
  const std::int64_t requests = config_.engine.max_running_requests;
  config_.engine.kv_cache_tokens = tokens;
  TD_LOG(info,
         "kv_cache_tokens = {} (max_running_requests {} x {} blocks of 16: prompt {} + answer {})",
         tokens, requests, tokens / requests / 16, prompt, answer);
}

bool TrainLoop::open() {
  const std::string& folder = config_.logging.run_dir;
  const Placement placement = make_placement(config_.cluster, resources_of(config_));
  if (!config_.debug.debug_train_only) {
    rewards_.check();
    selection_.check();
  }
  const ModelConfig model = read_model_config(config_.model.hf_checkpoint);
  load_data(model.vocab_size);
  restore_data();
  if (all_done() && config_.checkpoint.save_hf.empty() && !owes_evaluation()) return false;
  check_engine_width(config_, model);
  check_stop_ids(config_, model);
  check_recordings();
  size_kv_cache(model);
  if (!config_.checkpoint.save_hf.empty()) {
    check_hf_target(save_folder());
    check_save_hf(config_);
  }
  checked_ = true;
  if (first_ > 0)
    for (const auto& line : config_changes(resume_->run.config, config_))
      TD_LOG(warn, "differs from the saved run: {}", line);
  if (first_ > 0 && resume_->run.prompts_xxh3 != prompts_xxh3(prompts_))
    TD_LOG(warn, "differs from the saved run: as many prompts, but not all of them are the same");
  write_file_atomic(folder + "/config.json", dump_json_pretty(to_json(config_)));
  sinks_.push_back(std::make_unique<JsonlSink>(folder + "/metrics.jsonl"));
  sinks_.push_back(std::make_unique<ConsoleSink>(*config_.data.num_rollout));
  if (config_.logging.use_tensorboard)
    sinks_.push_back(std::make_unique<TensorBoardSink>(folder + "/tensorboard", first_));
  if (config_.logging.save_rollouts) create_folders(folder + "/rollouts");
  fleet_.emplace(config_, placement);
  if (!config_.debug.debug_train_only) {
    std::vector<std::string> addresses;
    for (const EngineClient* engine : fleet_->engines())
      addresses.push_back(fmt::format("{}:{}", engine->address().host, engine->address().port));
    generation_ = make_generation(config_, addresses, fleet_->engines().front()->address().token);
  }
  maker_.emplace(fleet_->engines(), tokenizer_, progress_, rewards_, generation_.get(),
                 [this] { return stops_generating(); });
  restore_ranks();
  return true;
}

// The ranks' part of the checkpoint. It reaches the engines by the first weight update, under the
// version that they served when it was made.
void TrainLoop::restore_ranks() {
  if (!resume_) return;
  const double start = monotonic_seconds();
  const CheckpointConfig& c = config_.checkpoint;
  restoring_ = true;
  fleet_->trainer().load(resume_->folder, c.load_optim && !c.finetune, !c.finetune, control());
  restoring_ = false;
  TD_LOG(info, "{}: {} loaded in {}", resume_->folder,
         c.finetune     ? "weights, for a run of their own,"
         : c.load_optim ? "weights and optimizer"
                        : "weights without optimizer",
         human_seconds(monotonic_seconds() - start));
}

// --save-hf with its {rollout_id} filled in, absolute.
std::string TrainLoop::save_folder() const {
  return std::filesystem::absolute(
             fill_rollout_id(config_.checkpoint.save_hf, *config_.data.num_rollout - 1))
      .string();
}

void TrainLoop::write_row(std::int64_t id, const Row& row) {
  for (auto& sink : sinks_) sink->write(id, row);
}

void TrainLoop::save_rollout(std::int64_t id, const TrainBatch& batch) {
  const std::string& debug = config_.debug.save_debug_rollout_data;
  if (!config_.logging.save_rollouts && debug.empty()) return;
  const std::string bytes = encode_batch(batch);
  if (config_.logging.save_rollouts)
    write_file_atomic(
        fmt::format("{}/rollouts/rollout_{:07d}.safetensors", config_.logging.run_dir, id), bytes);
  if (debug.empty()) return;
  const std::string path = std::filesystem::absolute(fill_rollout_id(debug, id)).string();
  create_folders(std::filesystem::path(path).parent_path().string());
  write_file_atomic(path, bytes);
}

// The samples that --load-debug-rollout-data recorded.
std::vector<Sample> TrainLoop::recorded_samples(std::int64_t id) const {
  const std::string path = fill_rollout_id(config_.debug.load_debug_rollout_data, id);
  const MappedFile file(path);
  return decode_batch(file.bytes(), path).samples;
}

// Every recording that the run will ask for is there.
void TrainLoop::check_recordings() const {
  if (!config_.debug.debug_train_only) return;
  for (std::int64_t id = first_; id < *config_.data.num_rollout; ++id) {
    const std::string path = fill_rollout_id(config_.debug.load_debug_rollout_data, id);
    TD_CHECK(file_exists(path),
             "--load-debug-rollout-data: {} does not exist, and --num-rollout {} asks for the "
             "rollouts {} to {}",
             path, *config_.data.num_rollout, first_, *config_.data.num_rollout - 1);
  }
}

// Prompts drawn, answered, rewarded and chosen; nothing if interrupted.
std::optional<DrawnGroups> TrainLoop::make_rollout(std::int64_t id, bool shown) {
  const double start = monotonic_seconds();
  if (config_.debug.debug_train_only) {
    DrawnGroups recorded{.samples = recorded_samples(id)};
    const std::int64_t wanted =
        *config_.rollout.rollout_batch_size * config_.rollout.n_samples_per_prompt;
    if (static_cast<std::int64_t>(recorded.samples.size()) != wanted)
      TD_LOG(warn, "step {}: {} recorded samples are trained on, the flags would generate {}",
             id + 1, recorded.samples.size(), wanted);
    recorded.seconds = monotonic_seconds() - start;
    return recorded;
  }
  const RolloutSetup setup{.phase = fmt::format("step {} rollout", id + 1),
                           .shown = shown,
                           .samples_per_prompt = config_.rollout.n_samples_per_prompt,
                           .params = rollout_sampling(config_),
                           .skip_special_tokens = config_.rollout.rollout_skip_special_tokens,
                           .mask_truncated = config_.rollout.mask_truncated_samples,
                           .max_context = config_.rollout.rollout_max_context_len.value_or(0),
                           .reward_key = {},
                           .timeout_seconds = config_.engine.request_timeout_seconds};
  auto drawn = draw_groups(config_, *order_, prompts_, *maker_, setup, selection_);
  if (!drawn) return std::nullopt;
  if (const auto notice = constant_reward_.step(drawn->samples))
    TD_LOG(warn, "step {}: {}", id + 1, *notice);
  drawn->seconds = monotonic_seconds() - start;
  return drawn;
}

// That of a step, made ahead or now.
std::optional<DrawnGroups> TrainLoop::take_rollout(std::int64_t id) {
  finish_ahead();
  if (next_) return std::exchange(next_, std::nullopt);
  return make_rollout(id, true);
}

void TrainLoop::start_ahead(std::int64_t id) {
  // An interrupted run saves the step at hand, and the checkpoint needs what is ahead of it.
  must_finish_ahead_ = !config_.checkpoint.save.empty();
  ahead_.start([this, id] { return make_rollout(id, false); });
}

void TrainLoop::finish_ahead() {
  if (!ahead_.running()) return;
  if (interrupted() && must_finish_ahead_ && !ahead_.finished())
    TD_LOG(info,
           "interrupted: the rollout that is ahead is finished for the checkpoint; a second "
           "Ctrl-C ends the run at once");
  next_ = ahead_.take();
  must_finish_ahead_ = false;
  order_after_step_ = order_->save();
}

// Samples with their advantages.
TrainBatch TrainLoop::make_batch(DrawnGroups rollout, Row& row) {
  TrainBatch batch{.samples = std::move(rollout.samples),
                   .advantages = {},
                   .trainer_log_probs = {},
                   .trainer_version = trainer_version_};
  const GroupAdvantages advantages = set_advantages(batch, config_.algorithm);
  add_rollout_metrics(row, batch.samples, advantages, rollout.seconds,
                      config_.cluster.rollout_num_gpus.value());
  add_version_metrics(row, batch.samples, trainer_version_);
  if (!config_.debug.debug_train_only) add_selection_metrics(row, rollout);
  return batch;
}

// Answers are at most as old as the schedule says: those of a rollout ahead were begun before the
// step before it, and the engines' weights are up to an interval older than the trainer's. Tokens
// that are not trained on may be nobody's: a generate function's own words.
void TrainLoop::check_staleness(std::int64_t id, std::span<const Sample> samples) const {
  if (config_.debug.debug_train_only || config_.debug.debug_rollout_only) return;
  // The rollout that a checkpoint holds was made by the settings of the run that saved it.
  if (resume_ && id == first_ && !resume_->run.ahead.is_null()) return;
  const std::int64_t most =
      config_.rollout.async_steps + config_.transfer.update_weights_interval - 1;
  for (const Sample& s : samples)
    for (std::size_t i = 0; i < s.weight_versions.size(); ++i) {
      if (!s.loss_mask[i]) continue;
      const std::int64_t version = s.weight_versions[i];
      TD_CHECK(version > trainer_version_ || trainer_version_ - version <= most,
               "step {}: sample {} has a token of weight version {}, the trainer is at {}; at most "
               "{} versions may lie between (--async-steps {}, --update-weights-interval {})",
               id + 1, s.id, version, trainer_version_, most, config_.rollout.async_steps,
               config_.transfer.update_weights_interval);
    }
}

void TrainLoop::train(std::int64_t id, const TrainBatch& batch, Row& row) {
  progress_.begin(fmt::format("step {} train", id + 1), 0, "micro-batches");  // total comes later
  std::int64_t shown = 0;
  const double start = monotonic_seconds();
  const TrainResult trained = fleet_->trainer().train(
      batch, *config_.data.num_rollout * config_.train.num_steps_per_rollout.value(), control(),
      [&](std::int64_t done, std::int64_t total) {
        if (ahead_.finished()) finish_ahead();  // a fault of the engines ends the run now
        progress_.set_total(total);
        if (done > shown) progress_.advance(done - shown);
        shown = std::max(shown, done);
      });
  progress_.end();
  add_train_metrics(row, trained, monotonic_seconds() - start, is_first_after_update(id));
  check_skipped(id, trained);
  check_gap(id, trained);
  check_ci(id, trained);
  ++trainer_version_;
  if (const auto every = config_.algorithm.ref_update_interval; every && (id + 1) % *every == 0) {
    fleet_->trainer().update_reference(control());
    TD_LOG(info, "step {}: the present model is the reference from here on", id + 1);
  }
}

// Where both sides compute the same bits a gap has another cause, which the reader should know.
void TrainLoop::check_gap(std::int64_t id, const TrainResult& trained) const {
  if (!config_.compute.is_exact() || config_.train.ci_test || config_.debug.debug_train_only)
    return;
  for (const StepMetrics& m : trained.steps) {
    if (m.on_policy_samples == 0 || m.rollout_abs_diff_max == 0.0) continue;
    TD_LOG(warn,
           "step {}: log-probabilities of the rollout are up to {} off the trainer's, of the same "
           "weights, though both compute the same bits: {}",
           id + 1, m.rollout_abs_diff_max,
           config_.rollout.custom_generate_function_path.empty()
               ? "please report this, with the output of `tandem selftest` on this model"
               : "the generate function trains on tokens that it did not get from this engine, or "
                 "changed their log-probabilities; mask what others wrote");
    return;
  }
}

void TrainLoop::check_ci(std::int64_t id, const TrainResult& trained) const {
  if (!config_.train.ci_test) return;
  const auto faults =
      ci_faults(config_, trained,
                {.first_of_run = id == 0 && !resume_, .recorded = config_.debug.debug_train_only});
  TD_CHECK(faults.empty(), "--ci-test: step {}, weight version {}:\n  {}", id + 1, trainer_version_,
           fmt::join(faults, "\n  "));
}

// The engines serve the trainer's present weights on return.
UpdateTimes TrainLoop::update_weights() {
  const TransferConfig& t = config_.transfer;
  const TrainConfig& train = config_.train;
  Fleet::UpdateCall call{.version = trainer_version_,
                         .since_write = config_.rollout.async_steps == 0,
                         .check = t.check_weight_update_equal ||
                                  (train.ci_test && !train.ci_disable_weight_update_checker),
                         .pause = {},
                         .moves_aside = t.update_weight_double_buffer};
  if (ahead_.running()) call.pause = pause_mode(t.pause_generation_mode);
  const UpdateTimes times = fleet_->update_weights(call, control());
  served_version_ = trainer_version_;
  return times;
}

// False: interrupted before anything was trained on; the step has not been.
bool TrainLoop::step(std::int64_t id) {
  const double start = monotonic_seconds();
  Row row(train_declarations());
  const RankUsage before = fleet_->usage(control());
  auto rollout = take_rollout(id);
  if (!rollout) return false;
  const TrainBatch batch = make_batch(std::move(*rollout), row);
  check_staleness(id, batch.samples);
  save_rollout(id, batch);
  RankUsage after = note_memory("rollout", row);
  order_after_step_ = order_->save();
  if (config_.rollout.async_steps > 0 && !is_last(id)) start_ahead(id + 1);
  if (!config_.debug.debug_rollout_only) {
    train(id, batch, row);
    note_memory("train", row);
    const double trained = monotonic_seconds();
    if (!config_.transfer.update_weights_in_flight) finish_ahead();
    if (config_.rollout.async_steps > 0)
      row.add("perf/rollout_wait_time", monotonic_seconds() - trained);
    if (updates_after(id)) add_update_metrics(row, update_weights());
    after = note_memory("update", row);
  }
  if (!ahead_.running()) add_driver_memory(row, helper_bytes());  // whose thread uses the helpers
  const double seconds = monotonic_seconds() - start;
  row.add("perf/step_time", seconds);
  add_usage_metrics(row, before, after, seconds);
  if (row.has("perf/train_time"))
    row.add("perf/train_wait_time", seconds - row.value("perf/train_time"));
  done_ = id;
  std::unique_ptr<Parts> parts;
  if (saves_after(id)) {
    parts = write_parts(id);
    row.add("perf/save_model_time", monotonic_seconds() - start - seconds);
  }
  write_row(id, row);
  if (parts) commit(*parts);
  return true;
}

bool TrainLoop::saves_after(std::int64_t id) const {
  const CheckpointConfig& c = config_.checkpoint;
  return !c.save.empty() &&
         (is_last(id) || interrupted() || (c.save_interval && (id + 1) % *c.save_interval == 0));
}

std::unique_ptr<TrainLoop::Parts> TrainLoop::write_parts(std::int64_t id) {
  namespace fs = std::filesystem;
  const std::string root = fs::absolute(config_.checkpoint.save).lexically_normal().string();
  finish_ahead();
  auto parts = std::unique_ptr<Parts>(new Parts{.writer = {root, id}, .state = {}});
  if (served_version_ != trainer_version_ && !config_.debug.debug_rollout_only)
    TD_LOG(warn,
           "the checkpoint of step {} lies between two weight updates: a run that continues from "
           "it serves its weights at once, an unbroken one {} rollouts later",
           id + 1, config_.transfer.update_weights_interval - (trainer_version_ - served_version_));
  const SavedParts saved =
      fleet_->trainer().save(parts->writer.folder(), config_.checkpoint.save_optim, control());
  const RunState run{
      .weight_version = trainer_version_,
      .prompt_order = order_after_step_,
      .skipped_steps = skipped_steps_,
      .prompts_xxh3 = prompts_xxh3(prompts_),
      .run_dir = fs::absolute(config_.logging.run_dir).lexically_normal().lexically_relative(root),
      .config = to_json(config_),
      .ahead = next_ ? save_ahead(parts->writer.folder(), *next_) : Json()};
  parts->state = {.rollout_id = id,
                  .optimizer_steps = saved.optimizer_steps,
                  .files = saved.files,
                  .run = to_json(run)};
  return parts;
}

void TrainLoop::commit(Parts& parts) {
  const CheckpointConfig& c = config_.checkpoint;
  const std::int64_t id = parts.state.rollout_id;
  parts.writer.commit(parts.state);
  saved_ = id;
  TD_LOG(info, "saved {}", checkpoint_folder(c.save, id));
  for (const std::int64_t old :
       checkpoints_to_remove(checkpoint_ids(c.save), id, c.save_keep_last, c.save_retain_interval))
    remove_checkpoint(c.save, old);
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
  const auto interval = config_.evaluate.eval_interval;
  return !evaluation_.empty() && (is_last(id) || (interval && (id + 1) % *interval == 0));
}

// False: interrupted; a run that continues does it again.
bool TrainLoop::evaluate_all(std::int64_t id) {
  Row row(train_declarations());
  for (EvaluationSet& set : evaluation_) {
    if (!evaluate(set, config_, *maker_, row)) return false;
    if (id < 0) set.first = set.last;
    console_line(fmt::format("evaluation '{}': mean reward {:.3f} over {} prompts", set.name,
                             set.last, set.prompts.size()));
  }
  for (auto& sink : sinks_)
    if (!dynamic_cast<ConsoleSink*>(sink.get())) sink->write(id, row);
  return true;
}

bool TrainLoop::run() {
  interrupts_.end_in_order();
  update_weights();
  bool whole = true;
  if (first_ == 0 && !evaluation_.empty() && !config_.evaluate.skip_eval_before_train)
    whole = evaluate_all(-1);
  if (owes_evaluation()) whole = evaluate_all(first_ - 1);
  for (std::int64_t id = first_; whole && id < *config_.data.num_rollout; ++id) {
    whole = !interrupted() && step(id);
    if (!whole || !evaluates_after(id)) continue;
    finish_ahead();
    whole = evaluate_all(id);
  }
  if (!whole) {
    end_early();
    return false;
  }
  if (!config_.checkpoint.save_hf.empty()) {
    fleet_->trainer().save_hf(save_folder(), control());
    TD_LOG(info, "{}: the trained model, a Hugging Face folder", save_folder());
  }
  for (const EvaluationSet& set : evaluation_)
    console_line(evaluation_block(summarize(set, config_.logging.run_dir)));
  if (evaluation_.empty()) console_line("run folder: " + config_.logging.run_dir);
  return true;
}

// After an interrupt: keeps what is done, if that was asked for.
void TrainLoop::end_early() {
  const std::string& save = config_.checkpoint.save;
  const std::string total =
      fmt::format("{} of {} steps done", done_ + 1, *config_.data.num_rollout);
  if (!save.empty() && done_ > saved_) {
    finish_ahead();
    // What else they generate is not wanted any more.
    for (EngineClient* engine : fleet_->engines()) engine->abort_all(control());
    commit(*write_parts(done_));
  }
  if (saved_ >= 0 && saved_ == done_)
    console_line(fmt::format("interrupted: {}; --load {} goes on from there", total,
                             save.empty() ? resume_->root : save));
  else
    console_line(fmt::format("interrupted: {}, nothing saved{}", total,
                             save.empty() && done_ >= 0 ? " (no --save was given)" : ""));
}

std::string TrainLoop::with_cause(const std::string& what) {
  std::string text = what;
  if (restoring_ && !checkpoint_faults(resume_->folder, Look::at_all_bytes).empty())
    text += fallback_advice(resume_->root, resume_->rollout_id());
  if (fleet_)
    for (const RankDeath& death : fleet_->deaths(Deadline::after(2))) text += "\n" + death.text;
  return text;
}

}  // namespace

namespace {

// The fault that stopped a run before its start, and those that would have been next.
std::string with_other_faults(const std::string& first, const Config& given) {
  std::string text = first;
  for (const std::string& other : faults_before_start(given, true))
    if (first.find(other) == first.npos && other.find(first) == other.npos)
      text += "\nalso: " + other;
  return text;
}

}  // namespace

int run_train(Config config, const std::vector<std::string>& notes) {
  const Config given = config;
  auto resume = find_resume(config);
  const bool continues = !config.checkpoint.load.empty() && !config.checkpoint.finetune;
  if (continues && resume && config.logging.run_dir.empty())
    config.logging.run_dir = saved_run_dir(*resume);
  const auto resolved = resolve(config, this_host());
  const std::string& folder = config.logging.run_dir;
  TD_CHECK(continues || !file_exists(folder + "/metrics.jsonl"),
           "--run-dir: {} already holds a run; name another folder, remove it, or continue it with "
           "--load",
           folder);
  check_save_folder(config, resume);
  std::signal(SIGPIPE, SIG_IGN);  // a console that is gone is no reason to end the run
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error with its name
  create_folders(folder + "/logs");
  const FolderLock lock(folder, "--run-dir");
  std::optional<FolderLock> save_lock;
  if (const std::string& save = config.checkpoint.save; !save.empty() && !same_path(save, folder)) {
    create_folders(save);
    save_lock.emplace(save, "--save");
  }
  start_log({.role = "",
             .level = config.logging.log_level,
             .console_fd = 1,
             .file = folder + "/log.txt"});
  TD_LOG(info, "run folder: {}", folder);
  for (const auto& line : notes) TD_LOG(info, "{}", line);
  for (const auto& line : resolved) TD_LOG(info, "{}", line);
  TrainLoop loop(std::move(config), std::move(resume));
  bool whole = true;
  try {
    if (loop.open())
      whole = loop.run();
    else
      loop.say_all_done();
  } catch (const Error& e) {
    // The rank's own last words are the cause; without them only its closed socket would show.
    throw Error(loop.is_checked() ? loop.with_cause(e.what()) : with_other_faults(e.what(), given));
  }
  loop.close();
  return whole ? 0 : kInterruptedExitCode;
}

}  // namespace tandem
