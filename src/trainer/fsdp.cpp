// One step: leaves → micro-batches (forward, loss, backward) → gradient tree → norm → AdamW →
// arena. Means are kept per sample until the end, so that no number depends on the cut into
// micro-batches.
#include "trainer/fsdp.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "base/clock.h"
#include "checkpoint/weights.h"
#include "rl/losses.h"
#include "trainer/schedule.h"

namespace tandem {

// One row of doubles per sample of the step. A rank fills the rows of its samples, the others stay
// 0, so the sum over ranks is exact and adding rows in id order gives the same bits on any ranks.
struct FsdpTrainer::TokenMeans {
  enum Column {
    kLoss,
    kClipped,
    kKl,
    kAbsDiff,
    kRolloutKl,
    kMaxDiff,
    kForwardTokens,
    kMicro,
    kColumns
  };
  explicit TokenMeans(std::size_t samples) : values(samples * kColumns, 0.0) {}
  double& at(std::int64_t sample, Column c) { return values[sample * kColumns + c]; }
  std::vector<double> values;
  std::vector<std::int64_t> row_of;  // batch index -> row
};

FsdpTrainer::FsdpTrainer(const TrainerSetup& setup, const HfFolder& folder, Arena& arena,
                         Group& group)
    : setup_(setup),
      folder_(folder),
      arena_(arena),
      group_(group),
      model_(folder.config(), arena, nullptr, nullptr),
      optimizer_(arena.layout().flat_elements, group, arena.place()),
      gradients_(arena.layout().flat_elements, arena.place()) {
  if (setup.longest_sequence > 0) model_.set_longest_sequence(setup.longest_sequence);
  if (setup.perturb) model_.perturb();
  load_flat(folder, arena.layout(), optimizer_.begin(), optimizer_.end(),
            [this](std::int64_t begin, std::span<const float> values) {
              optimizer_.master().write(begin - optimizer_.begin(), values);
            });
}

std::vector<Leaf> FsdpTrainer::plan(const TrainBatch& batch,
                                    const std::vector<std::int64_t>& samples) const {
  std::vector<PackItem> items;
  for (std::int64_t i : samples) {
    const Sample& s = batch.samples[i];
    items.push_back({s.id, s.prompt_id, s.prompt_length(), s.response_length});
  }
  auto leaves = plan_leaves(items, {.num_leaves = setup_.train.gradient_leaves,
                                    .max_tokens_per_gpu = setup_.train.max_tokens_per_gpu,
                                    .share_prompt = setup_.train.share_prompt});
  for (Leaf& leaf : leaves)
    for (MicroBatch& m : leaf.micro_batches)
      for (std::int64_t& s : m.samples) s = samples[s];
  return leaves;
}

at::Tensor FsdpTrainer::forward(PackedBatch& packed) {
  if (!pool_ || pool_->num_blocks() < packed.num_blocks())
    pool_.emplace(model_.attention_shape(), model_.element(), 1,
                  std::max<std::int64_t>(packed.num_blocks() * 5 / 4, 64), model_.place());
  packed.context.pool = &*pool_;
  return model_.forward(packed.tokens, packed.positions, packed.context);
}

std::vector<TokenId> FsdpTrainer::loss_ids(const PackedBatch& packed) const {
  std::vector<TokenId> ids;
  for (const LossToken& t : packed.loss) ids.push_back(t.id);
  return ids;
}

at::Tensor FsdpTrainer::loss_hidden(const at::Tensor& hidden, const PackedBatch& packed) const {
  const auto rows =
      at::empty({static_cast<std::int64_t>(packed.loss.size())}, at::dtype(at::kLong));
  for (std::size_t i = 0; i < packed.loss.size(); ++i)
    rows.data_ptr<std::int64_t>()[i] = packed.loss[i].row;
  return hidden.index_select(0, rows.to(hidden.device()));
}

namespace {

std::vector<const Sample*> pointers(const TrainBatch& batch, const MicroBatch& micro) {
  std::vector<const Sample*> out;
  for (std::int64_t s : micro.samples) out.push_back(&batch.samples[s]);
  return out;
}

// Indices into the batch by sample id: the order in which everything is trained and added.
std::vector<std::int64_t> order_by_id(const TrainBatch& batch) {
  std::vector<std::int64_t> order(batch.samples.size());
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return batch.samples[a].id < batch.samples[b].id;
  });
  return order;
}

