// Derived values, section by section; one function a topic, one line a value.
#include "config/resolve.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <bit>
#include <ctime>
#include <filesystem>
#include <numeric>
#include <thread>

#include "base/check.h"
#include "base/process.h"

namespace tandem {
namespace {

using Lines = std::vector<std::string>;

// Sets an empty optional and writes the line "name = value (reason)".
template <class T, class U>
void fill(std::optional<T>& member, U value, std::string_view name, std::string_view reason,
          Lines& lines) {
  if (member) return;
  member = value;
  lines.push_back(fmt::format("{} = {} ({})", name, *member, reason));
}

void fill(std::string& member, const std::string& value, std::string_view name,
          std::string_view reason, Lines& lines) {
  if (!member.empty() || value.empty()) return;
  member = value;
  lines.push_back(fmt::format("{} = {} ({})", name, member, reason));
}

void resolve_compute(ComputeConfig& compute, ModelOptions& model, std::int64_t ranks_on_host,
                     std::int64_t engine_width, const Host& host, Lines& lines) {
  if (compute.device == Device::automatic) {
    compute.device = host.cuda ? Device::cuda : Device::cpu;
    lines.push_back(
        fmt::format("device = {}", host.cuda ? "cuda (a GPU is there)" : "cpu (no GPU)"));
  }
  TD_CHECK(
      compute.device != Device::cuda || host.cuda,
      "--device: cuda wanted, found {} NVIDIA GPUs and {}{}; use --device cpu, or on a machine "
      "with a GPU build that part (cmake --preset cuda)",
      num_gpus(), std::filesystem::exists(cuda_part_path()) ? "" : "no ", cuda_part_path());
  const bool cpu = compute.device == Device::cpu;
  if (cpu && !compute.is_exact() && engine_width == 1) {
    compute.true_on_policy_mode = true;
    lines.push_back("true_on_policy_mode = true (on the CPU engines of one rank are exact)");
  }
  fill(compute.true_on_policy_mode, cpu, "true_on_policy_mode", cpu ? "device cpu" : "device cuda",
       lines);
  if (!cpu && compute.is_exact() && !compute.deterministic_mode) {
    compute.deterministic_mode = true;
    lines.push_back("deterministic_mode = true (true_on_policy_mode)");
  }
  fill(compute.threads_per_rank, std::max<std::int64_t>(1, host.num_cpus / ranks_on_host),
       "threads_per_rank", fmt::format("{} cores / {} ranks", host.num_cpus, ranks_on_host), lines);
  if (model.dtype == ComputeDtype::automatic) {
    const bool gpu = compute.device == Device::cuda;
    model.dtype = gpu || host.bf16_instructions ? ComputeDtype::bfloat16 : ComputeDtype::float32;
    lines.push_back(gpu ? std::string("dtype = bfloat16 (device cuda)")
                        : fmt::format("dtype = {} (this processor has {}AVX-512 BF16)",
                                      name_of(model.dtype), host.bf16_instructions ? "" : "no "));
  }
}

void resolve_placement(ClusterConfig& cluster, Lines& lines) {
  fill(cluster.actor_num_gpus_per_node, 1, "actor_num_gpus_per_node", "one rank", lines);
  const std::int64_t per_node = *cluster.actor_num_gpus_per_node;
  const auto& widths = cluster.rollout_num_gpus_of_engines;
  if (!widths.empty())
    fill(cluster.rollout_num_gpus, std::accumulate(widths.begin(), widths.end(), std::int64_t{0}),
         "rollout_num_gpus", "the sum of rollout_num_gpus_of_engines", lines);
  fill(cluster.rollout_num_gpus, cluster.actor_num_nodes * per_node, "rollout_num_gpus",
       "colocated: the trainer's ranks", lines);
  fill(cluster.offload_train, false, "offload_train", "the trainer's state stays where it is",
       lines);
}

void resolve_offload(ClusterConfig& cluster, bool gpu, Lines& lines) {
  if (cluster.offload) fill(cluster.offload_rollout, true, "offload_rollout", "offload", lines);
  fill(cluster.offload_rollout, gpu && cluster.colocate, "offload_rollout",
       gpu ? "KV memory on a GPU is for both sides in turn" : "host memory", lines);
}

void resolve_batch(const RolloutConfig& rollout, TrainConfig& train, Lines& lines) {
  const std::int64_t prompts = *rollout.rollout_batch_size;
  const std::int64_t samples = prompts * rollout.n_samples_per_prompt;
  const std::string product = fmt::format("rollout_batch_size {} x n_samples_per_prompt {}",
                                          prompts, rollout.n_samples_per_prompt);
  if (train.global_batch_size) {
    fill(train.num_steps_per_rollout, samples / *train.global_batch_size, "num_steps_per_rollout",
         fmt::format("{} / global_batch_size {}", product, *train.global_batch_size), lines);
  }
  fill(train.num_steps_per_rollout, 1, "num_steps_per_rollout", "default", lines);
  fill(train.global_batch_size, samples / *train.num_steps_per_rollout, "global_batch_size",
       fmt::format("{} / num_steps_per_rollout {}", product, *train.num_steps_per_rollout), lines);
}

void resolve_lengths(RolloutConfig& rollout, Lines& lines) {
  if (!rollout.rollout_max_context_len) return;
  const std::int64_t most = *rollout.rollout_max_context_len - 1;
  const std::string reason = fmt::format("rollout_max_context_len {} - 1", most + 1);
  fill(rollout.rollout_max_prompt_len, most, "rollout_max_prompt_len", reason, lines);
  fill(rollout.rollout_max_response_len, most, "rollout_max_response_len", reason, lines);
}

void resolve_algorithm(AlgorithmConfig& a, const std::string& hf_checkpoint, bool asynchronous,
                       Lines& lines) {
  const bool stale = asynchronous && !a.use_rollout_logprobs;
  if (stale)
    fill(a.use_tis, true, "use_tis", "async_steps: answers come from older weights", lines);
  a.use_tis = a.uses_tis();
  fill(a.eps_clip_high, a.eps_clip, "eps_clip_high", "eps_clip", lines);
  if (a.use_rs) {
    fill(a.rs_upper_bound, a.tis_clip, "rs_upper_bound", "tis_clip", lines);
    fill(a.rs_lower_bound, 1.0 / *a.rs_upper_bound, "rs_lower_bound", "1 / rs_upper_bound", lines);
  }
  if (a.uses_reference()) fill(a.ref_load, hf_checkpoint, "ref_load", "hf_checkpoint", lines);
}

void resolve_recompute(TrainConfig& train, Lines& lines) {
  if (train.gradient_checkpointing) {
    fill(train.recompute_granularity, "full", "recompute_granularity", "gradient_checkpointing",
         lines);
    fill(train.recompute_method, "uniform", "recompute_method", "gradient_checkpointing", lines);
  }
  if (train.recompute_granularity == "full")
    fill(train.recompute_num_layers, 1, "recompute_num_layers", "default", lines);
}

void resolve_evaluation(const Config& config, EvaluateConfig& evaluate, Lines& lines) {
  if (evaluate.eval_prompt_data.size() == 1) {
    evaluate.eval_prompt_data.insert(evaluate.eval_prompt_data.begin(), "aime");
    lines.push_back(fmt::format("eval_prompt_data = aime {} (a single word is the file of 'aime')",
                                evaluate.eval_prompt_data[1]));
  }
  const RolloutConfig& rollout = config.rollout;
  fill(evaluate.eval_temperature, rollout.rollout_temperature, "eval_temperature",
       "rollout_temperature", lines);
  fill(evaluate.eval_top_p, rollout.rollout_top_p, "eval_top_p", "rollout_top_p", lines);
  fill(evaluate.eval_top_k, rollout.rollout_top_k, "eval_top_k", "rollout_top_k", lines);
  fill(evaluate.eval_max_response_len, *rollout.rollout_max_response_len, "eval_max_response_len",
       "rollout_max_response_len", lines);
  if (rollout.rollout_max_prompt_len) {
    fill(evaluate.eval_max_prompt_len, *rollout.rollout_max_prompt_len, "eval_max_prompt_len",
         "rollout_max_prompt_len", lines);
  }
  fill(evaluate.eval_input_key, config.data.input_key, "eval_input_key", "input_key", lines);
  fill(evaluate.eval_label_key, config.data.label_key, "eval_label_key", "label_key", lines);
}

// The last part of a path, with or without a final slash.
std::string last_part(const std::string& path) {
  const std::filesystem::path normal = std::filesystem::path(path).lexically_normal();
  const auto name = normal.filename();
  return (name.empty() ? normal.parent_path().filename() : name).string();
}

void resolve_output(Config& config, const Host& host, Lines& lines) {
  const std::string model = last_part(config.model.hf_checkpoint);
  const bool is_name = !model.empty() && model != "." && model != "..";
  fill(config.logging.run_name, is_name ? model : "train", "run_name",
       is_name ? "the model's folder" : "default", lines);
  fill(config.logging.run_dir, "runs/" + host.time + "-" + config.logging.run_name, "run_dir",
       "runs/<time>-<run_name>", lines);
  if (config.checkpoint.save_interval)
    fill(config.checkpoint.save, config.logging.run_dir + "/checkpoints", "save",
         "<run_dir>/checkpoints", lines);
}

void resolve_debug(DebugConfig& debug, Lines& lines) {
  if (debug.load_debug_rollout_data.empty() || debug.debug_train_only) return;
  debug.debug_train_only = true;
  lines.push_back("debug_train_only = true (--load-debug-rollout-data)");
}

}  // namespace

Host this_host() {
  Host host;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  host.num_cpus = sched_getaffinity(0, sizeof cores, &cores) == 0
                      ? CPU_COUNT(&cores)
                      : std::max(1U, std::thread::hardware_concurrency());
#if defined(__x86_64__)
  host.bf16_instructions = __builtin_cpu_supports("avx512bf16") != 0;
#endif
  host.cuda = num_gpus() > 0 && std::filesystem::exists(cuda_part_path());
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  char text[32];
  host.time.assign(text, std::strftime(text, sizeof text, "%Y%m%d-%H%M%S", &local));
  return host;
}

std::vector<std::string> resolve(Config& config, const Host& host) {
  Lines lines;
  resolve_placement(config.cluster, lines);
  const std::int64_t trainers = *config.cluster.actor_num_gpus_per_node;
  const std::int64_t engines = *config.cluster.rollout_num_gpus;
  resolve_compute(config.compute, config.model,
                  config.cluster.colocate ? std::max(trainers, engines) : trainers + engines,
                  std::ranges::max(config.cluster.engine_widths()), host, lines);
  const bool gpu = config.compute.device == Device::cuda;
  resolve_offload(config.cluster, gpu, lines);
  resolve_batch(config.rollout, config.train, lines);
  resolve_lengths(config.rollout, lines);
  resolve_algorithm(config.algorithm, config.model.hf_checkpoint, config.rollout.async_steps > 0,
                    lines);
  fill(config.train.deterministic_layout, !gpu, "deterministic_layout", "on with --device cpu",
       lines);
  TD_CHECK(!gpu || !config.train.fsdp_reshard_after_forward, "{}",
           "--fsdp-reshard-after-forward: on GPUs every trainer rank holds all compute weights so "
           "far; leave it out, or use --device cpu");
  const auto least = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(trainers)));
  if (!*config.train.deterministic_layout && config.train.gradient_leaves != least) {
    config.train.gradient_leaves = least;
    lines.push_back(fmt::format(
        "gradient_leaves = {} (the fewest for {} trainer ranks: deterministic_layout is off)",
        least, trainers));
  }
  resolve_recompute(config.train, lines);
  resolve_evaluation(config, config.evaluate, lines);
  resolve_output(config, host, lines);
  resolve_debug(config.debug, lines);
  return lines;
}

