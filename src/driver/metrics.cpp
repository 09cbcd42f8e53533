// The declarations of all metrics of a run, and the rows made from results.
#include "driver/metrics.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace tandem {

const Declarations& train_declarations() {
  static const Declarations declarations({
      {"rollout/raw_reward", Reduction::mean, "reward as the rule gave it, over samples"},
      {"rollout/reward/*", Reduction::mean, "a number of a reward that is an object"},
      {"rollout/failed_samples", Reduction::sum, "samples without a reward: not trained on"},
      {"rollout/num_prompts", Reduction::sum, "prompts drawn for the rollout"},
      {"rollout/dynamic_filter/*", Reduction::sum, "groups that the filter dropped, by reason"},
      {"rollout/rewards", Reduction::mean, "advantage of a sample before it becomes one per token"},
      {"rollout/advantages", Reduction::mean, "advantage of a loss token"},
      {"rollout/returns", Reduction::mean, "the same before whitening"},
      {"rollout/log_probs", Reduction::mean, "the trainer's, with the rollout's weights"},
      {"rollout/rollout_log_probs", Reduction::mean, "the engine's"},
      {"rollout/ref_log_probs", Reduction::mean, "the reference model's"},
      {"rollout/kl", Reduction::mean, "KL in the reward, by --kl-loss-type"},
      {"rollout/entropy", Reduction::mean, "entropy with the rollout's weights"},
      {"rollout/response_len/mean", Reduction::mean,
       "trained tokens of a response, over samples that have a reward"},
      {"rollout/response_len/median", Reduction::last, "its median, over all samples"},
      {"rollout/response_len/max", Reduction::max, "its maximum"},
      {"rollout/response_len/min", Reduction::min, "its minimum"},
      {"rollout/truncated_ratio", Reduction::mean, "share of responses cut at the length limit"},
      {"rollout/zero_std/count", Reduction::sum, "groups whose rewards are all equal"},
      {"rollout/num_samples", Reduction::sum, "samples of the rollout"},
      {"rollout/prefix_cache_hit_rate", Reduction::mean,
       "share of prompt tokens that the engine had not to compute"},
      {"rollout/avg_cached_tokens_per_sample", Reduction::mean, "such tokens of a sample"},
      {"train/loss", Reduction::mean, "the loss that was differentiated"},
      {"train/pg_loss", Reduction::mean, "its policy part"},
      {"train/entropy_loss", Reduction::mean, "entropy of the present policy"},
      {"train/kl_loss", Reduction::mean, "KL against the reference, by --kl-loss-type"},
      {"train/ess_ratio", Reduction::mean,
       "effective share of a sample's tokens under the ratios of new to old probability"},
      {"train/opsm_clipfrac", Reduction::mean, "share of loss tokens masked by --use-opsm"},
      {"train/ois", Reduction::mean, "ratio of new to old probability"},
      {"train/tis", Reduction::mean, "ratio of trainer to engine probability, before any bound"},
      {"train/tis_abs", Reduction::mean, "|that ratio - 1|"},
      {"train/tis_clipfrac", Reduction::mean, "share of loss tokens whose weight is not the ratio"},
      {"train/tis_weight", Reduction::mean, "what the policy loss was multiplied by"},
      {"train/rs_rejected_frac", Reduction::mean, "share of loss tokens that left the loss"},
      {"train/pg_clipfrac", Reduction::mean, "share of loss tokens on the clipped branch"},
      {"train/ppo_kl", Reduction::mean, "old minus new log-probability (k1)"},
      {"rollout/weight_version/mean", Reduction::mean, "weight version of a sample's oldest token"},
      {"rollout/weight_version/median", Reduction::last, "its median, over all samples"},
      {"rollout/weight_version/max", Reduction::max, "its maximum"},
      {"rollout/weight_version/min", Reduction::min, "its minimum"},
      {"rollout/weight_version/mixed_version_ratio", Reduction::mean,
       "share of samples with tokens of several versions"},
      {"rollout/staleness/mean", Reduction::mean,
       "versions from a sample's oldest token to the weights that train on it"},
      {"rollout/staleness/max", Reduction::max, "its maximum"},
      {"train/train_rollout_logprob_abs_diff", Reduction::mean,
       "|trainer's minus engine's log-probability| over loss tokens of samples that the trainer's "
       "present weights generated"},
      {"train/off_policy_logprob_abs_diff", Reduction::mean, "the same of all other samples"},
      {"train/off_policy_logprob_abs_diff/*", Reduction::mean,
       "by the versions that lie between (lag_1, …)"},
      {"train/first_batch_logprob_abs_diff", Reduction::mean,
       "the same of all samples, in rows of a batch that was the first to be generated after a "
       "weight update"},
      {"train/on_policy_samples", Reduction::sum,
       "samples that the trainer's present weights generated"},
      {"train/train_rollout_logprob_abs_diff_max", Reduction::max, "its maximum"},
      {"train/train_rollout_kl", Reduction::mean, "k3 of engine against trainer"},
      {"train/grad_norm", Reduction::mean, "before clipping"},
      {"train/lr-pg_0", Reduction::last, "learning rate"},
      {"train/skipped_steps", Reduction::sum, "optimizer steps skipped for a non-finite gradient"},
      {"train/loss_tokens", Reduction::sum, "tokens in the loss"},
      {"train/micro_batches", Reduction::sum, "packed forward and backward passes"},
      {"perf/rollout_time", Reduction::max, "seconds of generation and rewards"},
      {"perf/train_time", Reduction::max, "seconds of the train call"},
      {"perf/actor_train_time", Reduction::max, "seconds of forward and backward"},
      {"perf/log_probs_time", Reduction::max, "seconds of the forward-only pass"},
      {"perf/gather_wait_time", Reduction::max,
       "seconds in which the trainer had nothing to do but wait for sharded weights "
       "(--fsdp-reshard-after-forward)"},
      {"perf/ref_log_probs_time", Reduction::max, "seconds of the reference's forward"},
      {"perf/optimizer_time", Reduction::max, "seconds of gradient sum, clipping and AdamW"},
      {"perf/actor_train_tok_per_s", Reduction::mean, "rows of the packed forward a second"},
      {"perf/update_weights_time", Reduction::max,
       "seconds from the optimizer's last write to ready to serve"},
      {"perf/update_weights_bytes", Reduction::sum, "bytes that moved"},
      {"perf/update_weights_announce_time", Reduction::max, "seconds of its checks"},
      {"perf/update_weights_move_time", Reduction::max, "seconds of its bytes"},
      {"perf/update_weights_verify_time", Reduction::max, "seconds of its checksums"},
      {"perf/update_weights_swap_time", Reduction::max, "seconds of both ends' switch"},
      {"perf/update_weights_pause_time", Reduction::max,
       "seconds of pausing and continuing answers that were being written"},
      {"perf/update_weights_decoded_tokens", Reduction::sum,
       "tokens that engines sampled with the old weights while the new ones moved"},
      {"perf/rollout_wait_time", Reduction::max,
       "seconds after training in which the next rollout was waited for (--async-steps)"},
      {"perf/trainer_utilization", Reduction::mean,
       "share of the step in which a trainer rank works"},
      {"perf/engine_utilization", Reduction::mean,
       "share of the step in which an engine rank works"},
      {"perf/engine_idle_time", Reduction::max,
       "seconds of the step in which the engine rank that works least does nothing"},
      {"perf/eval_time", Reduction::max, "seconds of an evaluation"},
      {"perf/save_model_time", Reduction::max, "seconds of writing the checkpoint's parts"},
      {"perf/step_time", Reduction::max, "seconds of the step, evaluation and saving aside"},
      {"perf/train_wait_time", Reduction::max, "seconds of the step in which the trainer waited"},
      {"perf/tokens_per_gpu_per_sec", Reduction::mean, "response tokens a second and rank"},
      {"memory/rank_*", Reduction::max,
       "resident bytes of the largest rank at a phase's end, and the most within it"},
      {"memory/driver_bytes", Reduction::max, "resident bytes of the driver"},
      {"memory/helper_bytes", Reduction::sum, "resident bytes of its helper processes"},
      {"eval/*", Reduction::mean, "mean reward of an evaluation set, and its parts"},
      {"eval/*/response_len/median", Reduction::last, "median tokens of an answer"},
      {"eval/*/response_len/max", Reduction::max, "most tokens of an answer"},
      {"eval/*/response_len/min", Reduction::min, "fewest tokens of an answer"},
  });
  return declarations;
}

