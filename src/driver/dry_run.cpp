// See dry_run.h. Each part stands alone: what it needs of another it gets as an optional, so that a
// fault in one does not hide those of the next.
#include "driver/dry_run.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <filesystem>
#include <optional>

#include "base/check.h"
#include "base/file.h"
#include "base/memory.h"
#include "base/text.h"
#include "checkpoint/hf_folder.h"
#include "config/resolve.h"
#include "config/validate.h"
#include "data/prompts.h"
#include "driver/evaluate.h"
#include "driver/memory_plan.h"
#include "driver/placement.h"
#include "driver/preflight.h"
#include "driver/prompt_options.h"
#include "driver/resume.h"
#include "driver/rewards.h"
#include "driver/rollout.h"
#include "driver/sampling.h"
#include "http/server.h"
#include "rl/rewards.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kFirstRows = 64;
constexpr std::size_t kShownFaults = 10;  // of one file

// Those of `all` that are not among `told`.
std::vector<BadRow> without(std::vector<BadRow> all, const std::vector<BadRow>& told) {
  std::erase_if(all, [&](const BadRow& row) {
    return std::ranges::any_of(told, [&](const BadRow& t) { return t.line == row.line; });
  });
  return all;
}

class DryRun {
 public:
  DryRun(Config config, bool sound, bool reports)
      : config_(std::move(config)), sound_(sound), reports_(reports) {}

  void run();
  const std::vector<std::string>& faults() const { return faults_; }

 private:
  // The work's Error becomes a fault; whether there was none.
  template <typename Work>
  bool attempt(Work&& work) {
    try {
      work();
      return true;
    } catch (const Error& e) {
      faults_.push_back(e.what());
      return false;
    }
  }
  template <typename... Args>
  void say(std::string_view label, fmt::format_string<Args...> text, Args&&... args) {
    if (!reports_) return;
    fmt::print("  {:<14}{}\n", label, printable(fmt::format(text, std::forward<Args>(args)...)));
  }

  void check_model();
  void check_helper();
  void check_prompts();
  void tell_bad_rows(const std::string& file, const std::vector<BadRow>& bad);
  void check_set(const std::string& label, PromptFileOptions options);
  void check_functions();
  void check_batch();
  void check_placement();
  void check_ports();
  void check_folders();
  void check_free_space(const std::string& folder);
  void check_load();

  Config config_;
  bool sound_;  // the flags have no faults: derived values can be trusted
  bool reports_;
  std::vector<std::string> faults_;
  std::optional<ModelConfig> model_;
  std::optional<TokenizerProcess> tokenizer_;
  std::int64_t num_prompts_ = 0;     // of --prompt-data
  std::int64_t longest_prompt_ = 0;  // of the rows that were tokenised, of all sets
};

void DryRun::check_model() {
  const std::string& path = config_.model.hf_checkpoint;
  if (!fs::is_directory(path)) return;  // a fault of the flags already
  attempt([&] {
    const HfFolder folder = HfFolder::open(path);
    model_ = folder.config();
    std::int64_t parameters = 0;
    for (const std::string& name : folder.names())
      parameters += shape_elements(folder.tensor(name).shape);
    say("model", "{}, {} parameters in {}, context {} tokens", model_->architecture,
        human_count(static_cast<double>(parameters)),
        human_bytes(static_cast<double>(folder.total_bytes())), model_->max_position_embeddings);
    for (const std::string& notice : folder.notices()) say("", "{}", notice);
  });
}

void DryRun::check_helper() {
  if (!fs::is_directory(config_.model.hf_checkpoint)) return;
  const bool answers = attempt([&] {
    tokenizer_.emplace(TokenizerOptions{.folder = config_.model.hf_checkpoint,
                                        .chat_template_path = config_.data.chat_template_path});
    const Json info = tokenizer_->info();
    say("tokenizer", "{} tokens", dump_json(info.value("vocab_size", Json())));
  });
  if (!answers) tokenizer_.reset();
}