std::vector<std::string> resolve(GenerateConfig& config, const Host& host) {
  Lines lines;
  resolve_compute(config.compute, config.model, 1, 1, host, lines);
  return lines;
}

std::vector<std::string> resolve(ScoreConfig& config, const Host& host) {
  Lines lines;
  resolve_compute(config.compute, config.model, 1, 1, host, lines);
  return lines;
}

std::vector<std::string> resolve(SelftestConfig& config, const Host& host) {
  Lines lines;
  resolve_compute(config.compute, config.model, 1, 1, host, lines);
  return lines;
}

std::vector<std::string> resolve(ServeConfig& config, const Host& host) {
  Lines lines;
  resolve_compute(config.compute, config.model, 1, 1, host, lines);
  return lines;
}

std::vector<std::string> resolve_num_rollout(Config& config, std::int64_t num_rows) {
  Lines lines;
  const std::int64_t prompts = *config.rollout.rollout_batch_size;
  TD_CHECK(num_rows >= prompts,
           "--rollout-batch-size: found {}, but {} has {} prompts; lower it or give more prompts",
           prompts, config.data.prompt_data, num_rows);
  if (config.data.num_rollout) return lines;
  const std::int64_t epochs = *config.data.num_epoch;
  fill(
      config.data.num_rollout, epochs * (num_rows / prompts), "num_rollout",
      fmt::format("num_epoch {} x ({} prompts / rollout_batch_size {})", epochs, num_rows, prompts),
      lines);
  return lines;
}

}  // namespace tandem
