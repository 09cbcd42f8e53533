// The settings of every command as plain structs; defaults stand in the members, and nowhere else.
//
// A member is spelled like its flag (dash = underscore) and is filled from the command line, a TOML
// file or JSON by the one table in config/flags.h, which also holds its help, bounds and kind. A
// member without a row there does not compile. An empty std::optional means "not given"; resolve()
// fills those whose comment says "after resolve(): set", so code behind it may dereference them.
// After resolve() the config is const for the whole run.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/log.h"

namespace tandem {

// Values count from 0 in the order of their names in config/flags.h.
enum class Device { automatic, cpu, cuda };
enum class ComputeDtype { automatic, float32, bfloat16 };
enum class CpuKernels { automatic, portable, avx2, avx512, avx512bf16 };
enum class AdvantageEstimator {
  grpo,
  gspo,
  reinforce_plus_plus,
  reinforce_plus_plus_baseline,
  rloo,
  ppo
};
enum class KlLossType { k1, k2, k3, low_var_kl };
enum class TisMode { clip, icepop, mask };
enum class RatioLevel { token, sequence, geometric };
enum class LrDecayStyle { constant, linear, cosine, inverse_square_root, wsd };
enum class WsdDecayStyle { exponential, linear, cosine, minus_sqrt };
enum class TrainBackend { fsdp, megatron, torchtitan };
enum class TransferMode { broadcast, p2p, disk, disk_delta };
enum class PauseGeneration { retract, abort, in_place };
enum class Side { none, engine, trainer };
enum class BrokenUpdate { none, corrupt, die, hang };

// The flag's spelling of a value, for messages and logs.
std::string_view name_of(Device value);
std::string_view name_of(ComputeDtype value);
std::string_view name_of(CpuKernels value);
std::string_view name_of(AdvantageEstimator value);
std::string_view name_of(KlLossType value);
std::string_view name_of(LrDecayStyle value);
std::string_view name_of(TrainBackend value);
std::string_view name_of(TransferMode value);
std::string_view name_of(LogLevel value);

// ---- sections
// ------------------------------------------------------------------------------------

// Where ranks run. With --device cpu a "GPU" in a flag is one rank with its share of the cores.
struct ClusterConfig {
  std::int64_t actor_num_nodes = 1;
  std::optional<std::int64_t> actor_num_gpus_per_node;  // after resolve(): set
  std::optional<std::int64_t> num_gpus_per_node;        // after resolve(): set
  std::optional<std::int64_t> rollout_num_gpus;         // after resolve(): set
  std::int64_t rollout_num_gpus_per_engine = 1;
  std::vector<std::int64_t> rollout_num_gpus_of_engines;  // where they differ; empty: all alike
  bool colocate = false;
  bool offload = false;
  std::optional<bool> offload_train;
  std::optional<bool> offload_rollout;
  double rank_start_timeout_seconds = 300;  // spawn until the rank has loaded its weights
  double control_timeout_seconds = 1800;    // any later call to a rank: generate, train, save
  // Ranks of each engine; rollout_num_gpus must be set.
  std::vector<std::int64_t> engine_widths() const {
    if (!rollout_num_gpus_of_engines.empty()) return rollout_num_gpus_of_engines;
    return std::vector<std::int64_t>(
        static_cast<std::size_t>(*rollout_num_gpus / rollout_num_gpus_per_engine),
        rollout_num_gpus_per_engine);
  }
};

// What one rank computes on; shared by all commands.
struct ComputeConfig {
  Device device = Device::automatic;             // after resolve(): never automatic
  std::optional<std::int64_t> threads_per_rank;  // after resolve(): set
  CpuKernels cpu_kernels = CpuKernels::automatic;
  std::optional<bool> true_on_policy_mode;  // after resolve(): set; read it by is_exact()
  bool deterministic_mode = false;  // on a GPU after resolve(): true with true_on_policy_mode
  // Trainer and engine compute the same bits.
  bool is_exact() const { return true_on_policy_mode.value_or(device != Device::cuda); }
};

struct ModelOptions {
  std::string hf_checkpoint;
  ComputeDtype dtype = ComputeDtype::automatic;  // of compute; after resolve(): never automatic
};

struct DataConfig {
  std::string prompt_data;
  std::string input_key = "input";
  std::string label_key;  // empty: rows have no label
  std::string metadata_key = "metadata";
  std::string tool_key = "tools";
  bool apply_chat_template = false;
  std::string apply_chat_template_kwargs = "{}";  // a JSON object
  std::string chat_template_path;
  std::optional<std::int64_t> num_rollout;  // after resolve_num_rollout(): set
  std::optional<std::int64_t> num_epoch;
  std::optional<std::int64_t> start_rollout_id;
  bool rollout_shuffle = false;
  std::int64_t rollout_seed = 42;
  bool rollout_global_dataset = true;
  bool skip_bad_rows = false;
};

struct RolloutConfig {
  std::optional<std::int64_t> rollout_batch_size;  // prompts a step; validate() requires it
  std::int64_t n_samples_per_prompt = 1;
  double rollout_temperature = 1.0;
  double rollout_top_p = 1.0;
  std::int64_t rollout_top_k = -1;
  std::optional<std::int64_t> rollout_max_response_len;  // tokens; after resolve(): set
  std::optional<std::int64_t>
      rollout_max_prompt_len;  // tokens; rows with longer prompts are left out
  std::optional<std::int64_t> rollout_max_context_len;  // tokens, prompt and response
  std::vector<std::string> rollout_stop;
  std::vector<std::int64_t> rollout_stop_token_ids;  // beside the model's own EOS list
  bool rollout_skip_special_tokens = true;
  bool mask_truncated_samples = false;
  std::optional<std::int64_t> over_sampling_batch_size;
  std::string dynamic_sampling_filter_path;
  std::string dynamic_sampling_reward_key;
  std::string custom_generate_function_path;
  bool partial_rollout = false;
  bool fully_async = false;
  std::int64_t async_steps = 0;  // rollouts that are generated ahead of the one that is trained on
};

// Limits of one engine. None of them changes a token.
struct EngineConfig {
  std::int64_t max_running_requests = 64;
  std::optional<std::int64_t>
      kv_cache_tokens;  // empty: room for max_running_requests of full length
  std::int64_t kv_block_tokens = 16;
  std::int64_t max_prefill_tokens = 4096;  // prompt tokens of one prefill batch
  bool prefix_cache = true;
  double request_timeout_seconds = 14400;
};

struct RewardConfig {
  std::string rm_type;  // last-number, exact, math or remote_rm
  std::string rm_url;
  std::string custom_rm_path;
  std::string reward_key;
  std::string eval_reward_key;
  bool group_rm = false;
  double reward_timeout_seconds = 120;  // of one call
  std::int64_t rm_num_processes = 2;
  std::int64_t rm_max_concurrency = 64;
  std::int64_t rm_memory_limit_mb = 8192;  // of one process; 0: none
  bool stop_on_reward_failure = false;
  std::int64_t constant_reward_steps = 10;  // 0: no notice