std::int64_t loss_tokens(const Sample& s) {
  return std::count(s.loss_mask.begin(), s.loss_mask.end(), std::uint8_t{1});
}

at::Tensor filled(std::size_t n, at::Device device, auto&& value) {
  auto t = at::empty({static_cast<std::int64_t>(n)}, at::dtype(at::kFloat));
  for (std::size_t i = 0; i < n; ++i) t.template data_ptr<float>()[i] = value(i);
  return t.to(device);
}

}  // namespace

void FsdpTrainer::run_micro_batch(const StepInput& input, const MicroBatch& micro,
                                  TokenMeans& means) {
  const auto samples = pointers(input.batch, micro);
  PackedBatch packed(samples, setup_.train.share_prompt);
  const std::int64_t first = means.row_of[micro.samples.front()];
  means.at(first, TokenMeans::kForwardTokens) += static_cast<double>(packed.num_rows());
  means.at(first, TokenMeans::kMicro) += 1;
  if (packed.loss.empty()) return;

  // Advantages that are all 0 (groups of equal rewards) give a gradient of exactly 0, so such a
  // micro-batch goes forward only, for its metrics. NaN is not 0: it must reach the gradient.
  const bool learns = std::any_of(micro.samples.begin(), micro.samples.end(), [&](std::int64_t s) {
    return input.batch.advantages[s] != 0.0f;
  });
  const c10::AutoGradMode mode(learns);
  const auto hidden = loss_hidden(forward(packed), packed);
  const auto log_probs = head_log_probs(hidden, loss_ids(packed), model_.head(),
                                        static_cast<float>(setup_.temperature), false)
                             .log_probs;
  const auto& loss = packed.loss;
  const at::Device device = log_probs.device();
  auto batch_index = [&](std::size_t i) { return micro.samples[loss[i].sample]; };
  const auto old = input.old_log_probs
                       ? filled(loss.size(), device,
                                [&](std::size_t i) {
                                  return (*input.old_log_probs)[batch_index(i)][loss[i].position];
                                })
                       : log_probs.detach();
  const auto advantages = filled(
      loss.size(), device, [&](std::size_t i) { return input.batch.advantages[batch_index(i)]; });
  std::vector<double> weight(samples.size());  // of one token of the sample in the loss
  for (std::size_t s = 0; s < samples.size(); ++s)
    weight[s] = setup_.train.calculate_per_token_loss
                    ? input.token_weight
                    : input.sample_weight / static_cast<double>(loss_tokens(*samples[s]));
  const auto weights = filled(loss.size(), device, [&](std::size_t i) {
    return static_cast<float>(weight[loss[i].sample]);
  });
  const auto terms =
      policy_loss(log_probs, old, advantages, setup_.algorithm.eps_clip,
                  setup_.algorithm.eps_clip_high.value_or(setup_.algorithm.eps_clip));
  if (learns) (terms.loss * weights).sum().backward();

  const at::Tensor token_loss = terms.loss.detach().to(at::kCPU);
  const at::Tensor clipped = terms.clipped.to(at::kCPU), kl = terms.ppo_kl.to(at::kCPU),
                   before = old.to(at::kCPU);
  for (std::size_t i = 0; i < loss.size(); ++i) {
    const std::int64_t row = means.row_of[batch_index(i)];
    const double w = weight[loss[i].sample];
    const float engine = input.batch.samples[batch_index(i)].log_probs[loss[i].position];
    const double d = static_cast<double>(before.data_ptr<float>()[i]) - static_cast<double>(engine);
    means.at(row, TokenMeans::kLoss) += w * static_cast<double>(token_loss.data_ptr<float>()[i]);
    means.at(row, TokenMeans::kClipped) += w * static_cast<double>(clipped.data_ptr<float>()[i]);
    means.at(row, TokenMeans::kKl) += w * static_cast<double>(kl.data_ptr<float>()[i]);
    means.at(row, TokenMeans::kAbsDiff) += w * std::abs(d);
    means.at(row, TokenMeans::kRolloutKl) += w * (std::exp(d) - 1.0 - d);
    double& max = means.at(row, TokenMeans::kMaxDiff);
    max = std::abs(d) > max || d != d ? std::abs(d) : max;
  }
}