void DryRun::tell_bad_rows(const std::string& file, const std::vector<BadRow>& bad) {
  for (std::size_t i = 0; i < std::min(bad.size(), kShownFaults); ++i)
    faults_.push_back(
        fmt::format("{}: {} {}: {}", file, row_name(file), bad[i].line, bad[i].reason));
  if (bad.size() > kShownFaults)
    faults_.push_back(fmt::format("{}: {} more bad rows", file, bad.size() - kShownFaults));
}

// All rows are taken apart and their labels tried; the first are templated and tokenised.
void DryRun::check_set(const std::string& label, PromptFileOptions options) {
  const std::string file = prompt_file(options.path);
  if (!tokenizer_ || !fs::is_regular_file(file)) return;
  attempt([&] {
    options.first_rows = 0;
    options.skip_bad_rows = true;  // all of them are told
    PromptRows rows = read_prompt_rows(options);
    const bool skipped = config_.data.skip_bad_rows;
    if (!skipped) tell_bad_rows(file, rows.bad);
    if (skipped && !rows.bad.empty())
      say(label, "{}: {} bad rows are left out", file, rows.bad.size());
    if (sound_ && !config_.reward.uses_function()) {
      const RewardRule rule = parse_reward_rule(config_.reward.rm_type);
      for (const PromptRow& row : rows.rows)
        if (const auto fault = label_fault(rule, row.label))
          throw Error(fmt::format("{}: {} {}: {}", file, row_name(file), row.line, *fault));
    }
    options.first_rows = kFirstRows;
    options.may_be_empty = true;
    const PromptSet set = load_prompts(options, *tokenizer_);
    if (!skipped) tell_bad_rows(file, without(set.bad, rows.bad));
    if (label == "prompts") num_prompts_ = static_cast<std::int64_t>(rows.rows.size());
    if (set.prompts.empty()) {
      TD_CHECK(rows.rows.size() > kFirstRows, "{}: nothing left to train on: {}", options.path,
               set.summary());
      say(label, "{} rows of {}; none of the first {} is left: {}", rows.rows.size(), options.path,
          kFirstRows, set.summary());
      return;
    }
    std::size_t shortest = set.prompts.front().ids.size(), longest = 0;
    for (const Prompt& p : set.prompts) {
      shortest = std::min(shortest, p.ids.size());
      longest = std::max(longest, p.ids.size());
    }
    longest_prompt_ = std::max(longest_prompt_, static_cast<std::int64_t>(longest));
    say(label, "{} rows of {}; the first {} have {} to {} tokens{}", rows.rows.size(), options.path,
        std::min(kFirstRows, rows.rows.size()), shortest, longest,
        set.num_overlong > 0
            ? fmt::format(", {} of them are too long and left out", set.num_overlong)
            : "");
    say("", "the first: {}", one_line(set.prompts.front().text, 200));
  });
}

void DryRun::check_prompts() {
  const std::int64_t vocab = model_ ? model_->vocab_size : 0;
  check_set("prompts", train_prompt_options(config_, vocab));
  if (sound_ && model_) attempt([&] { check_stop_ids(config_, *model_); });
  const std::vector<std::string>& sets = config_.evaluate.eval_prompt_data;
  for (std::size_t i = 0; i + 1 < sets.size(); i += 2)
    check_set("evaluation", evaluation_prompt_options(config_, sets[i + 1], vocab));
}

// Users' functions are loaded, each in a process of its own, and not called.
void DryRun::check_functions() {
  if (!sound_) return;
  const auto check = [&](const std::string& path, auto&& load) {
    if (!path.empty() && attempt(load)) say("function", "{} can be loaded", path);
  };
  if (config_.reward.uses_function())
    check(config_.reward.custom_rm_path.empty() ? "remote_rm " + config_.reward.rm_url
                                                : config_.reward.custom_rm_path,
          [&] { RewardMaker(config_).check(); });
  check(config_.rollout.dynamic_sampling_filter_path, [&] { GroupSelection(config_).check(); });
  check(config_.rollout.custom_generate_function_path,
        [&] { make_generation(config_, {"127.0.0.1:1"}, ""); });
}

