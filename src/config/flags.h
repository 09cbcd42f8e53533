// The one table of flags: for every member of config.h its help, bounds, kind and Miles's spelling.
//
// Parsing, --help, checks, JSON, the resolved dump and docs/flags.md read these rows. To build what
// a refused flag asks for: take `.kind` and `.why` out of its row (or add the value to `.now`).
// Flags of Miles that have no member here are listed in config/miles_flags.cpp. Heavy to compile:
// only flags.cpp includes it.
#pragma once

#include "config/config.h"
#include "config/table.h"

namespace tandem {

// ---- spellings of enums, by value
// ----------------------------------------------------------------

template <std::size_t N>
using Spellings = std::array<std::string_view, N>;

template <>
inline constexpr Spellings<3> names<Device>{"auto", "cpu", "cuda"};
template <>
inline constexpr Spellings<3> names<ComputeDtype>{"auto", "float32", "bfloat16"};
template <>
inline constexpr Spellings<5> names<CpuKernels>{"auto", "portable", "avx2", "avx512", "avx512bf16"};
template <>
inline constexpr Spellings<6> names<AdvantageEstimator>{
    "grpo", "gspo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo", "ppo"};
template <>
inline constexpr Spellings<4> names<KlLossType>{"k1", "k2", "k3", "low_var_kl"};
template <>
inline constexpr Spellings<3> names<TisMode>{"clip", "icepop", "mask"};
template <>
inline constexpr Spellings<3> names<RatioLevel>{"token", "sequence", "geometric"};
template <>
inline constexpr Spellings<5> names<LrDecayStyle>{"constant", "linear", "cosine",
                                                  "inverse-square-root", "WSD"};
template <>
inline constexpr Spellings<4> names<WsdDecayStyle>{"exponential", "linear", "cosine", "minus_sqrt"};
template <>
inline constexpr Spellings<3> names<TrainBackend>{"fsdp", "megatron", "torchtitan"};
template <>
inline constexpr Spellings<4> names<TransferMode>{"broadcast", "p2p", "disk", "disk-delta"};
template <>
inline constexpr Spellings<3> names<PauseGeneration>{"retract", "abort", "in_place"};
template <>
inline constexpr Spellings<4> names<LogLevel>{"debug", "info", "warn", "error"};
template <>
inline constexpr Spellings<3> names<Side>{"none", "engine", "trainer"};
template <>
inline constexpr Spellings<4> names<BrokenUpdate>{"none", "corrupt", "die", "hang"};

// ---- sections
// ------------------------------------------------------------------------------------

inline constexpr std::string_view kOneNode = "a run has one node so far; use one";
inline constexpr std::string_view kStateStays =
    "master weights and moments stay where they are; nothing but memory depends on it";

template <>
inline constexpr auto table<ClusterConfig> = std::tuple{
    Field{"actor_num_nodes",
          &ClusterConfig::actor_num_nodes,
          "Nodes of the trainer.",
          {.at_least = 1, .now = "1", .why = kOneNode}},
    Field{"actor_num_gpus_per_node",
          &ClusterConfig::actor_num_gpus_per_node,
          "Trainer ranks on each node (with --device cpu a rank is a share of the "
          "cores). Default: 1.",
          {.at_least = 1, .miles = "8"}},
    Field{"num_gpus_per_node",
          &ClusterConfig::num_gpus_per_node,
          "GPUs (ranks) that a node has. Default: those present; with --device cpu as "
          "many as the run asks for.",
          {.at_least = 1, .miles = "8"}},
    Field{"rollout_num_gpus",
          &ClusterConfig::rollout_num_gpus,
          "Ranks of all engines together. Default with --colocate: the trainer's; engines "
          "beyond those get ranks of their own.",
          {.at_least = 1}},
    Field{"rollout_num_gpus_per_engine",
          &ClusterConfig::rollout_num_gpus_per_engine,
          "Ranks that serve one copy of the model (tensor parallel).",
          {.at_least = 1}},
    Field{
        "rollout_num_gpus_of_engines", &ClusterConfig::rollout_num_gpus_of_engines,
        "Ranks of each engine where they differ, one number an engine (2 1: an engine of two ranks "
        "and one of one), in place of --rollout-num-gpus-per-engine; together --rollout-num-gpus."},
    Field{"colocate", &ClusterConfig::colocate,
          "Trainer and engine share the ranks and one copy of the weights; without it "
          "each has ranks of its own."},
    Field{"offload", &ClusterConfig::offload, "Both --offload-train and --offload-rollout."},
    Field{"offload_train",
          &ClusterConfig::offload_train,
          "Move the trainer's state to host memory while the engine works.",
          {.kind = Kind::no_effect, .why = kStateStays}},
    Field{
        "offload_rollout", &ClusterConfig::offload_rollout,
        "With --colocate: the engine's KV cache gives its memory back while the trainer works and "
        "takes it again at the same addresses. Default: on a GPU yes, on the CPU no."},
    Field{"rank_start_timeout_seconds",
          &ClusterConfig::rank_start_timeout_seconds,
          "Longest wait for a rank from its start until its weights are loaded.",
          {.at_least = 0, .open = true}},
    Field{"control_timeout_seconds",
          &ClusterConfig::control_timeout_seconds,
          "Longest wait for the answer to one call (train, update, save) to a rank.",
          {.at_least = 0, .open = true}}};

template <>
inline constexpr auto table<ComputeConfig> = std::tuple{
    Field{
        "device", &ComputeConfig::device,
        "Where ranks compute. auto: cuda where there is an NVIDIA GPU and libtandem_cuda.so in the "
        "program's folder, else cpu."},
    Field{"threads_per_rank",
          &ComputeConfig::threads_per_rank,
          "Compute threads of a rank. Default: the cores, shared evenly by the ranks of a node.",
          {.at_least = 1, .at_most = 1024}},
    Field{"cpu_kernels", &ComputeConfig::cpu_kernels,
          "Instruction set of the CPU kernels. auto: the best that the processor has."},
    Field{
        "true_on_policy_mode", &ComputeConfig::true_on_policy_mode,
        "Exact mode: trainer and engine compute the same bits, so that the gap is 0. Default: on "
        "with "
        "--device cpu, where engines of one rank always do and off lets larger ones cut o_proj and "
        "down_proj by input columns (row-parallel: fewer messages, a gap of rounding); off on a "
        "GPU, where it is slower and turns deterministic_mode on."},
    Field{
        "deterministic_mode", &ComputeConfig::deterministic_mode,
        "On a GPU: the same batches give the same bits (slower backward); a whole run repeats with "
        "true_on_policy_mode, which turns this on. On the CPU it always does."}};

template <>
inline constexpr auto table<ModelOptions> = std::tuple{
    Field{"hf_checkpoint", &ModelOptions::hf_checkpoint,
          "Folder of the model in Hugging Face form: config, tokenizer, safetensors. Required."},
    Field{"dtype",
          &ModelOptions::dtype,
          "Type of compute weights and activations. auto: bfloat16 where the processor multiplies "
          "it (AVX-512 BF16) and on GPUs, else float32.",
          {.miles = "bfloat16"}}};

template <>
inline constexpr auto table<DataConfig> = std::tuple{
    Field{"prompt_data", &DataConfig::prompt_data,
          "JSONL or Parquet file of prompts; 'file.jsonl@[0:100]' takes rows 0 to 99. Required."},
    Field{"input_key", &DataConfig::input_key, "Key of the prompt in a row: text or messages."},
    Field{"label_key", &DataConfig::label_key, "Key of the label in a row. Empty: no labels."},
    Field{"metadata_key", &DataConfig::metadata_key,
          "Key of an object that reward and generate functions see with the sample."},
    Field{"tool_key", &DataConfig::tool_key,
          "Key of the tools shown to the chat template: a list, or a text that holds one."},
    Field{"apply_chat_template", &DataConfig::apply_chat_template,
          "Render prompts with the model's chat template; a text becomes one user message."},
    Field{"apply_chat_template_kwargs",
          &DataConfig::apply_chat_template_kwargs,
          "JSON object of further variables for the chat template.",
          {.json_object = true}},
    Field{"chat_template_path", &DataConfig::chat_template_path,
          "File with a chat template (Jinja) in place of the model's."},
    Field{"num_rollout",
          &DataConfig::num_rollout,
          "Rollouts (steps of the loop) of the run. This or --num-epoch is required.",
          {.at_least = 1}},
    Field{"num_epoch",
          &DataConfig::num_epoch,
          "Passes over the prompts; used when --num-rollout is not given.",
          {.at_least = 1}},
    Field{"start_rollout_id",
          &DataConfig::start_rollout_id,
          "First rollout of the run.",
          {.at_least = 0,
           .kind = Kind::refused,
           .why = "runs start at rollout 0, or after that of --load; leave it out"}},
    Field{"rollout_shuffle", &DataConfig::rollout_shuffle, "Shuffle the prompts each epoch."},
    Field{"rollout_seed",
          &DataConfig::rollout_seed,
          "Seed of the shuffling (plus the epoch).",
          {.at_least = 0}},
    Field{"rollout_global_dataset",
          &DataConfig::rollout_global_dataset,
          "Take prompts from --prompt-data.",
          {.inverse = "disable_rollout_global_dataset",
           .kind = Kind::refused,
           .why = "prompts come from --prompt-data"}},
    Field{"skip_bad_rows", &DataConfig::skip_bad_rows,
          "Leave out rows of a prompt file that cannot be used, with a count; else the first one "
          "ends the run before it starts."}};

template <>
inline constexpr auto table<RolloutConfig> = std::tuple{
    Field{"rollout_batch_size",
          &RolloutConfig::rollout_batch_size,
          "Prompts a rollout. Required.",
          {.at_least = 1}},
    Field{"n_samples_per_prompt",
          &RolloutConfig::n_samples_per_prompt,
          "Answers to each prompt: the group.",
          {.at_least = 1}},
    Field{"rollout_temperature",
          &RolloutConfig::rollout_temperature,
          "Temperature of sampling; divides the logits on both sides.",
          {.at_least = 0}},
    Field{"rollout_top_p",
          &RolloutConfig::rollout_top_p,
          "Sample among the likeliest tokens that together have this probability. What is recorded "
          "stays the log-probability in the full distribution, on both sides.",
          {.at_least = 0, .at_most = 1, .open = true}},
    Field{"rollout_top_k",
          &RolloutConfig::rollout_top_k,
          "Sample among the k likeliest tokens; -1: all.",
          {.at_least = -1}},
    Field{"rollout_max_response_len",
          &RolloutConfig::rollout_max_response_len,
          "Most new tokens of an answer. Required unless --rollout-max-context-len is given.",
          {.at_least = 1}},
    Field{"rollout_max_prompt_len",
          &RolloutConfig::rollout_max_prompt_len,
          "Prompts with more tokens are left out.",
          {.at_least = 1}},
    Field{"rollout_max_context_len",
          &RolloutConfig::rollout_max_context_len,
          "Most tokens of prompt and answer together.",
          {.at_least = 2}},
    Field{"rollout_stop", &RolloutConfig::rollout_stop,
          "Texts that end an answer, also across the borders of tokens; they stay in it."},
    Field{"rollout_stop_token_ids",
          &RolloutConfig::rollout_stop_token_ids,
          "Token ids that end an answer, beside the model's own.",
          {.at_least = 0, .at_most = 2147483647}},
    Field{"rollout_skip_special_tokens",
          &RolloutConfig::rollout_skip_special_tokens,
          "Leave special tokens out of the answer's text, which rewards see.",
          {.miles = "false"}},
    Field{"mask_truncated_samples", &RolloutConfig::mask_truncated_samples,
          "Do not train on answers that were cut at the length limit; in their group's statistics "
          "their rewards count."},
    Field{"over_sampling_batch_size",
          &RolloutConfig::over_sampling_batch_size,
          "Prompts drawn at a time when groups are filtered. Default: rollout_batch_size.",
          {.at_least = 1}},
    Field{"dynamic_sampling_filter_path", &RolloutConfig::dynamic_sampling_filter_path,
          "Filter that keeps or drops whole groups; prompts are drawn until the rollout is full. "
          "Built in: check_reward_nonzero_std, check_no_aborted; else module.function."},
    Field{"dynamic_sampling_reward_key", &RolloutConfig::dynamic_sampling_reward_key,
          "Key of a reward object that check_reward_nonzero_std judges. Default: the reward."},
    Field{"custom_generate_function_path", &RolloutConfig::custom_generate_function_path,
          "Python function that makes one sample, in one turn or in several: module.function."},
    Field{"partial_rollout",
          &RolloutConfig::partial_rollout,
          "Carry unfinished answers to the next rollout.",
          {.kind = Kind::refused, .why = "every answer is finished in its rollout; leave it out"}},
    Field{"fully_async",
          &RolloutConfig::fully_async,
          "Generate while training.",
          {.kind = Kind::refused, .why = "use --async-steps 1; leave it out"}},
    Field{"async_steps",
          &RolloutConfig::async_steps,
          "Rollouts that are generated ahead: 1 generates the next one while the present one is "
          "trained on (train_async.py), so that neither side waits for the other. Not with "
          "--colocate.",
          {.at_least = 0, .now = "0|1", .why = "0 or 1 rollout ahead is built"}}};

template <>
inline constexpr auto table<EngineConfig> = std::tuple{
    Field{"max_running_requests",
          &EngineConfig::max_running_requests,
          "Most answers decoded in one batch; changes speed, never a token.",
          {.at_least = 1, .at_most = 65536, .alias = "sglang_max_running_requests"}},
    Field{"kv_cache_tokens",
          &EngineConfig::kv_cache_tokens,
          "Tokens in the KV cache. Default: room for --max-running-requests of full length.",
          {.at_least = 16, .alias = "sglang_max_total_tokens"}},
    Field{"kv_block_tokens",
          &EngineConfig::kv_block_tokens,
          "Tokens of one block of the KV cache.",
          {.alias = "sglang_page_size",
           .kind = Kind::no_effect,
           .why = "blocks hold 16 positions, the unit in which attention adds keys"}},
    Field{"max_prefill_tokens",
          &EngineConfig::max_prefill_tokens,
          "Most prompt tokens computed in one batch.",
          {.at_least = 1, .alias = "sglang_max_prefill_tokens|sglang_chunked_prefill_size"}},
    Field{"prefix_cache",
          &EngineConfig::prefix_cache,
          "Keep the KV of prompts and answers for later prompts that begin so, until the weights "
          "change; the results are the same bits.",
          {.inverse = "sglang_disable_radix_cache"}},
    Field{"request_timeout_seconds",
          &EngineConfig::request_timeout_seconds,
          "Longest wait for a phase of generation; a run that waits longer ends.",
          {.at_least = 0, .open = true, .alias = "sglang_router_request_timeout_secs"}}};

template <>
inline constexpr auto table<RewardConfig> = std::tuple{
    Field{
        "rm_type",
        &RewardConfig::rm_type,
        "Built-in reward. last-number: 1 if the last number of the answer is the label; exact: 1 "
        "if the trimmed answer is the label; math: 1 if the boxed or plain answer equals it; "
        "remote_rm: what the server at --rm-url says.",
        {.choices = "last-number|exact|math|boxed_math|deepscaler|gemma_math|dapo|f1|gpqa|ifbench|"
                    "remote_rm|random|deterministic_random|boxed_deepscaler|boxed_dapo|boxed_f1|"
                    "boxed_gpqa",
         .now = "last-number|exact|math|remote_rm",
         .why = "use last-number, exact, math or remote_rm, or --custom-rm-path"}},
    Field{"rm_url", &RewardConfig::rm_url,
          "Address of a reward server, http:// or https://; each answer is a POST of prompt, "
          "response and label in JSON."},
    Field{"custom_rm_path", &RewardConfig::custom_rm_path,
          "Python function that rewards a sample, synchronous or async: module.function, called "
          "with (args, sample)."},
    Field{"reward_key", &RewardConfig::reward_key,
          "Key of the number in a reward that is an object."},
    Field{"eval_reward_key", &RewardConfig::eval_reward_key,
          "The same in evaluation. Default: reward_key."},
    Field{"group_rm", &RewardConfig::group_rm,
          "Call the function with (args, samples) of a whole group; it returns a list."},
    Field{"reward_timeout_seconds",
          &RewardConfig::reward_timeout_seconds,
          "Longest time of one call; the sample then has no reward.",
          {.at_least = 0, .open = true}},
    Field{"rm_num_processes",
          &RewardConfig::rm_num_processes,
          "Python processes that call the function.",
          {.at_least = 1, .at_most = 256}},
    Field{"rm_max_concurrency",
          &RewardConfig::rm_max_concurrency,
          "Calls of an async function that run side by side in a process.",
          {.at_least = 1, .at_most = 65536}},
    Field{"rm_memory_limit_mb",
          &RewardConfig::rm_memory_limit_mb,
          "Private memory of such a process in MiB; 0: no limit.",
          {.at_least = 0}},
    Field{"stop_on_reward_failure", &RewardConfig::stop_on_reward_failure,
          "End the run at the first sample without a reward; else such samples are left out of "
          "training and counted."},
    Field{"constant_reward_steps",
          &RewardConfig::constant_reward_steps,
          "Steps after which a reward that never changes raises a notice; 0: never.",
          {.at_least = 0}}};

template <>
inline constexpr auto table<AlgorithmConfig> = std::tuple{
    Field{"advantage_estimator",
          &AlgorithmConfig::advantage_estimator,
          "How rewards become advantages. grpo: by the group's mean and standard deviation; gspo: "
          "the same with the sequence's mean ratio; rloo: against the mean of the group's others; "
          "reinforce_plus_plus: discounted returns; reinforce_plus_plus_baseline: by the group's "
          "mean.",
          {.now = "grpo|gspo|reinforce_plus_plus|reinforce_plus_plus_baseline|rloo",
           .why = "PPO needs a critic, which is not built yet; use grpo"}},
    Field{"loss_type",
          &AlgorithmConfig::loss_type,
          "The loss.",
          {.choices = "policy_loss|sft_loss|custom_loss",
           .now = "policy_loss",
           .why = "use --loss-type policy_loss"}},
    Field{"eps_clip",
          &AlgorithmConfig::eps_clip,
          "The ratio of new to old probability is clipped below at 1 - eps_clip.",
          {.at_least = 0, .at_most = 1, .open = true}},
    Field{"eps_clip_high",
          &AlgorithmConfig::eps_clip_high,
          "The ratio is clipped above at 1 + eps_clip_high. Default: eps_clip.",
          {.at_least = 0, .open = true}},
    Field{"eps_clip_c",
          &AlgorithmConfig::eps_clip_c,
          "Dual clip: for negative advantages the loss is at most eps_clip_c times their size.",
          {.at_least = 1, .open = true}},
    Field{"kl_coef", &AlgorithmConfig::kl_coef,
          "Weight of the KL against the reference in the token rewards of reinforce_plus_plus and "
          "its baseline form."},
    Field{"use_kl_loss", &AlgorithmConfig::use_kl_loss,
          "Measure the KL against the reference and add it to the loss, times --kl-loss-coef."},
    Field{"kl_loss_coef", &AlgorithmConfig::kl_loss_coef, "Weight of the KL in the loss."},
    Field{"kl_loss_type", &AlgorithmConfig::kl_loss_type,
          "Estimator of the KL, in the loss and in the reward; k3 and low_var_kl take the "
          "log-ratio within +-20, low_var_kl is itself held within +-10."},
    Field{"use_unbiased_kl", &AlgorithmConfig::use_unbiased_kl,
          "Weigh the KL in the loss by the ratio of new to old probability."},
    Field{"ref_load", &AlgorithmConfig::ref_load,
          "Folder of the reference model in Hugging Face form, read only with a KL. Default: "
          "--hf-checkpoint."},
    Field{"ref_update_interval",
          &AlgorithmConfig::ref_update_interval,
          "Rollouts after which the reference becomes the present model. Default: never.",
          {.at_least = 1}},
    Field{"entropy_coef", &AlgorithmConfig::entropy_coef,
          "Weight of the entropy that is taken off the loss."},
    Field{"observe_training_entropy", &AlgorithmConfig::observe_training_entropy,
          "Measure the entropy in the training step though it has no weight in the loss."},
    Field{"use_rollout_entropy", &AlgorithmConfig::use_rollout_entropy,
          "Measure the entropy before the first optimizer step of a rollout (rollout/entropy)."},
    Field{"gamma",
          &AlgorithmConfig::gamma,
          "Discount of later rewards in reinforce_plus_plus.",
          {.at_least = 0, .at_most = 1}},
    Field{"lambd",
          &AlgorithmConfig::lambd,
          "Lambda of GAE.",
          {.at_least = 0, .at_most = 1, .kind = Kind::no_effect, .why = "only PPO uses GAE"}},
    Field{"normalize_advantages", &AlgorithmConfig::normalize_advantages,
          "Whiten advantages over all loss tokens of a rollout."},
    Field{"grpo_std_normalization",
          &AlgorithmConfig::grpo_std_normalization,
          "Divide a group's advantages by the standard deviation of its rewards (grpo, gspo).",
          {.inverse = "disable_grpo_std_normalization"}},
    Field{"rewards_normalization",
          &AlgorithmConfig::rewards_normalization,
          "Subtract the group's mean reward; off: advantages are the rewards.",
          {.inverse = "disable_rewards_normalization"}},
    Field{"compute_advantages_and_returns",
          &AlgorithmConfig::compute_advantages_and_returns,
          "Compute advantages.",
          {.inverse = "disable_compute_advantages_and_returns",
           .kind = Kind::refused,
           .why = "the policy loss needs advantages"}},
    Field{"use_rollout_logprobs", &AlgorithmConfig::use_rollout_logprobs,
          "Take the engine's log-probabilities as the old ones; saves a forward with several "
          "optimizer steps a rollout."},
    Field{"get_mismatch_metrics", &AlgorithmConfig::get_mismatch_metrics,
          "Report the ratio of trainer to engine probability (train/tis, train/tis_abs) though it "
          "has no weight in the loss."},
    Field{"use_tis", &AlgorithmConfig::use_tis,
          "Weigh the policy loss by the ratio of trainer to engine probability. Default: on with "
          "--async-steps, unless --use-rollout-logprobs corrects by the ratio itself."},
    Field{"tis_clip",
          &AlgorithmConfig::tis_clip,
          "Upper bound of that weight.",
          {.at_least = 0, .open = true}},
    Field{"tis_clip_low",
          &AlgorithmConfig::tis_clip_low,
          "Lower bound of that weight.",
          {.at_least = 0}},
    Field{"tis_mode", &AlgorithmConfig::tis_mode,
          "Outside of the bounds: clip sets the weight to the bound, icepop to 0, mask takes the "
          "token out of the loss and of its denominator."},
    Field{"tis_level", &AlgorithmConfig::tis_level,
          "The ratio of a token, of its sequence (product), or the sequence's geometric mean."},
    Field{"use_rs", &AlgorithmConfig::use_rs,
          "Rejection: tokens whose ratio of trainer to engine probability is out of bounds leave "
          "the loss."},
    Field{"rs_level", &AlgorithmConfig::rs_level, "As --tis-level, for the rejection."},
    Field{"rs_lower_bound",
          &AlgorithmConfig::rs_lower_bound,
          "Smallest ratio that is kept. Default: 1 / rs_upper_bound.",
          {.at_least = 0}},
    Field{"rs_upper_bound",
          &AlgorithmConfig::rs_upper_bound,
          "Largest ratio that is kept. Default: tis_clip.",
          {.at_least = 0, .open = true}},
    Field{"rs_veto_threshold",
          &AlgorithmConfig::rs_veto_threshold,
          "A sequence with one token of a smaller ratio is rejected whole. Default: none is.",
          {.at_least = 0, .at_most = 1, .open = true}},
    Field{"use_opsm", &AlgorithmConfig::use_opsm,
          "Mask negative samples whose mean old minus new log-probability is above --opsm-delta."},
    Field{"opsm_delta", &AlgorithmConfig::opsm_delta, "Bound of --use-opsm.", {.at_least = 0}},
    Field{"seed",
          &AlgorithmConfig::seed,
          "Seed of sampling: the same seed gives the same tokens.",
          {.at_least = 0}}};

template <>
inline constexpr auto table<OptimizerConfig> = std::tuple{
    Field{"optimizer",
          &OptimizerConfig::optimizer,
          "adam: AdamW with decoupled weight decay.",
          {.choices = "adam|sgd|muon|dist_muon", .now = "adam", .why = "use --optimizer adam"}},
    Field{"lr", &OptimizerConfig::lr, "Learning rate at its highest.", {.at_least = 0}},
    Field{"min_lr", &OptimizerConfig::min_lr, "Learning rate after the decay.", {.at_least = 0}},
    Field{"lr_decay_style",
          &OptimizerConfig::lr_decay_style,
          "Course of the learning rate after the warm-up.",
          {.miles = "linear (megatron)"}},
    Field{"lr_warmup_iters",
          &OptimizerConfig::lr_warmup_iters,
          "Optimizer steps in which the learning rate rises linearly.",
          {.at_least = 0}},
    Field{"lr_warmup_fraction",
          &OptimizerConfig::lr_warmup_fraction,
          "The same as a share of lr_decay_iters.",
          {.at_least = 0, .at_most = 1}},
    Field{"lr_warmup_init",
          &OptimizerConfig::lr_warmup_init,
          "Learning rate at the start of the warm-up.",
          {.at_least = 0}},
    Field{"lr_decay_iters",
          &OptimizerConfig::lr_decay_iters,
          "Optimizer step at which the decay ends. Default: the last of the run.",
          {.at_least = 1}},
    Field{"lr_wsd_decay_iters",
          &OptimizerConfig::lr_wsd_decay_iters,
          "Optimizer steps of the decay at the end of the style WSD.",
          {.at_least = 1}},
    Field{"lr_wsd_decay_style", &OptimizerConfig::lr_wsd_decay_style, "Course of that decay."},
    Field{"adam_beta1",
          &OptimizerConfig::adam_beta1,
          "Decay of the first moment.",
          {.at_least = 0, .at_most = 0.9999999}},
    Field{"adam_beta2",
          &OptimizerConfig::adam_beta2,
          "Decay of the second moment.",
          {.at_least = 0, .at_most = 0.9999999, .miles = "0.999 (megatron), 0.95 (fsdp)"}},
    Field{"adam_eps",
          &OptimizerConfig::adam_eps,
          "Added to the root of the second moment.",
          {.at_least = 0, .open = true}},
    Field{"weight_decay",
          &OptimizerConfig::weight_decay,
          "Decoupled weight decay, of all parameters as in torch.optim.AdamW.",
          {.at_least = 0, .miles = "0.01 (megatron), 0 (fsdp)"}},
    Field{"clip_grad",
          &OptimizerConfig::clip_grad,
          "The gradient is scaled down to this norm; 0: never.",
          {.at_least = 0}}};

template <>
inline constexpr auto table<TrainConfig> = std::tuple{
    Field{"train_backend",
          &TrainConfig::train_backend,
          "Mesh, sharding and checkpoint form of the trainer.",
          {.now = "fsdp", .miles = "megatron", .why = "use --train-backend fsdp"}},
    Field{"global_batch_size",
          &TrainConfig::global_batch_size,
          "Samples an optimizer step. Default: rollout_batch_size x n_samples_per_prompt / "
          "num_steps_per_rollout.",
          {.at_least = 1}},
    Field{"num_steps_per_rollout",
          &TrainConfig::num_steps_per_rollout,
          "Optimizer steps a rollout. Default: 1, or what --global-batch-size gives.",
          {.at_least = 1}},
    Field{"max_tokens_per_gpu",
          &TrainConfig::max_tokens_per_gpu,
          "Most tokens packed into one micro-batch; a longer sample is one of its own.",
          {.at_least = 1, .miles = "none (required with --use-dynamic-batch-size)"}},
    Field{"calculate_per_token_loss", &TrainConfig::calculate_per_token_loss,
          "Mean of the loss over tokens, not per sample and then over samples."},
    Field{"constant_loss_length",
          &TrainConfig::constant_loss_length,
          "Divide the summed policy loss of each sample by this many tokens, not by its own number "
          "(Dr. GRPO). Default: its own.",
          {.at_least = 1}},
    Field{"max_skipped_steps",
          &TrainConfig::max_skipped_steps,
          "Optimizer steps in a row with a gradient that is not finite, after which the run ends; "
          "0: never.",
          {.at_least = 0}},
    Field{"share_prompt", &TrainConfig::share_prompt,
          "Compute the prompt that a group shares once."},
    Field{"deterministic_layout", &TrainConfig::deterministic_layout,
          "Add gradients in an order that does not depend on the number of ranks. Default: on with "
          "--device cpu. Off: one leaf a rank, which saves memory and time."},
    Field{"gradient_leaves",
          &TrainConfig::gradient_leaves,
          "Parts of the global batch in that order: a power of two.",
          {.at_least = 1, .at_most = 1024}},
    Field{
        "fsdp_reshard_after_forward", &TrainConfig::fsdp_reshard_after_forward,
        "Each trainer rank keeps its share of the compute weights and gathers a layer's before its "
        "forward and again before its backward, the next layer's meanwhile (FSDP's full shard, "
        "ZeRO-3). Off: every trainer rank holds all compute weights; master weights and moments "
        "are sharded in either case. No bit differs."},
    Field{
        "recompute_granularity",
        &TrainConfig::recompute_granularity,
        "full: backward computes layers again from their input, which saves memory and changes no "
        "bit. selective: attention's scores, which are never kept here.",
        {.choices = "full|selective"}},
    Field{"recompute_method",
          &TrainConfig::recompute_method,
          "Of full: uniform keeps the input of every --recompute-num-layers layers, block computes "
          "the first --recompute-num-layers layers again, each from its input.",
          {.choices = "uniform|block"}},
    Field{"recompute_num_layers",
          &TrainConfig::recompute_num_layers,
          "See --recompute-method. Default: 1.",
          {.at_least = 1}},
    Field{"gradient_checkpointing", &TrainConfig::gradient_checkpointing,
          "Short for --recompute-granularity full --recompute-method uniform."},
    Field{
        "ci_test", &TrainConfig::ci_test,
        "Check the invariants of a run at each step and end it at the first that fails: no KL and "
        "no clipping before the first optimizer step of a rollout, none against the reference "
        "before the first of the run, trainer and engine agree, weights are equal after an "
        "update."},
    Field{"ci_disable_kl_checker", &TrainConfig::ci_disable_kl_checker,
          "Leave the KL and clipping out of --ci-test."},
    Field{"ci_disable_logprobs_checker", &TrainConfig::ci_disable_logprobs_checker,
          "Leave the log-probabilities of trainer and engine out of --ci-test."},
    Field{"ci_disable_weight_update_checker", &TrainConfig::ci_disable_weight_update_checker,
          "Leave the weights after an update out of --ci-test."}};

template <>
inline constexpr auto table<EvaluateConfig> = std::tuple{
    Field{"eval_interval",
          &EvaluateConfig::eval_interval,
          "Rollouts between evaluations; the first is before training, the last after it.",
          {.at_least = 1}},
    Field{"eval_prompt_data", &EvaluateConfig::eval_prompt_data,
          "Pairs of a name and a JSONL file."},
    Field{"n_samples_per_eval_prompt",
          &EvaluateConfig::n_samples_per_eval_prompt,
          "Answers to each evaluation prompt.",
          {.at_least = 1}},
    Field{"eval_temperature",
          &EvaluateConfig::eval_temperature,
          "Temperature of evaluation; 0 is greedy. Default: that of rollout.",
          {.at_least = 0}},
    Field{"eval_top_p",
          &EvaluateConfig::eval_top_p,
          "Evaluation among the likeliest tokens that together have this probability. Default: "
          "that of rollout.",
          {.at_least = 0, .at_most = 1, .open = true}},
    Field{"eval_top_k",
          &EvaluateConfig::eval_top_k,
          "Evaluation among the k likeliest tokens; -1: all. Default: that of rollout.",
          {.at_least = -1}},
    Field{"eval_max_response_len",
          &EvaluateConfig::eval_max_response_len,
          "Most new tokens of an answer. Default: that of rollout.",
          {.at_least = 1}},
    Field{"eval_max_prompt_len",
          &EvaluateConfig::eval_max_prompt_len,
          "Prompts with more tokens are left out. Default: that of rollout.",
          {.at_least = 1}},
    Field{"eval_input_key", &EvaluateConfig::eval_input_key,
          "Key of the prompt in a row. Default: --input-key."},
    Field{"eval_label_key", &EvaluateConfig::eval_label_key,
          "Key of the label in a row. Default: --label-key."},
    Field{"eval_config",
          &EvaluateConfig::eval_config,
          "YAML file with evaluation sets.",
          {.kind = Kind::refused, .why = "use --eval-prompt-data NAME FILE ..."}},
    Field{"skip_eval_before_train", &EvaluateConfig::skip_eval_before_train,
          "No evaluation before the first step."}};

template <>
inline constexpr auto table<TransferConfig> = std::tuple{
    Field{"update_weight_transfer_mode",
          &TransferConfig::update_weight_transfer_mode,
          "Way of the weights to engines on other ranks; colocated engines share the weights.",
          {.now = "broadcast|p2p", .why = "use broadcast or p2p"}},
    Field{"update_weight_buffer_size",
          &TransferConfig::update_weight_buffer_size,
          "Most bytes of one message of a weight update.",
          {.at_least = 1024}},
    Field{"update_weight_shared_memory", &TransferConfig::update_weight_shared_memory,
          "Ranks of one host read each other's weights from memory; off: over sockets."},
    Field{
        "update_weights_interval",
        &TransferConfig::update_weights_interval,
        "Rollouts between weight updates; answers are up to that many updates old. After the last "
        "rollout there is one always.",
        {.at_least = 1}},
    Field{"update_weight_double_buffer", &TransferConfig::update_weight_double_buffer,
          "A second copy of the engine's weights: an update that fails leaves the old ones "
          "serving, and "
          "with --update-weights-in-flight engines go on sampling while the new ones move."},
    Field{"update_weights_in_flight", &TransferConfig::update_weights_in_flight,
          "With --async-steps: update the weights while answers are still being written, not after "
          "the last one. Saves the wait; which tokens have which weights then depends on the "
          "clock."},
    Field{"pause_generation_mode", &TransferConfig::pause_generation_mode,
          "What becomes of answers that are being written at a weight update "
          "(--update-weights-in-flight): retract keeps their tokens and computes their KV again "
          "with the new weights, in_place keeps both, abort begins them anew (not those of "
          "--custom-generate-function-path)."},
    Field{"check_weight_update_equal", &TransferConfig::check_weight_update_equal,
          "After each update compare every tensor that every engine serves with one made anew from "
          "the trainer's master weights."}};

template <>
inline constexpr auto table<CheckpointConfig> = std::tuple{
    Field{"load", &CheckpointConfig::load,
          "Folder of checkpoints (or of a run) to continue from: the run goes on after the rollout "
          "that the newest one holds, as if it had not stopped. If it equals --save and is empty, "
          "the run begins."},
    Field{"ckpt_step",
          &CheckpointConfig::ckpt_step,
          "Continue from this checkpoint of --load (the number in iter_0000009) instead of the "
          "newest. Later steps are done again.",
          {.at_least = 0}},
    Field{"load_optim", &CheckpointConfig::load_optim,
          "Take the optimizer's state from the checkpoint too; off: it begins anew."},
    Field{"finetune", &CheckpointConfig::finetune,
          "Take only the weights of --load and begin a run of its own at rollout 0."},
    Field{"save", &CheckpointConfig::save,
          "Folder of checkpoints. The state after the last rollout is always saved, and on Ctrl-C. "
          "Default with --save-interval: <run-dir>/checkpoints."},
    Field{"save_interval",
          &CheckpointConfig::save_interval,
          "Rollouts between checkpoints.",
          {.at_least = 1}},
    Field{"save_keep_last",
          &CheckpointConfig::save_keep_last,
          "Checkpoints that are kept; older ones are removed once a newer one is whole. Default: "
          "all.",
          {.at_least = 1}},
    Field{"save_retain_interval",
          &CheckpointConfig::save_retain_interval,
          "Checkpoints at multiples of this many rollouts are never removed; of the others only "
          "the newest stays, or --save-keep-last of them.",
          {.at_least = 1}},
    Field{"save_optim", &CheckpointConfig::save_optim,
          "Put the optimizer's state into checkpoints."},
    Field{"async_save",
          &CheckpointConfig::async_save,
          "Write checkpoints while training.",
          {.kind = Kind::no_effect, .why = "checkpoints are written between two steps"}},
    Field{"save_hf", &CheckpointConfig::save_hf,
          "Folder for the trained model in Hugging Face form, written at the end; {rollout_id} is "
          "filled in. Empty: it is not written."}};

inline constexpr std::string_view kNoTracker =
    "no tracker is fed yet; metrics.jsonl in the run's folder holds every metric";

template <>
inline constexpr auto table<LoggingConfig> = std::tuple{
    Field{"run_dir", &LoggingConfig::run_dir,
          "Folder of the run's files. Default: runs/<time>-<run_name>."},
    Field{"run_name", &LoggingConfig::run_name, "Name of the run. Default: the model folder's."},
    Field{"save_rollouts", &LoggingConfig::save_rollouts,
          "Write the samples of each rollout to the run's folder."},
    Field{"progress", &LoggingConfig::progress,
          "Progress bars; without a terminal a line every few seconds. Default: on."},
    Field{"log_level", &LoggingConfig::log_level, "Least important messages that are shown."},
    Field{"use_tensorboard", &LoggingConfig::use_tensorboard,
          "Write TensorBoard events to the run's folder."},
    Field{"use_wandb",
          &LoggingConfig::use_wandb,
          "Send metrics to Weights & Biases.",
          {.kind = Kind::no_effect, .why = kNoTracker}}};

template <>
inline constexpr auto table<DebugConfig> = std::tuple{
    Field{
        "dry_run", &DebugConfig::dry_run,
        "Check config, model folder, prompts, template, memory, ports and helpers, start nothing."},
    Field{"debug_perturb_kernel", &DebugConfig::debug_perturb_kernel,
          "Make one kernel of that side wrong by a little, to see the log-probability gap rise."},
    Field{"debug_break_update", &DebugConfig::debug_break_update,
          "Make the update to weight version 3 fail on the last rank: corrupt changes a weight on "
          "its way, die ends the rank in the middle of the move, hang never finishes it."},
    Field{"debug_rollout_only", &DebugConfig::debug_rollout_only,
          "Generate and reward, do not train."},
    Field{"debug_train_only", &DebugConfig::debug_train_only,
          "Train on the rollouts of --load-debug-rollout-data, do not generate or evaluate."},
    Field{"save_debug_rollout_data", &DebugConfig::save_debug_rollout_data,
          "File for the samples of each rollout; {rollout_id} is filled in ({rollout_id:07d} with "
          "leading zeros). The form is that of the run's rollouts/ folder."},
    Field{"load_debug_rollout_data", &DebugConfig::load_debug_rollout_data,
          "Recorded rollouts to train on, as --save-debug-rollout-data names them; implies "
          "--debug-train-only."}};

// ---- commands
// ------------------------------------------------------------------------------------

template <>
inline constexpr auto table<Config> =
    std::tuple{Field{"cluster", &Config::cluster, "Ranks and placement"},
               Field{"compute", &Config::compute, "Device"},
               Field{"model", &Config::model, "Model"},
               Field{"data", &Config::data, "Prompts"},
               Field{"rollout", &Config::rollout, "Rollout and sampling"},
               Field{"engine", &Config::engine, "Engine"},
               Field{"reward", &Config::reward, "Reward"},
               Field{"algorithm", &Config::algorithm, "Algorithm"},
               Field{"optimizer", &Config::optimizer, "Optimizer"},
               Field{"train", &Config::train, "Training step"},
               Field{"evaluate", &Config::evaluate, "Evaluation"},
               Field{"transfer", &Config::transfer, "Weight update"},
               Field{"checkpoint", &Config::checkpoint, "Checkpoints"},
               Field{"logging", &Config::logging, "Run folder and logging"},
               Field{"debug", &Config::debug, "Debugging"}};

}  // namespace tandem

#include "config/command_flags.h"

namespace tandem {

// A member without a row does not compile.
template <class... C>
constexpr bool rows_complete =
    ((std::tuple_size_v<std::remove_cv_t<decltype(table<C>)>> == member_count<C>()) && ...);
static_assert(rows_complete<ClusterConfig, ComputeConfig, ModelOptions, DataConfig, RolloutConfig>);
static_assert(rows_complete<EngineConfig, RewardConfig, AlgorithmConfig, OptimizerConfig>);
static_assert(rows_complete<TrainConfig, EvaluateConfig, TransferConfig, CheckpointConfig>);
static_assert(rows_complete<LoggingConfig, DebugConfig>);
static_assert(rows_complete<Config, GenerateConfig, ScoreConfig, SelftestConfig, ServeConfig>);

}  // namespace tandem