StepMetrics FsdpTrainer::train_step(const StepInput& input, std::int64_t total_steps,
                                    TrainResult& result) {
  const auto leaves = plan(input.batch, input.samples);
  const auto [first, last] =
      leaves_of_rank(setup_.train.gradient_leaves, group_.rank(), group_.size());
  TokenMeans means(input.samples.size());
  means.row_of.assign(input.batch.samples.size(), -1);
  for (std::size_t i = 0; i < input.samples.size(); ++i)
    means.row_of[input.samples[i]] = static_cast<std::int64_t>(i);

  for (std::int64_t l = first; l < last; ++l)
    progress.total += static_cast<std::int64_t>(leaves[l].micro_batches.size());
  const double start = monotonic_seconds();
  gradients_.begin_batch();
  for (std::int64_t l = first; l < last; ++l) {
    model_.set_grads(gradients_.begin_leaf());
    for (const MicroBatch& m : leaves[l].micro_batches) {
      run_micro_batch(input, m, means);
      ++progress.done;
    }
    model_.finish_grads();
    gradients_.end_leaf();
  }
  model_.set_grads(nullptr);
  const double middle = monotonic_seconds();
  result.forward_backward_seconds += middle - start;

  const OptimizerConfig& o = setup_.optimizer;
  StepMetrics metrics;
  metrics.lr = learning_rate(o, optimizer_.steps(), total_steps);
  metrics.grad_norm = optimizer_.step(gradients_.total(),
                                      {.lr = static_cast<float>(metrics.lr),
                                       .beta1 = static_cast<float>(o.adam_beta1),
                                       .beta2 = static_cast<float>(o.adam_beta2),
                                       .eps = static_cast<float>(o.adam_eps),
                                       .weight_decay = static_cast<float>(o.weight_decay)},
                                      o.clip_grad);
  metrics.skipped = !std::isfinite(metrics.grad_norm);
  if (!metrics.skipped) optimizer_.publish(arena_);
  result.optimizer_seconds += monotonic_seconds() - middle;

  if (group_.size() > 1) group_.all_reduce_sum(std::span<double>(means.values));
  for (std::size_t i = 0; i < input.samples.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i);
    metrics.loss += means.at(row, TokenMeans::kLoss);
    metrics.pg_clipfrac += means.at(row, TokenMeans::kClipped);
    metrics.ppo_kl += means.at(row, TokenMeans::kKl);
    metrics.rollout_abs_diff += means.at(row, TokenMeans::kAbsDiff);
    metrics.rollout_kl += means.at(row, TokenMeans::kRolloutKl);
    const double max = means.at(row, TokenMeans::kMaxDiff);
    if (max > metrics.rollout_abs_diff_max || max != max) metrics.rollout_abs_diff_max = max;
    metrics.forward_tokens += static_cast<std::int64_t>(means.at(row, TokenMeans::kForwardTokens));
    metrics.micro_batches += static_cast<std::int64_t>(means.at(row, TokenMeans::kMicro));
    metrics.loss_tokens += loss_tokens(input.batch.samples[input.samples[i]]);
  }
  metrics.num_samples = static_cast<std::int64_t>(input.samples.size());
  return metrics;
}