void DryRun::check_batch() {
  if (!sound_ || num_prompts_ == 0) return;
  attempt([&] {
    resolve_num_rollout(config_, num_prompts_);
    const std::int64_t prompts = *config_.rollout.rollout_batch_size;
    const std::int64_t n = config_.rollout.n_samples_per_prompt;
    const std::int64_t steps = *config_.train.num_steps_per_rollout;
    const std::int64_t rollouts = *config_.data.num_rollout;
    say("batch", "{} prompts x {} answers = {} samples a rollout, {} optimizer step{} of {}",
        prompts, n, prompts * n, steps, steps == 1 ? "" : "s", *config_.train.global_batch_size);
    say("", "{} rollouts, {:.1f} passes over the prompts", rollouts,
        static_cast<double>(rollouts * prompts) / static_cast<double>(num_prompts_));
  });
}

void DryRun::check_placement() {
  if (!sound_) return;
  attempt([&] {
    const Placement placement = make_placement(config_.cluster, resources_of(config_));
    say("placement", "{} rank{} of {} thread{}", placement.ranks.size(),
        placement.ranks.size() == 1 ? "" : "s", *config_.compute.threads_per_rank,
        *config_.compute.threads_per_rank == 1 ? "" : "s");
    const std::string map = placement.describe();
    for (const std::string_view line : split(trim(map), '\n')) say("", "{}", line);
    if (model_) check_engine_width(config_, *model_);
    if (!model_ || longest_prompt_ == 0) return;
    const std::int64_t answer = longest_answer(config_);
    const std::int64_t longest = longest_prompt_ + answer;
    if (longest > model_->max_position_embeddings)
      say("lengths", "prompt {} + answer {} = {}: answers are cut at the model's context of {}",
          longest_prompt_, answer, longest, model_->max_position_embeddings);
    const std::int64_t sample = longest_sample(config_, *model_, longest_prompt_);
    if (!config_.engine.kv_cache_tokens)
      config_.engine.kv_cache_tokens = default_kv_cache_tokens(config_, sample);
    const auto ranks = plan_memory(config_, *model_, placement, sample);
    const std::string table = memory_table(ranks);
    for (const std::string_view line : split(trim(table), '\n'))
      say(line.find("program") != line.npos ? "memory" : "", "{}", line);
    if (config_.compute.device != Device::cpu) return;
    std::int64_t needed = 0;
    for (const RankMemory& rank : ranks) needed += rank.train_bytes();
    const std::int64_t available = available_memory_bytes();
    say("", "{} of {} available", human_bytes(static_cast<double>(needed)),
        human_bytes(static_cast<double>(available)));
    TD_CHECK(available == 0 || needed <= available,
             "memory: about {} needed, {} available; use a smaller model, fewer ranks, a lower "
             "--max-tokens-per-gpu or --kv-cache-tokens",
             human_bytes(static_cast<double>(needed)), human_bytes(static_cast<double>(available)));
  });
}

// Ranks and driver listen on ports that the system picks, on loopback.
void DryRun::check_ports() {
  attempt([&] {
    http::Server server({.host = "127.0.0.1"});
    server.start();
    say("ports", "free ones of 127.0.0.1, such as {}", server.port());
    server.stop();
  });
}

// The nearest folder that is there, for asking about one that will be made.
std::string existing_parent(const std::string& path) {
  fs::path folder = fs::absolute(path).lexically_normal();
  while (!fs::exists(folder) && folder.has_parent_path() && folder != folder.parent_path())
    folder = folder.parent_path();
  return folder.string();
}