namespace {

// Of the tokens that are trained, as Miles counts them. A sample without a reward is not trained on
// and says nothing about lengths.
void add_lengths(Row& row, const std::string& prefix, std::span<const Sample> samples) {
  std::vector<double> lengths;
  double sum = 0;
  for (const Sample& s : samples) {
    if (s.status == SampleStatus::failed) continue;
    lengths.push_back(
        static_cast<double>(std::count(s.loss_mask.begin(), s.loss_mask.end(), std::uint8_t{1})));
    sum += lengths.back();
  }
  if (lengths.empty()) return;
  std::sort(lengths.begin(), lengths.end());
  const std::size_t n = lengths.size();
  row.add(prefix + "mean", sum / static_cast<double>(n), static_cast<double>(n));
  row.add(prefix + "median", (lengths[(n - 1) / 2] + lengths[n / 2]) / 2);
  row.add(prefix + "max", lengths.back());
  row.add(prefix + "min", lengths.front());
}

double truncated(const Sample& s) { return s.status == SampleStatus::truncated ? 1.0 : 0.0; }

}  // namespace

void add_rollout_metrics(Row& row, std::span<const Sample> samples,
                         const GroupAdvantages& advantages, double seconds, std::int64_t num_gpus) {
  double tokens = 0, cached = 0, prompt = 0, failed = 0;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    tokens += static_cast<double>(samples[i].response_length);
    if (samples[i].status == SampleStatus::failed) {
      ++failed;
      continue;
    }
    row.add("rollout/raw_reward", samples[i].reward);
    for (const auto& [key, value] : samples[i].reward_parts)
      row.add("rollout/reward/" + key, value);
    row.add("rollout/rewards", advantages.advantages[i]);
    row.add("rollout/truncated_ratio", truncated(samples[i]));
    cached += static_cast<double>(samples[i].cached_tokens);
    prompt += static_cast<double>(samples[i].prompt_length());
  }
  row.add("rollout/failed_samples", failed);
  if (prompt > 0) row.add("rollout/prefix_cache_hit_rate", cached / prompt, prompt);
  if (const double whole = static_cast<double>(samples.size()) - failed; whole > 0)
    row.add("rollout/avg_cached_tokens_per_sample", cached / whole, whole);
  add_lengths(row, "rollout/response_len/", samples);
  row.add("rollout/zero_std/count", static_cast<double>(advantages.zero_std_groups));
  row.add("rollout/num_samples", static_cast<double>(samples.size()));
  row.add("perf/rollout_time", seconds);
  row.add("perf/tokens_per_gpu_per_sec", tokens / seconds / static_cast<double>(num_gpus));
}