TrainResult FsdpTrainer::train(const TrainBatch& batch, std::int64_t total_steps) {
  const std::vector<std::int64_t> order = order_by_id(batch);
  const std::int64_t steps = setup_.train.num_steps_per_rollout.value_or(1);
  const auto count = static_cast<std::int64_t>(order.size());
  TD_CHECK(count > 0 && count % steps == 0,
           "--num-steps-per-rollout: {} samples cannot be cut into {} equal optimizer steps", count,
           steps);
  progress.done = progress.total = 0;
  TrainResult result;
  std::vector<std::vector<float>> old;
  if (steps > 1) {
    const double start = monotonic_seconds();
    old = log_probs(batch);
    result.log_probs_seconds = monotonic_seconds() - start;
  }
  for (std::int64_t s = 0; s < steps; ++s) {
    StepInput input{
        .batch = batch,
        .samples = {order.begin() + s * (count / steps), order.begin() + (s + 1) * (count / steps)},
        .old_log_probs = steps > 1 ? &old : nullptr};
    std::int64_t tokens = 0;
    for (std::int64_t i : input.samples) tokens += loss_tokens(batch.samples[i]);
    input.sample_weight = 1.0 / static_cast<double>(input.samples.size());
    input.token_weight = tokens > 0 ? 1.0 / static_cast<double>(tokens) : 0.0;
    result.steps.push_back(train_step(input, total_steps, result));
  }
  return result;
}

std::vector<std::vector<float>> FsdpTrainer::log_probs(const TrainBatch& batch) {
  at::NoGradGuard no_grad;
  const std::vector<std::int64_t> order = order_by_id(batch);
  std::vector<std::int64_t> offsets;
  std::int64_t total = 0;
  for (const Sample& s : batch.samples) {
    offsets.push_back(total);
    total += s.response_length;
  }
  std::vector<float> flat(static_cast<std::size_t>(total), 0.0f);
  const auto leaves = plan(batch, order);
  const auto [first, last] =
      leaves_of_rank(setup_.train.gradient_leaves, group_.rank(), group_.size());
  for (std::int64_t l = first; l < last; ++l)
    for (const MicroBatch& m : leaves[l].micro_batches) {
      PackedBatch packed(pointers(batch, m), setup_.train.share_prompt);
      if (packed.loss.empty()) continue;
      const auto hidden = loss_hidden(forward(packed), packed);
      const auto values = head_log_probs(hidden, loss_ids(packed), model_.head(),
                                         static_cast<float>(setup_.temperature), false)
                              .log_probs.to(at::kCPU);
      for (std::size_t i = 0; i < packed.loss.size(); ++i)
        flat[offsets[m.samples[packed.loss[i].sample]] + packed.loss[i].position] =
            values.data_ptr<float>()[i];
    }
  if (group_.size() > 1) group_.all_reduce_sum(std::span<float>(flat));
  std::vector<std::vector<float>> out;
  for (std::size_t i = 0; i < batch.samples.size(); ++i)
    out.emplace_back(flat.begin() + offsets[i],
                     flat.begin() + offsets[i] + batch.samples[i].response_length);
  return out;
}

void FsdpTrainer::save_hf(const std::string& target) {
  std::vector<float> flat(static_cast<std::size_t>(arena_.layout().flat_elements));
  optimizer_.gather(flat);
  if (group_.rank() == 0)
    save_flat(target, folder_.path(), folder_.config(), arena_.layout(), flat);
  group_.barrier();
}

std::unique_ptr<Trainer> make_trainer(const TrainerSetup& setup, const HfFolder& folder,
                                      Arena& arena, Group& group) {
  switch (setup.train.train_backend) {
    case TrainBackend::fsdp:
      return std::make_unique<FsdpTrainer>(setup, folder, arena, group);
    case TrainBackend::megatron:
    case TrainBackend::torchtitan:
      break;
  }
  throw Error("--train-backend: only fsdp is built; use --train-backend fsdp");
}

}  // namespace tandem
