// Checks over several flags at once. Every function appends to one list and looks at nothing but
// the config (missing_files aside), so a config can be judged anywhere.
#include "config/validate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <filesystem>
#include <numeric>
#include <set>
#include <utility>

#include "base/text.h"

namespace tandem {
namespace {

using Faults = std::vector<std::string>;

template <class... A>
void add(Faults& faults, fmt::format_string<A...> text, A&&... arguments) {
  faults.push_back(fmt::format(text, std::forward<A>(arguments)...));
}

void check_model(const ModelOptions& model, Faults& faults) {
  if (model.hf_checkpoint.empty()) {
    add(faults, "--hf-checkpoint: not given; give the folder of a model in Hugging Face form");
  }
}

// What is impossible whatever the machine has; driver/placement.h judges the rest.
void check_placement(const Config& config, Faults& faults) {
  const ClusterConfig& cluster = config.cluster;
  const std::vector<std::int64_t>& widths = cluster.rollout_num_gpus_of_engines;
  if (!cluster.colocate && !cluster.rollout_num_gpus && widths.empty()) {
    add(faults,
        "--rollout-num-gpus: not given; say how many ranks the engines have beside the trainer's, "
        "or add --colocate to share them");
  }
  const std::int64_t per_node = cluster.actor_num_gpus_per_node.value_or(1);
  const std::int64_t trainers = cluster.actor_num_nodes * per_node;
  const std::int64_t listed = std::accumulate(widths.begin(), widths.end(), std::int64_t{0});
  const std::int64_t engines =
      cluster.rollout_num_gpus.value_or(widths.empty() ? trainers : listed);
  const std::int64_t width = cluster.rollout_num_gpus_per_engine;
  if (!widths.empty() && (listed != engines || width != 1 || std::ranges::min(widths) < 1)) {
    add(faults,
        "--rollout-num-gpus-of-engines: found {}, together {}; numbers from 1 wanted that are "
        "together --rollout-num-gpus ({}), and no --rollout-num-gpus-per-engine beside them",
        fmt::join(widths, " "), listed, engines);
  }
  if (widths.empty() && width > 0 && engines % width != 0) {
    add(faults,
        "--rollout-num-gpus-per-engine: found {}, but {} engine ranks (--rollout-num-gpus) cannot "
        "be cut into engines of {}; give a divisor, or the ranks of each engine "
        "(--rollout-num-gpus-of-engines)",
        width, engines, width);
  }
  if (config.train.fsdp_reshard_after_forward && cluster.colocate) {
    add(faults,
        "--fsdp-reshard-after-forward: found with --colocate, where engines read the trainer's own "
        "weights, so every rank holds all of them; leave it out, or give the engines ranks of "
        "their "
        "own (--rollout-num-gpus, without --colocate)");
  }
  if (config.train.gradient_leaves < trainers) {
    add(faults,
        "--gradient-leaves: found {}, but {} trainer ranks need a leaf each; raise it to {}",
        config.train.gradient_leaves, trainers,
        std::bit_ceil(static_cast<std::uint64_t>(trainers)));
  }
  if (cluster.num_gpus_per_node && *cluster.num_gpus_per_node < per_node) {
    add(faults,
        "--num-gpus-per-node: found {}, but --actor-num-gpus-per-node asks for {} on a node; "
        "raise the one or lower the other",
        *cluster.num_gpus_per_node, per_node);
  }
  if (cluster.colocate && config.transfer.update_weight_transfer_mode != TransferMode::broadcast &&
      engines <= trainers) {
    add(faults,
        "--update-weight-transfer-mode: found {}, but with --colocate the copy is in place and "
        "nothing is sent; leave it out",
        name_of(config.transfer.update_weight_transfer_mode));
  }
}

void check_schedule(const Config& config, Faults& faults) {
  const std::int64_t interval = config.transfer.update_weights_interval;
  const bool ahead = config.rollout.async_steps > 0;
  if (ahead && config.cluster.colocate) {
    add(faults,
        "--async-steps: found {} with --colocate: there trainer and engine take turns on the same "
        "ranks and weights, so nothing can be generated while the trainer works; give the engines "
        "ranks of their own (--rollout-num-gpus, without --colocate)",
        config.rollout.async_steps);
  }
  if (ahead && !config.debug.load_debug_rollout_data.empty()) {
    add(faults,
        "--async-steps: found {} with --load-debug-rollout-data, which generates nothing; leave it "
        "out",
        config.rollout.async_steps);
  }
  if (ahead && config.algorithm.use_tis == false && !config.algorithm.use_rollout_logprobs &&
      !config.algorithm.use_rs) {
    add(faults,
        "--no-use-tis: with --async-steps answers come from older weights, and nothing else "
        "corrects for it; leave it out, or give --use-rollout-logprobs or --use-rs");
  }
  if (config.transfer.update_weights_in_flight && !ahead) {
    add(faults,
        "--update-weights-in-flight: without --async-steps no answer is being written at an "
        "update; add --async-steps 1 or leave it out");
  }
  if (config.transfer.update_weights_in_flight &&
      config.transfer.pause_generation_mode == PauseGeneration::abort &&
      !config.rollout.custom_generate_function_path.empty()) {
    add(faults,
        "--pause-generation-mode: found abort with --custom-generate-function-path: a function's "
        "call cannot be begun anew, so every answer that an update meets would be lost; use "
        "retract or in_place");
  }
  if (config.cluster.colocate && interval > 1) {
    add(faults,
        "--update-weights-interval: found {} with --colocate, where the optimizer writes the "
        "weights that the engine reads, so every step updates them; leave it out",
        interval);
  }
  const auto& save = config.checkpoint.save_interval;
  if (save && interval > 0 && *save % interval != 0) {
    add(faults,
        "--save-interval: found {} with update_weights_interval {}: a checkpoint between two "
        "updates could not say what the engines serve; use a multiple of {}",
        *save, interval, interval);
  }
  const auto& evaluate = config.evaluate.eval_interval;
  if (evaluate && interval > 0 && *evaluate % interval != 0) {
    add(faults,
        "--eval-interval: found {} with update_weights_interval {}: between two updates the engines "
        "serve older weights than the trainer has; use a multiple of {}",
        *evaluate, interval, interval);
  }
}

void check_data(const Config& config, Faults& faults) {
  const DataConfig& data = config.data;
  if (data.prompt_data.empty()) {
    add(faults, "--prompt-data: not given; give a JSONL file of prompts");
  }
  if (!data.num_rollout && !data.num_epoch) {
    add(faults, "--num-rollout: neither it nor --num-epoch is given; say how long the run is");
  }
  const RewardConfig& reward = config.reward;
  if (reward.rm_type.empty() && reward.custom_rm_path.empty()) {
    add(faults,
        "--rm-type: not given; use last-number, exact, math or remote_rm, or --custom-rm-path");
  } else if (!reward.uses_function() && data.label_key.empty()) {
    add(faults,
        "--label-key: not given, but --rm-type {} compares with labels; give the key of the label "
        "in the rows of --prompt-data",
        reward.rm_type);
  }
}

void check_reward(const Config& config, Faults& faults) {
  const RewardConfig& reward = config.reward;
  const bool remote = reward.rm_type == "remote_rm" && reward.custom_rm_path.empty();
  if (remote && !reward.rm_url.starts_with("http://") && !reward.rm_url.starts_with("https://")) {
    add(faults, "--rm-url: found '{}' with --rm-type remote_rm, wanted http://… or https://…",
        reward.rm_url);
  }
  if (reward.group_rm && reward.custom_rm_path.empty()) {
    add(faults, "--group-rm: only --custom-rm-path takes whole groups; leave it out");
  }
  if (!reward.uses_function() && config.rollout.custom_generate_function_path.empty()) {
    for (const auto& [flag, key] :
         {std::pair("--reward-key", &reward.reward_key),
          {"--eval-reward-key", &reward.eval_reward_key},
          {"--dynamic-sampling-reward-key", &config.rollout.dynamic_sampling_reward_key}}) {
      if (!key->empty()) {
        add(faults,
            "{}: found '{}', but the reward of --rm-type {} is a plain number; leave it out", flag,
            *key, reward.rm_type);
      }
    }
  }
  const auto& drawn = config.rollout.over_sampling_batch_size;
  if (drawn && config.rollout.dynamic_sampling_filter_path.empty()) {
    add(faults,
        "--over-sampling-batch-size: found {} without --dynamic-sampling-filter-path; every group "
        "is kept, so no further prompts are drawn",
        *drawn);
  } else if (drawn && config.rollout.rollout_batch_size &&
             *drawn < *config.rollout.rollout_batch_size) {
    add(faults,
        "--over-sampling-batch-size: found {}, below rollout_batch_size {}; give at least that",
        *drawn, *config.rollout.rollout_batch_size);
  }
}

// RB x N = GBS x steps: the samples of a rollout fill its optimizer steps exactly.
void check_batch(const Config& config, Faults& faults) {
  if (!config.rollout.rollout_batch_size) {
    add(faults, "--rollout-batch-size: not given; say how many prompts a rollout has");
    return;
  }
  const std::int64_t prompts = *config.rollout.rollout_batch_size;
  const std::int64_t n = config.rollout.n_samples_per_prompt;
  const std::int64_t samples = prompts * n;
  const std::string product =
      fmt::format("a rollout has {} samples (rollout_batch_size {} x n_samples_per_prompt {})",
                  samples, prompts, n);
  const auto& batch = config.train.global_batch_size;
  const auto& steps = config.train.num_steps_per_rollout;
  if (prompts < 1 || n < 1 || batch.value_or(1) < 1 || steps.value_or(1) < 1) return;
  if (batch && steps && *batch * *steps != samples) {
    add(faults,
        "--global-batch-size: found {} with num_steps_per_rollout {}: {} x {} = {}, but {}; leave "
        "--global-batch-size out or change one of the four",
        *batch, *steps, *batch, *steps, *batch * *steps, product);
  } else if (batch && *batch > samples) {
    add(faults,
        "--global-batch-size: found {}, but {}: not one optimizer step; use at most {}, or more "
        "prompts or samples a rollout",
        *batch, product, samples);
  } else if (batch && samples % *batch != 0) {
    add(faults,
        "--global-batch-size: found {}, but {}: {} steps and {} samples left over; use a divisor "
        "of {}",
        *batch, product, samples / *batch, samples % *batch, samples);
  } else if (steps && samples % *steps != 0) {
    add(faults, "--num-steps-per-rollout: found {}, but {}; use a divisor of {}", *steps, product,
        samples);
  }
}

void check_lengths(const RolloutConfig& rollout, const EngineConfig& engine, Faults& faults) {
  const auto& context = rollout.rollout_max_context_len;
  const auto& response = rollout.rollout_max_response_len;
  const auto& prompt = rollout.rollout_max_prompt_len;
  if (!response && !context) {
    add(faults, "--rollout-max-response-len: not given; say how many tokens an answer may have");
  }
  if (context && prompt && *prompt > *context - 1) {
    add(faults,
        "--rollout-max-prompt-len: found {}, wanted at most rollout_max_context_len - 1 = {}",
        *prompt, *context - 1);
  }
  if (context && response && *response > *context - 1) {
    add(faults,
        "--rollout-max-response-len: found {}, wanted at most rollout_max_context_len - 1 = {}",
        *response, *context - 1);
  }
  const std::int64_t longest = context ? *context : response.value_or(0) + prompt.value_or(1);
  if (engine.kv_cache_tokens && *engine.kv_cache_tokens < longest) {
    add(faults,
        "--kv-cache-tokens: found {}, but one sequence may have {} tokens; give at least that",
        *engine.kv_cache_tokens, longest);
  }
}

void check_kl(const AlgorithmConfig& a, Faults& faults) {
  if (a.kl_coef != 0.0 && a.kl_loss_coef != 0.0) {
    add(faults,
        "--kl-coef: found {} with kl_loss_coef {}: the KL would count twice; give one of the two",
        a.kl_coef, a.kl_loss_coef);
  }
  if (a.kl_coef != 0.0 && a.advantage_estimator != AdvantageEstimator::reinforce_plus_plus &&
      a.advantage_estimator != AdvantageEstimator::reinforce_plus_plus_baseline) {
    add(faults,
        "--kl-coef: found {}, but --advantage-estimator {} has no token rewards that it could "
        "enter; use --use-kl-loss --kl-loss-coef {}",
        a.kl_coef, name_of(a.advantage_estimator), a.kl_coef);
  }
  if (!a.use_kl_loss && a.kl_loss_coef != 0.0) {
    add(faults, "--kl-loss-coef: found {} without --use-kl-loss; add it", a.kl_loss_coef);
  }
  if (!a.use_kl_loss && a.use_unbiased_kl) {
    add(faults, "--use-unbiased-kl: weighs the KL in the loss; add --use-kl-loss");
  }
  if (!a.uses_reference() && a.ref_update_interval) {
    add(faults,
        "--ref-update-interval: found {}, but no KL against a reference is asked for; add "
        "--use-kl-loss or leave it out",
        *a.ref_update_interval);
  }
}

void check_mismatch(const AlgorithmConfig& a, Faults& faults) {
  if (a.use_rollout_logprobs && (a.uses_tis() || a.use_rs)) {
    add(faults,
        "--use-rollout-logprobs: with {} the engine's log-probabilities would be corrected against "
        "themselves; give one of the two",
        a.uses_tis() ? "--use-tis" : "--use-rs");
  }
  if (a.tis_clip_low > a.tis_clip) {
    add(faults, "--tis-clip-low: found {}, above tis_clip {}; give at most that", a.tis_clip_low,
        a.tis_clip);
  }
  const double upper = a.rs_upper_bound.value_or(a.tis_clip);
  if (a.use_rs && a.rs_lower_bound.value_or(1.0 / upper) > upper) {
    add(faults, "--rs-lower-bound: found {}, above rs_upper_bound {}; give at most that",
        a.rs_lower_bound.value_or(1.0 / upper), upper);
  }
}

void check_estimator(const Config& config, Faults& faults) {
  const AlgorithmConfig& a = config.algorithm;
  const AdvantageEstimator e = a.advantage_estimator;
  const bool by_group = e != AdvantageEstimator::reinforce_plus_plus;
  if (config.rollout.n_samples_per_prompt == 1 && a.rewards_normalization && by_group) {
    add(faults,
        "--n-samples-per-prompt: found 1 with --advantage-estimator {}: the advantage of a group "
        "of one is always 0; give 2 or more, or --disable-rewards-normalization",
        name_of(e));
  }
  if ((e == AdvantageEstimator::reinforce_plus_plus ||
       e == AdvantageEstimator::reinforce_plus_plus_baseline) &&
      !a.normalize_advantages) {
    add(faults,
        "--advantage-estimator: {} is defined with advantages whitened over the batch; add "
        "--normalize-advantages",
        name_of(e));
  }
  if (a.gamma != 1.0 && by_group) {
    add(faults, "--gamma: found {}, but --advantage-estimator {} does not discount; leave it out",
        a.gamma, name_of(e));
  }
}

void check_algorithm(const Config& config, Faults& faults) {
  const AlgorithmConfig& algorithm = config.algorithm;
  if (config.rollout.rollout_temperature < 1e-6) {  // what SGLang's face takes for greedy
    add(faults,
        "--rollout-temperature: found {}: greedy answers to one prompt are all the same, so a "
        "group "
        "teaches nothing; give a value above 1e-6, such as 1",
        config.rollout.rollout_temperature);
  }
  if (config.rollout.rollout_top_k == 1) {
    add(faults,
        "--rollout-top-k: found 1, which is greedy: answers to one prompt are all the same, so a "
        "group teaches nothing; give 2 or more, or leave it out");
  }
  for (const auto& [flag, k] :
       {std::pair("--rollout-top-k", config.rollout.rollout_top_k),
        std::pair("--eval-top-k", config.evaluate.eval_top_k.value_or(-1))}) {
    if (k == 0) add(faults, "{}: found 0, wanted -1 (all tokens) or at least 1", flag);
  }
  for (const std::string& text : config.rollout.rollout_stop) {
    if (text.empty() || text.size() > 1024) {
      add(faults, "--rollout-stop: found a text of {} bytes, wanted 1 to 1024", text.size());
    }
  }
  if (algorithm.eps_clip_high && *algorithm.eps_clip_high < algorithm.eps_clip) {
    add(faults, "--eps-clip-high: found {}, below eps_clip {}; give at least that, or leave it out",
        *algorithm.eps_clip_high, algorithm.eps_clip);
  }
  check_estimator(config, faults);
  check_kl(algorithm, faults);
  check_mismatch(algorithm, faults);
}

void check_optimizer(const OptimizerConfig& optimizer, Faults& faults) {
  if (optimizer.min_lr > optimizer.lr) {
    add(faults, "--min-lr: found {}, above lr {}; give at most that", optimizer.min_lr,
        optimizer.lr);
  }
  if (optimizer.lr_warmup_init > optimizer.lr) {
    add(faults, "--lr-warmup-init: found {}, above lr {}; give at most that",
        optimizer.lr_warmup_init, optimizer.lr);
  }
  if (optimizer.lr_decay_iters && *optimizer.lr_decay_iters <= optimizer.lr_warmup_iters) {
    add(faults, "--lr-decay-iters: found {}, wanted more than lr_warmup_iters {}",
        *optimizer.lr_decay_iters, optimizer.lr_warmup_iters);
  }
  if (optimizer.lr_warmup_fraction && optimizer.lr_warmup_iters > 0) {
    add(faults, "--lr-warmup-fraction: found {} with lr_warmup_iters {}; give one of the two",
        *optimizer.lr_warmup_fraction, optimizer.lr_warmup_iters);
  }
  const bool wsd = optimizer.lr_decay_style == LrDecayStyle::wsd;
  if (wsd && !optimizer.lr_wsd_decay_iters) {
    add(faults, "--lr-wsd-decay-iters: not given; say how many steps the decay of WSD takes");
  }
  if (!wsd && optimizer.lr_wsd_decay_iters) {
    add(faults, "--lr-wsd-decay-iters: found {} with lr_decay_style {}; only WSD reads it",
        *optimizer.lr_wsd_decay_iters, name_of(optimizer.lr_decay_style));
  }
}

void check_train(const TrainConfig& train, Faults& faults) {
  const std::int64_t leaves = train.gradient_leaves;
  if (leaves > 0 && (leaves & (leaves - 1)) != 0) {
    add(faults, "--gradient-leaves: found {}, wanted a power of two, such as 8", leaves);
  }
  const bool full = train.recompute_granularity == "full";
  if (full && train.recompute_method.empty()) {
    add(faults,
        "--recompute-granularity: full needs --recompute-method; give uniform (every layer) or "
        "block (the first --recompute-num-layers)");
  }
  if (!full && !train.gradient_checkpointing &&
      (!train.recompute_method.empty() || train.recompute_num_layers)) {
    add(faults, "{}: only --recompute-granularity full reads it; add that or leave it out",
        train.recompute_method.empty() ? "--recompute-num-layers" : "--recompute-method");
  }
  if (train.calculate_per_token_loss && train.constant_loss_length) {
    add(faults,
        "--constant-loss-length: found {} with --calculate-per-token-loss; give one of the two",
        *train.constant_loss_length);
  }
}

void check_evaluation(const EvaluateConfig& evaluate, Faults& faults) {
  const std::vector<std::string>& sets = evaluate.eval_prompt_data;
  if (evaluate.eval_interval && sets.empty()) {
    add(faults,
        "--eval-interval: found {} without --eval-prompt-data; give --eval-prompt-data NAME FILE",
        *evaluate.eval_interval);
  }
  if (sets.size() > 1 && sets.size() % 2 != 0) {
    add(faults,
        "--eval-prompt-data: found {} words, wanted pairs of a name and a file: NAME FILE ...",
        sets.size());
    return;
  }
  std::set<std::string> seen;
  for (std::size_t i = 0; i + 1 < sets.size(); i += 2) {
    if (!seen.insert(sets[i]).second) {
      add(faults, "--eval-prompt-data: found the name '{}' twice; give each set its own", sets[i]);
    }
  }
}

void check_pattern(std::string_view flag, const std::string& pattern, Faults& faults) {
  if (fill_rollout_id(pattern, 0).find_first_of("{}") != std::string::npos) {
    add(faults, "{}: found '{}', wanted a path in which only {{rollout_id}} stands in braces, once",
        flag, pattern);
  }
}

void check_output(const Config& config, Faults& faults) {
  const std::string& name = config.logging.run_name;
  if (name.find('/') != std::string::npos) {
    add(faults, "--run-name: found '{}', wanted a name without '/'; --run-dir takes a path", name);
  }
  check_pattern("--save-hf", config.checkpoint.save_hf, faults);
  check_pattern("--save-debug-rollout-data", config.debug.save_debug_rollout_data, faults);
  check_pattern("--load-debug-rollout-data", config.debug.load_debug_rollout_data, faults);
  const std::string& kept = config.debug.save_debug_rollout_data;
  if (!kept.empty() && fill_rollout_id(kept, 0) == kept && config.data.num_rollout != 1) {
    add(faults,
        "--save-debug-rollout-data: found '{}', one path for several rollouts, each of which would "
        "overwrite the one before; put {{rollout_id}} into it",
        kept);
  }
}

void check_checkpoint(const Config& config, Faults& faults) {
  const CheckpointConfig& c = config.checkpoint;
  if (c.load.empty()) {
    const std::pair<const char*, bool> needing[] = {{"--ckpt-step", c.ckpt_step.has_value()},
                                                    {"--finetune", c.finetune},
                                                    {"--no-load-optim", !c.load_optim}};
    for (const auto& [flag, given] : needing)
      if (given) add(faults, "{}: given without --load; give the folder of checkpoints", flag);
  }
  if (c.save.empty() && !c.save_interval) {
    const std::pair<const char*, bool> needing[] = {
        {"--save-keep-last", c.save_keep_last.has_value()},
        {"--save-retain-interval", c.save_retain_interval.has_value()},
        {"--no-save-optim", !c.save_optim}};
    for (const auto& [flag, given] : needing)
      if (given)
        add(faults, "{}: given, but nothing is saved; give --save or --save-interval", flag);
  }
}

void check_debug(const Config& config, Faults& faults) {
  const DebugConfig& d = config.debug;
  const bool train_only = d.debug_train_only || !d.load_debug_rollout_data.empty();
  if (d.debug_train_only && d.load_debug_rollout_data.empty()) {
    add(faults,
        "--debug-train-only: given without --load-debug-rollout-data; give the recorded rollouts");
  }
  if (!d.debug_rollout_only) return;
  if (train_only) {
    add(faults, "--debug-rollout-only: given with {}; give only one of them",
        d.debug_train_only ? "--debug-train-only" : "--load-debug-rollout-data");
  }
  const bool saves = !config.checkpoint.save.empty() || config.checkpoint.save_interval ||
                     !config.checkpoint.save_hf.empty();
  if (saves) {
    add(faults,
        "--debug-rollout-only: nothing is trained, so there is nothing to save; leave out --save, "
        "--save-interval and --save-hf");
  }
}

void look_for_model(std::string_view flag, const std::string& folder, Faults& faults) {
  if (folder.empty()) return;
  if (!std::filesystem::is_directory(folder)) {
    add(faults, "{}: '{}' is not a folder; give a model's folder in Hugging Face form", flag,
        folder);
  } else if (!std::filesystem::exists(folder + "/config.json")) {
    add(faults, "{}: '{}' has no config.json; give a model's folder in Hugging Face form", flag,
        folder);
  }
}

void look_for_file(std::string_view flag, const std::string& path, Faults& faults) {
  if (path.empty() || std::filesystem::is_regular_file(path)) return;
  add(faults, "{}: '{}' is not a file", flag, path);
}

}  // namespace

std::vector<std::string> validate(const Config& config) {
  Faults faults;
  check_model(config.model, faults);
  check_placement(config, faults);
  check_schedule(config, faults);
  check_data(config, faults);
  check_reward(config, faults);
  check_batch(config, faults);
  check_lengths(config.rollout, config.engine, faults);
  check_algorithm(config, faults);
  check_optimizer(config.optimizer, faults);
  check_train(config.train, faults);
  check_evaluation(config.evaluate, faults);
  check_output(config, faults);
  check_checkpoint(config, faults);
  check_debug(config, faults);
  return faults;
}

std::vector<std::string> validate(const GenerateConfig& config) {
  Faults faults;
  check_model(config.model, faults);
  if (config.prompt.empty() == config.input.empty()) {
    add(faults, "--prompt: {}; give either --prompt TEXT or --input FILE",
        config.prompt.empty() ? "neither it nor --input is given"
                              : "both it and --input are given");
  }
  if (config.min_new_tokens > config.max_new_tokens) {
    add(faults, "--min-new-tokens: found {}, above max_new_tokens {}", config.min_new_tokens,
        config.max_new_tokens);
  }
  if (config.apply_chat_template && !config.input.empty()) {
    add(faults, "--apply-chat-template: works with --prompt only; leave it out with --input");
  }
  return faults;
}

std::vector<std::string> validate(const ScoreConfig& config) {
  Faults faults;
  check_model(config.model, faults);
  if (config.input.empty()) {
    add(faults, "--input: not given; give a JSONL file with text or input_ids in each row");
  }
  if (config.gradients && config.through != Side::trainer) {
    add(faults, "--gradients: the engine has none; use --through trainer");
  }
  return faults;
}

std::vector<std::string> validate(const SelftestConfig& config) {
  Faults faults;
  check_model(config.model, faults);
  return faults;
}

std::vector<std::string> validate(const ServeConfig& config) {
  Faults faults;
  check_model(config.model, faults);
  if (config.host.empty()) add(faults, "--host: found '', wanted an address such as 127.0.0.1");
  return faults;
}

std::vector<std::string> missing_files(const Config& config) {
  Faults faults;
  look_for_model("--hf-checkpoint", config.model.hf_checkpoint, faults);
  if (config.algorithm.uses_reference()) {
    look_for_model("--ref-load", config.algorithm.ref_load, faults);
  }
  look_for_file("--prompt-data", prompt_file(config.data.prompt_data), faults);
  look_for_file("--chat-template-path", config.data.chat_template_path, faults);
  const std::vector<std::string>& sets = config.evaluate.eval_prompt_data;
  if (sets.size() == 1) look_for_file("--eval-prompt-data", prompt_file(sets[0]), faults);
  for (std::size_t i = 1; i < sets.size(); i += 2) {
    look_for_file("--eval-prompt-data", prompt_file(sets[i]), faults);
  }
  const CheckpointConfig& c = config.checkpoint;
  if (!c.load.empty() && !loads_where_it_saves(config) && !std::filesystem::is_directory(c.load)) {
    add(faults, "--load: '{}' is not a folder; give one with checkpoints", c.load);
  }
  if (!config.debug.load_debug_rollout_data.empty() && c.load.empty()) {
    look_for_file("--load-debug-rollout-data",
                  fill_rollout_id(config.debug.load_debug_rollout_data, 0), faults);
  }
  return faults;
}

std::vector<std::string> missing_files(const GenerateConfig& config) {
  Faults faults;
  look_for_model("--hf-checkpoint", config.model.hf_checkpoint, faults);
  look_for_file("--input", config.input, faults);
  return faults;
}

std::vector<std::string> missing_files(const ScoreConfig& config) {
  Faults faults;
  look_for_model("--hf-checkpoint", config.model.hf_checkpoint, faults);
  look_for_file("--input", config.input, faults);
  return faults;
}

std::vector<std::string> missing_files(const SelftestConfig& config) {
  Faults faults;
  look_for_model("--hf-checkpoint", config.model.hf_checkpoint, faults);
  return faults;
}

std::vector<std::string> missing_files(const ServeConfig& config) {
  Faults faults;
  look_for_model("--hf-checkpoint", config.model.hf_checkpoint, faults);
  return faults;
}

bool same_path(const std::string& a, const std::string& b) {
  const auto normal = [](const std::string& path) {
    const auto absolute = std::filesystem::absolute(path).lexically_normal();
    return absolute.has_filename() ? absolute : absolute.parent_path();
  };
  return a == b || (!a.empty() && !b.empty() && normal(a) == normal(b));
}

bool loads_where_it_saves(const Config& config) {
  const CheckpointConfig& c = config.checkpoint;
  const std::string& run_dir = config.logging.run_dir;
  const std::string save =
      c.save.empty() && c.save_interval && !run_dir.empty() ? run_dir + "/checkpoints" : c.save;
  return same_path(c.load, save) || same_path(c.load + "/checkpoints", save);
}

std::string fill_rollout_id(const std::string& pattern, std::int64_t rollout_id) {
  constexpr std::string_view kName = "{rollout_id";
  const std::size_t at = pattern.find(kName);
  const std::size_t end = at == std::string::npos ? at : pattern.find('}', at);
  if (end == std::string::npos) return pattern;
  // Python's form of a width: ":07d".
  const std::string_view form =
      std::string_view(pattern).substr(at + kName.size(), end - at - kName.size());
  std::int64_t width = 0;
  if (!form.empty()) {
    if (form.size() < 4 || !form.starts_with(":0") || !form.ends_with('d')) return pattern;
    width = parse_int(form.substr(2, form.size() - 3)).value_or(-1);
    if (width < 0 || width > 20) return pattern;
  }
  return fmt::format("{}{:0{}}{}", pattern.substr(0, at), rollout_id, width,
                     pattern.substr(end + 1));
}

std::string prompt_file(const std::string& prompt_data) {
  const std::size_t slice = prompt_data.rfind("@[");
  return slice != std::string::npos && prompt_data.back() == ']' ? prompt_data.substr(0, slice)
                                                                 : prompt_data;
}

}  // namespace tandem