  // Whether Python rewards, not a built-in rule.
  bool uses_function() const { return !custom_rm_path.empty() || rm_type == "remote_rm"; }
};

struct AlgorithmConfig {
  AdvantageEstimator advantage_estimator = AdvantageEstimator::grpo;
  std::string loss_type = "policy_loss";
  double eps_clip = 0.2;
  std::optional<double> eps_clip_high;  // after resolve(): set
  std::optional<double> eps_clip_c;
  double kl_coef = 0.0;
  bool use_kl_loss = false;
  double kl_loss_coef = 0.0;
  KlLossType kl_loss_type = KlLossType::k1;
  bool use_unbiased_kl = false;
  std::string ref_load;  // after resolve(): set if uses_reference()
  std::optional<std::int64_t> ref_update_interval;
  double entropy_coef = 0.0;
  bool observe_training_entropy = false;
  bool use_rollout_entropy = false;
  double gamma = 1.0;
  double lambd = 1.0;
  bool normalize_advantages = false;
  bool grpo_std_normalization = true;
  bool rewards_normalization = true;
  bool compute_advantages_and_returns = true;
  bool use_rollout_logprobs = false;
  bool get_mismatch_metrics = false;
  std::optional<bool> use_tis;  // after resolve(): set; read it by uses_tis()
  double tis_clip = 2.0;
  double tis_clip_low = 0.0;
  TisMode tis_mode = TisMode::clip;
  RatioLevel tis_level = RatioLevel::token;
  bool use_rs = false;
  RatioLevel rs_level = RatioLevel::token;
  std::optional<double> rs_lower_bound;  // after resolve(): set if use_rs
  std::optional<double> rs_upper_bound;  // after resolve(): set if use_rs
  std::optional<double> rs_veto_threshold;
  bool use_opsm = false;
  double opsm_delta = 1e-4;
  std::int64_t seed = 1234;  // key of the sampling generator