void add_selection_metrics(Row& row, const DrawnGroups& drawn) {
  row.add("rollout/num_prompts", static_cast<double>(drawn.num_drawn));
  for (const auto& [reason, groups] : drawn.dropped)
    row.add("rollout/dynamic_filter/drop_" + reason, static_cast<double>(groups));
}

void add_train_metrics(Row& row, const TrainResult& result, double seconds, bool first_batch) {
  double forward_tokens = 0;
  for (const auto& [name, value] : result.rollout_means) row.add(name, value);
  for (const StepMetrics& m : result.steps) {
    for (const auto& [name, value] : m.means) row.add(name, value);
    if (m.on_policy_samples > 0)
      row.add("train/train_rollout_logprob_abs_diff_max", m.rollout_abs_diff_max);
    if (first_batch && !std::isnan(m.rollout_abs_diff))
      row.add("train/first_batch_logprob_abs_diff", m.rollout_abs_diff);
    row.add("train/on_policy_samples", static_cast<double>(m.on_policy_samples));
    row.add("train/grad_norm", m.grad_norm);
    row.add("train/lr-pg_0", m.lr);
    row.add("train/skipped_steps", m.skipped ? 1.0 : 0.0);
    row.add("train/loss_tokens", static_cast<double>(m.loss_tokens));
    row.add("train/micro_batches", static_cast<double>(m.micro_batches));
    forward_tokens += static_cast<double>(m.forward_tokens);
  }
  row.add("perf/train_time", seconds);
  row.add("perf/actor_train_time", result.forward_backward_seconds);
  row.add("perf/log_probs_time", result.log_probs_seconds);
  if (result.gather_wait_seconds > 0) row.add("perf/gather_wait_time", result.gather_wait_seconds);
  if (result.reference_seconds > 0) row.add("perf/ref_log_probs_time", result.reference_seconds);
  row.add("perf/optimizer_time", result.optimizer_seconds);
  row.add("perf/actor_train_tok_per_s", forward_tokens / result.forward_backward_seconds);
}