void DryRun::check_free_space(const std::string& folder) {
  const std::string parent = existing_parent(folder);
  struct statvfs disk {};
  if (!model_ || ::statvfs(parent.c_str(), &disk) != 0) return;
  std::int64_t elements = 0;
  for (const ExpectedTensor& tensor : expected_tensors(*model_))
    if (tensor.copy_of.empty()) elements += shape_elements(tensor.shape);
  const CheckpointConfig& c = config_.checkpoint;
  const auto one = static_cast<double>(elements * (c.save_optim ? 12 : 4));
  const double free = static_cast<double>(disk.f_bavail) * static_cast<double>(disk.f_frsize);
  const std::int64_t saves = c.save_interval && config_.data.num_rollout
                                 ? *config_.data.num_rollout / *c.save_interval + 1
                                 : 1;
  // While a new one is written the old ones are still there.
  const auto kept =
      static_cast<double>(std::min(saves, c.save_keep_last ? *c.save_keep_last + 1 : saves));
  say("checkpoints", "{} each, at most {} at a time in {}; {} free", human_bytes(one), kept, folder,
      human_bytes(free));
  TD_CHECK(one * kept <= free,
           "--save: {} x {} needed in {}, {} free; use --save-keep-last or "
           "another folder",
           kept, human_bytes(one), parent, human_bytes(free));
}

void DryRun::check_folders() {
  const auto writable = [&](const char* flag, const std::string& path) {
    const std::string parent = existing_parent(path);
    const std::string fault = fs::is_directory(parent) ? why_not_writable(parent) : "no folder";
    TD_CHECK(fault.empty(), "{}: {} cannot be made in {}: {}", flag, path, parent, fault);
  };
  if (!config_.logging.run_dir.empty()) {
    attempt([&] {
      say("run folder", "{}", config_.logging.run_dir);
      writable("--run-dir", config_.logging.run_dir);
      const bool continues = !config_.checkpoint.load.empty() && !config_.checkpoint.finetune;
      TD_CHECK(continues || !file_exists(config_.logging.run_dir + "/metrics.jsonl"),
               "--run-dir: {} already holds a run; name another folder or continue it with --load",
               config_.logging.run_dir);
    });
  }
  if (!config_.checkpoint.save.empty()) {
    attempt([&] {
      writable("--save", config_.checkpoint.save);
      check_free_space(config_.checkpoint.save);
    });
  }
  if (!config_.checkpoint.save_hf.empty())
    attempt([&] {
      writable("--save-hf", config_.checkpoint.save_hf);
      check_save_hf(config_);
    });
}

void DryRun::check_load() {
  const std::string& load = config_.checkpoint.load;
  if (load.empty()) return;
  if (!fs::is_directory(load) && !loads_where_it_saves(config_)) return;  // a fault of the flags
  attempt([&] {
    const auto resume = find_resume(config_);
    check_save_folder(config_, resume);
    if (!resume) {
      say("load", "{}: no checkpoint yet, the run begins", config_.checkpoint.load);
      return;
    }
    say("load", "{}: step {}, {} optimizer steps", resume->folder, resume->rollout_id() + 1,
        resume->checkpoint.optimizer_steps);
    if (sound_ && !config_.checkpoint.finetune)
      for (const std::string& line : config_changes(resume->run.config, config_))
        say("", "differs from the saved run: {}", line);
  });
}

void DryRun::run() {
  if (sound_) resolve(config_, this_host());
  check_model();
  check_helper();
  check_prompts();
  check_functions();
  check_batch();
  check_placement();
  check_ports();
  check_load();
  check_folders();
}

}  // namespace

std::vector<std::string> faults_before_start(Config config, bool sound) {
  start_log({.level = LogLevel::error});
  DryRun run(std::move(config), sound, false);
  run.run();
  return run.faults();
}

int dry_run(Config config, const Parsed& parsed) {
  start_log({.level = LogLevel::error});
  fmt::print("dry run: nothing is started\n");
  for (const std::string& note : parsed.notes) fmt::print("  {}\n", note);
  DryRun run(std::move(config), parsed.faults.empty(), true);
  run.run();
  std::vector<std::string> faults = parsed.faults;
  faults.insert(faults.end(), run.faults().begin(), run.faults().end());
  if (faults.empty()) {
    fmt::print("no faults\n");
    return 0;
  }
  fmt::print("{} fault{}:\n", faults.size(), faults.size() == 1 ? "" : "s");
  for (const std::string& fault : faults) fmt::print("  {}\n", printable(fault));
  return parsed.faults.empty() ? 1 : 2;
}

}  // namespace tandem