  // Whether a reference model is loaded: some KL against it is in the loss or in the reward.
  bool uses_reference() const { return use_kl_loss || kl_coef != 0.0; }
  // Whether tokens leave the loss for the ratio of trainer to engine probability.
  bool rejects_tokens() const { return use_rs || (uses_tis() && tis_mode == TisMode::mask); }
  bool uses_tis() const { return use_tis.value_or(false); }
};

// AdamW and its schedule, in optimizer steps.
struct OptimizerConfig {
  std::string optimizer = "adam";
  double lr = 1e-6;
  double min_lr = 0.0;
  LrDecayStyle lr_decay_style = LrDecayStyle::constant;
  std::int64_t lr_warmup_iters = 0;
  std::optional<double> lr_warmup_fraction;
  double lr_warmup_init = 0.0;
  std::optional<std::int64_t> lr_decay_iters;  // empty: all optimizer steps of the run
  std::optional<std::int64_t> lr_wsd_decay_iters;
  WsdDecayStyle lr_wsd_decay_style = WsdDecayStyle::exponential;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.95;
  double adam_eps = 1e-8;
  double weight_decay = 0.0;
  double clip_grad = 1.0;  // 0: no clipping
};

struct TrainConfig {
  TrainBackend train_backend = TrainBackend::fsdp;
  std::optional<std::int64_t> global_batch_size;  // samples an optimizer step; after resolve(): set
  std::optional<std::int64_t> num_steps_per_rollout;  // after resolve(): set
  std::int64_t max_tokens_per_gpu = 8192;  // cap of a packed micro-batch; a longer sample is alone
  bool calculate_per_token_loss = false;
  std::optional<std::int64_t> constant_loss_length;  // tokens
  std::int64_t max_skipped_steps = 3;                // in a row; 0: any number
  bool share_prompt = true;                          // compute a group's prompt once
  std::optional<bool> deterministic_layout;          // after resolve(): set
  std::int64_t gradient_leaves = 8;                  // power of two
  bool fsdp_reshard_after_forward = false;           // ranks keep a shard of the compute weights
  std::string recompute_granularity;                 // full, selective; empty: everything is kept
  std::string recompute_method;                      // uniform, block; of full
  std::optional<std::int64_t> recompute_num_layers;  // after resolve(): set if full
  bool gradient_checkpointing = false;
  bool ci_test = false;
  bool ci_disable_kl_checker = false;
  bool ci_disable_logprobs_checker = false;
  bool ci_disable_weight_update_checker = false;
};

struct EvaluateConfig {
  std::optional<std::int64_t> eval_interval;  // in rollouts
  std::vector<std::string> eval_prompt_data;  // name path name path ...
  std::int64_t n_samples_per_eval_prompt = 1;
  std::optional<double> eval_temperature;             // after resolve(): set
  std::optional<double> eval_top_p;                   // after resolve(): set
  std::optional<std::int64_t> eval_top_k;             // after resolve(): set
  std::optional<std::int64_t> eval_max_response_len;  // after resolve(): set
  std::optional<std::int64_t> eval_max_prompt_len;
  std::string eval_input_key;  // after resolve(): set
  std::string eval_label_key;  // after resolve(): that of training unless given
  std::string eval_config;
  bool skip_eval_before_train = false;
};

struct TransferConfig {
  TransferMode update_weight_transfer_mode = TransferMode::broadcast;
  std::int64_t update_weight_buffer_size = 512 * 1024 * 1024;  // bytes of a bucket
  std::int64_t update_weights_interval = 1;
  bool update_weight_shared_memory = true;
  bool update_weight_double_buffer = false;
  bool update_weights_in_flight = false;  // while answers are being written
  PauseGeneration pause_generation_mode = PauseGeneration::retract;
  bool check_weight_update_equal = false;
};

struct CheckpointConfig {
  std::string load;                       // folder of checkpoints, or a run's folder
  std::optional<std::int64_t> ckpt_step;  // empty: the pointer's
  bool load_optim = true;
  bool finetune = false;                      // weights alone, rollout 0
  std::string save;                           // after resolve(): set if save_interval is
  std::optional<std::int64_t> save_interval;  // in rollouts; the last one is always saved
  std::optional<std::int64_t> save_keep_last;
  std::optional<std::int64_t> save_retain_interval;
  bool save_optim = true;
  bool async_save = false;
  std::string save_hf;  // folder of the trained model, {rollout_id} is filled in; empty: none
};

struct LoggingConfig {
  std::string run_dir;   // after resolve(): set
  std::string run_name;  // after resolve(): set
  bool save_rollouts = true;
  std::optional<bool> progress;  // empty: when standard output is a terminal
  LogLevel log_level = LogLevel::info;
  bool use_tensorboard = false;
  bool use_wandb = false;
};

struct DebugConfig {
  bool dry_run = false;
  Side debug_perturb_kernel = Side::none;  // one kernel of that side is made wrong by one unit
  BrokenUpdate debug_break_update = BrokenUpdate::none;  // what goes wrong, from version 3 on
  bool debug_rollout_only = false;
  bool debug_train_only = false;
  std::string save_debug_rollout_data;  // a path, {rollout_id} is filled in
  std::string load_debug_rollout_data;  // the same; not empty: debug_train_only after resolve()
};

// ---- one struct a command
// --------------------------------------------------------------------------

// tandem train
struct Config {
  ClusterConfig cluster;
  ComputeConfig compute;
  ModelOptions model;
  DataConfig data;
  RolloutConfig rollout;
  EngineConfig engine;
  RewardConfig reward;
  AlgorithmConfig algorithm;
  OptimizerConfig optimizer;
  TrainConfig train;
  EvaluateConfig evaluate;
  TransferConfig transfer;
  CheckpointConfig checkpoint;
  LoggingConfig logging;
  DebugConfig debug;
};

// tandem generate
struct GenerateConfig {
  ModelOptions model;
  ComputeConfig compute;
  EngineConfig engine;
  std::vector<std::string> prompt;  // texts
  std::string input;                // JSONL file with `text` or `input_ids`, in place of prompt
  bool apply_chat_template = false;
  std::int64_t n = 1;  // samples a prompt
  std::int64_t max_new_tokens = 128;
  std::int64_t min_new_tokens = 0;
  double temperature = 1.0;
  double top_p = 1.0;
  std::int64_t top_k = -1;
  double min_p = 0.0;
  double frequency_penalty = 0.0;
  double presence_penalty = 0.0;
  double repetition_penalty = 1.0;
  std::vector<std::string> stop;
  std::vector<std::int64_t> stop_token_ids;
  bool ignore_eos = false;
  std::int64_t seed = 1234;
};

// tandem score
struct ScoreConfig {
  ModelOptions model;
  ComputeConfig compute;
  std::string input;  // JSONL file with `text` or `input_ids`
  Side through = Side::trainer;
  bool gradients = false;
};

// tandem selftest
struct SelftestConfig {
  ModelOptions model;
  ComputeConfig compute;
  std::int64_t tokens = 20000;  // to compare, over all ways
  std::int64_t max_new_tokens = 48;
  std::int64_t seed = 1234;
};

// tandem serve
struct ServeConfig {
  ModelOptions model;
  ComputeConfig compute;
  EngineConfig engine;
  std::string host = "127.0.0.1";
  std::int64_t port = 30000;
  std::int64_t seed = 1234;
};

}  // namespace tandem