void add_update_metrics(Row& row, const UpdateTimes& times) {
  row.add("perf/update_weights_time", times.seconds);
  row.add("perf/update_weights_bytes", static_cast<double>(times.moved_bytes));
  row.add("perf/update_weights_announce_time", times.announce_seconds);
  row.add("perf/update_weights_move_time", times.move_seconds);
  row.add("perf/update_weights_verify_time", times.verify_seconds);
  row.add("perf/update_weights_swap_time", times.swap_seconds);
  if (times.pause_seconds > 0) {
    row.add("perf/update_weights_pause_time", times.pause_seconds);
    row.add("perf/update_weights_decoded_tokens", static_cast<double>(times.decoded_tokens));
  }
}

void add_version_metrics(Row& row, std::span<const Sample> samples, std::int64_t trainer_version) {
  std::vector<double> oldest;
  for (const Sample& s : samples) {
    if (s.weight_versions.empty()) continue;
    const auto [least, most] = std::ranges::minmax(s.weight_versions);
    if (least < 0) continue;  // no engine wrote it
    oldest.push_back(static_cast<double>(least));
    row.add("rollout/weight_version/mean", oldest.back());
    row.add("rollout/weight_version/mixed_version_ratio", least == most ? 0.0 : 1.0);
    row.add("rollout/staleness/mean", static_cast<double>(trainer_version - least));
    row.add("rollout/staleness/max", static_cast<double>(trainer_version - least));
  }
  if (oldest.empty()) return;
  std::sort(oldest.begin(), oldest.end());
  const std::size_t n = oldest.size();
  row.add("rollout/weight_version/median", (oldest[(n - 1) / 2] + oldest[n / 2]) / 2);
  row.add("rollout/weight_version/max", oldest.back());
  row.add("rollout/weight_version/min", oldest.front());
}

void add_usage_metrics(Row& row, const RankUsage& before, const RankUsage& after, double seconds) {
  for (std::size_t i = 0; i < after.trainer_busy.size(); ++i)
    row.add("perf/trainer_utilization", (after.trainer_busy[i] - before.trainer_busy[i]) / seconds);
  for (std::size_t i = 0; i < after.engine_busy.size(); ++i) {
    const double busy = after.engine_busy[i] - before.engine_busy[i];
    row.add("perf/engine_utilization", busy / seconds);
    row.add("perf/engine_idle_time", std::max(0.0, seconds - busy));
  }
}

void add_rank_memory(Row& row, const std::string& phase, const ProcessMemory& most) {
  row.add("memory/rank_" + phase + "_bytes", static_cast<double>(most.resident_bytes));
  row.add("memory/rank_" + phase + "_peak_bytes", static_cast<double>(most.peak_bytes));
}

void add_driver_memory(Row& row, std::int64_t helper_bytes) {
  row.add("memory/driver_bytes", static_cast<double>(process_memory().resident_bytes));
  row.add("memory/helper_bytes", static_cast<double>(helper_bytes));
}

void add_eval_metrics(Row& row, const std::string& name, std::span<const Sample> samples,
                      double seconds) {
  for (const Sample& s : samples) {  // a failed one counts as 0, as in Miles
    row.add("eval/" + name, s.reward);
    row.add("eval/" + name + "-truncated_ratio", truncated(s));
    row.add("eval/" + name + "-none_reward_ratio", s.status == SampleStatus::failed ? 1.0 : 0.0);
  }
  add_lengths(row, "eval/" + name + "/response_len/", samples);
  row.add("perf/eval_time", seconds);
}

}  // namespace tandem
