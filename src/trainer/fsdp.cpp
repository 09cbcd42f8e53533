// One step: leaves → micro-batches (forward, loss, backward) → gradient tree → norm → AdamW →
// arena; and what is fixed before a rollout's first step. Means are kept per sample until the end,
// so that no number depends on the cut into micro-batches.
#include "trainer/fsdp.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "base/clock.h"
#include "base/memory.h"
#include "checkpoint/weights.h"
#include "trainer/schedule.h"

namespace tandem {
namespace {

// Mean over the loss tokens of all samples, added as TokenMeans adds.
double mean_of(const TrainBatch& batch, const TokenValues& values, const TokenWeights& weights) {
  double sum = 0;
  for (const std::int64_t i : order_by_id(batch)) {
    const Sample& s = batch.samples[i];
    const double w = weights.mean(std::max<std::int64_t>(s.loss_tokens(), 1));
    double of_sample = 0;
    for (std::size_t t = 0; t < s.loss_mask.size(); ++t)
      if (s.loss_mask[t]) of_sample += w * static_cast<double>(values[i][t]);
    sum += of_sample;
  }
  return sum;
}

// The KL estimate of every response token; `policy` null: the engine's log-probabilities.
TokenValues token_kl(const TrainBatch& batch, const TokenValues* policy,
                     const TokenValues& reference, KlLossType type) {
  TokenValues out;
  for (std::size_t i = 0; i < batch.samples.size(); ++i) {
    const auto kl = approximate_kl(at::tensor(policy ? (*policy)[i] : batch.samples[i].log_probs),
                                   at::tensor(reference[i]), type);
    out.emplace_back(kl.data_ptr<float>(), kl.data_ptr<float>() + kl.numel());
  }
  return out;
}

// Whether weights of one layout can be copied into the other.
bool same_layout(const ArenaLayout& a, const ArenaLayout& b) {
  return a.element == b.element && a.bytes == b.bytes &&
         std::equal(a.entries.begin(), a.entries.end(), b.entries.begin(), b.entries.end(),
                    [](const ArenaEntry& x, const ArenaEntry& y) {
                      return x.hf_name == y.hf_name && x.hf_shape == y.hf_shape;
                    });
}

}  // namespace

FsdpTrainer::FsdpTrainer(const TrainerSetup& setup, RoleWeights actor,
                         std::optional<RoleWeights> reference, Group& group)
    : setup_(setup),
      weights_(actor),
      reference_weights_(reference),
      group_(group),
      actor_(actor.folder.config(), actor.arena, actor.layers, setup.longest_sequence),
      held_(actor.layers ? actor.layers->ranges()
                         : std::vector<FlatRange>(static_cast<std::size_t>(group.size()),
                                                  {0, layout().flat_elements})),
      optimizer_(layout().flat_elements, group, actor.arena.place()),
      gradients_(layout().flat_elements, actor.arena.place()) {
  if (setup.perturb) actor_.model().perturb();
  actor_.model().set_recompute(recompute_ranges(setup.train, actor.folder.config().num_layers));
  load_flat(actor.folder, layout(), optimizer_.begin(), optimizer_.end(),
            [this](std::int64_t begin, std::span<const float> values) {
              optimizer_.master().write(begin - optimizer_.begin(), values);
            });
  if (!reference) return;
  const std::int64_t vocabulary = reference->folder.config().vocab_size;
  TD_CHECK(vocabulary == actor.folder.config().vocab_size,
           "--ref-load: {} has {} tokens in its vocabulary, the model {}; a reference must share "
           "the model's tokenizer",
           reference->folder.path(), vocabulary, actor.folder.config().vocab_size);
  TD_CHECK(!setup.algorithm.ref_update_interval ||
               same_layout(actor.arena.layout(), reference->arena.layout()),
           "--ref-update-interval: {} is of another shape than the model, so the model cannot take "
           "its place; leave the flag out",
           reference->folder.path());
  reference_.emplace(reference->folder.config(), reference->arena, reference->layers,
                     setup.longest_sequence);
}

void FsdpTrainer::update_reference() {
  TD_CHECK(reference_, "reference model: there is none; ask for a KL (--use-kl-loss or --kl-coef)");
  const ArenaLayout& held = weights_.arena.layout();
  Arena& target = reference_weights_->arena;
  TD_CHECK(same_layout(held, target.layout()), "reference model: its shape is not the model's");
  for (std::size_t i = 0; i < held.storages.size(); ++i) {
    const auto bytes = [&](const Arena& arena) {
      return at::from_blob(arena.storage_data(static_cast<std::int64_t>(i)),
                           {held.storages[i].bytes},
                           at::dtype(at::kByte).device(device_of(arena.place())));
    };
    bytes(target).copy_(bytes(weights_.arena));
  }
  target.set_version(target.version() + 1);
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

TokenWeights FsdpTrainer::token_weights(const TrainBatch& batch,
                                        const std::vector<std::int64_t>& samples) const {
  std::vector<std::int64_t> tokens;
  for (const std::int64_t i : samples) tokens.push_back(batch.samples[i].loss_tokens());
  return {tokens, setup_.train.calculate_per_token_loss, setup_.train.constant_loss_length};
}

std::vector<bool> FsdpTrainer::joint_passes(
    const TrainBatch& batch, const std::vector<std::vector<Leaf>>& steps,
    const std::function<bool(const MicroBatch&)>& has_backward) const {
  std::vector<bool> passes;
  for (int r = 0; r < group_.size(); ++r) {
    const auto [first, last] = leaves_of_rank(setup_.train.gradient_leaves, r, group_.size());
    std::size_t pass = 0;
    for (const auto& leaves : steps)
      for (std::int64_t l = first; l < last; ++l)
        for (const MicroBatch& m : leaves[static_cast<std::size_t>(l)].micro_batches) {
          if (std::ranges::all_of(m.samples, [&](std::int64_t s) {
                return batch.samples[static_cast<std::size_t>(s)].loss_tokens() == 0;
              }))
            continue;
          if (pass == passes.size()) passes.push_back(false);
          if (has_backward(m)) passes[pass] = true;
          ++pass;
        }
  }
  return passes;
}

StepMetrics FsdpTrainer::train_step(const StepInput& input, std::int64_t total_steps,
                                    TrainResult& result) {
  const auto leaves = plan(input.batch, input.samples);
  const auto [first, last] =
      leaves_of_rank(setup_.train.gradient_leaves, group_.rank(), group_.size());
  TokenMeans means(input.samples, input.batch.samples.size());
  for (std::int64_t l = first; l < last; ++l)
    progress.total += static_cast<std::int64_t>(leaves[l].micro_batches.size());
  const double start = monotonic_seconds();
  Passes passes(actor_, joint_passes(input.batch, {leaves},
                                     [&](const MicroBatch& m) { return learns(input, m); }));
  gradients_.begin_batch(first);
  for (std::int64_t l = first; l < last; ++l) {
    actor_.model().set_grads(gradients_.begin_leaf());
    for (const MicroBatch& m : leaves[l].micro_batches) {
      if (run_micro_batch(input, m, means)) passes.end_one();
      ++progress.done;
    }
    actor_.model().finish_grads();
    gradients_.end_leaf();
  }
  passes.end_all();
  actor_.model().set_grads(nullptr);
  // Of activations. Takes 30 ms and holds up whoever allocates, so it comes before the last write.
  if (input.last) return_free_memory();
  const double middle = monotonic_seconds();
  result.forward_backward_seconds += middle - start;

  const OptimizerConfig& o = setup_.optimizer;
  StepMetrics metrics;
  metrics.lr = learning_rate(o, optimizer_.steps(), total_steps);
  metrics.grad_norm =
      optimizer_.step_and_publish(gradients_.sums(), setup_.train.gradient_leaves,
                                  {.lr = static_cast<float>(metrics.lr),
                                   .beta1 = static_cast<float>(o.adam_beta1),
                                   .beta2 = static_cast<float>(o.adam_beta2),
                                   .eps = static_cast<float>(o.adam_eps),
                                   .weight_decay = static_cast<float>(o.weight_decay)},
                                  o.clip_grad, weights_.arena, held_);
  progress.last_write = monotonic_seconds();
  metrics.skipped = !std::isfinite(metrics.grad_norm);
  result.optimizer_seconds += monotonic_seconds() - middle;

  means.reduce(group_);
  if (!input.values.corrections.empty())  // of the whole rollout, so every rank has them all
    for (const std::int64_t i : input.samples)
      record_mismatch(input, i, input.values.corrections[i], means);
  means.report(metrics, origins(input));
  for (const std::int64_t i : input.samples)
    metrics.loss_tokens += input.batch.samples[i].loss_tokens();
  metrics.num_samples = static_cast<std::int64_t>(input.samples.size());
  return metrics;
}

// How old each sample of the step is, and what it weighs.
std::vector<SampleOrigin> FsdpTrainer::origins(const StepInput& input) const {
  std::vector<SampleOrigin> out;
  for (const std::int64_t i : input.samples) {
    const Sample& s = input.batch.samples[i];
    const std::int64_t tokens = s.loss_tokens(), present = input.batch.trainer_version;
    SampleOrigin origin{.lag = 0, .weight = 0};
    if (tokens > 0) origin.weight = input.weights.mean(tokens) * static_cast<double>(tokens);
    if (present > 0 && !s.weight_versions.empty())
      origin.lag = present - *std::ranges::min_element(s.weight_versions);
    out.push_back(origin);
  }
  return out;
}

FsdpTrainer::Steps FsdpTrainer::cut_into_steps(const TrainBatch& batch) const {
  const std::vector<std::int64_t> order = order_by_id(batch);
  const std::int64_t steps = setup_.train.num_steps_per_rollout.value_or(1);
  const auto count = static_cast<std::int64_t>(order.size());
  TD_CHECK(count > 0 && count % steps == 0,
           "--num-steps-per-rollout: {} samples cannot be cut into {} equal optimizer steps", count,
           steps);
  Steps out;
  for (std::int64_t s = 0; s < steps; ++s)
    out.emplace_back(order.begin() + s * (count / steps),
                     order.begin() + (s + 1) * (count / steps));
  return out;
}

FsdpTrainer::RolloutValues FsdpTrainer::fix_values(const TrainBatch& batch, const Steps& steps,
                                                   TrainResult& result) {
  const AlgorithmConfig& a = setup_.algorithm;
  RolloutValues values;
  // A single step's own forward gives the old log-probabilities; --ci-test compares it with one
  // before it.
  const bool several = steps.size() > 1 || setup_.train.ci_test;
  const bool scores_old = a.rejects_tokens() ||
                          ((a.get_mismatch_metrics || a.use_rollout_entropy) && several) ||
                          ((a.kl_coef != 0.0 || several) && !a.use_rollout_logprobs);
  double start = monotonic_seconds();
  if (scores_old)
    std::tie(values.old_log_probs, values.entropies) =
        score(actor_, batch, steps, a.use_rollout_entropy);
  result.log_probs_seconds = monotonic_seconds() - start;
  start = monotonic_seconds();
  if (a.uses_reference()) {
    TD_CHECK(reference_, "reference model: there is none, but the settings ask for a KL");
    values.reference_log_probs = score(*reference_, batch, steps, false).first;
  }
  if (reference_) result.reference_seconds = monotonic_seconds() - start;
  if (scores_old && measures_mismatch())
    for (std::size_t i = 0; i < batch.samples.size(); ++i)
      values.corrections.push_back(correct_mismatch(
          values.old_log_probs[i], batch.samples[i].log_probs, batch.samples[i].loss_mask, a));

  const TokenWeights weights = token_weights(batch, order_by_id(batch));
  const auto report = [&](const char* name, const TokenValues& of) {
    if (!of.empty()) result.rollout_means[name] = mean_of(batch, of, weights);
  };
  report("rollout/ref_log_probs", values.reference_log_probs);
  report("rollout/entropy", values.entropies);
  TokenValues engine;
  for (const Sample& s : batch.samples) engine.push_back(s.log_probs);
  report("rollout/rollout_log_probs", engine);
  TokenValues kl;
  if (a.kl_coef != 0.0) {
    kl = token_kl(batch, a.use_rollout_logprobs ? nullptr : &values.old_log_probs,
                  values.reference_log_probs, a.kl_loss_type);
    report("rollout/kl", kl);
  }
  TokenAdvantages advantages = token_advantages(batch, kl, a);
  report("rollout/returns", advantages.returns);
  report("rollout/advantages", advantages.advantages);
  values.advantages = std::move(advantages.advantages);
  return values;
}

TrainResult FsdpTrainer::train(const TrainBatch& batch, std::int64_t total_steps) {
  const Steps steps = cut_into_steps(batch);
  progress.done = progress.total = 0;
  TrainResult result;
  const RolloutValues values = fix_values(batch, steps, result);
  std::optional<TrainBatch> without_rejected;
  if (setup_.algorithm.rejects_tokens()) {
    without_rejected = batch;
    for (std::size_t i = 0; i < batch.samples.size(); ++i)
      without_rejected->samples[i].loss_mask = values.corrections[i].mask;
  }
  const TrainBatch& kept = without_rejected ? *without_rejected : batch;
  for (const auto& samples : steps) {
    const StepInput input{.batch = kept,
                          .whole = batch,
                          .values = values,
                          .samples = samples,
                          .weights = token_weights(kept, samples),
                          .whole_weights = token_weights(batch, samples),
                          .first = result.steps.empty(),
                          .last = result.steps.size() + 1 == steps.size()};
    result.steps.push_back(train_step(input, total_steps, result));
  }
  for (const std::optional<RoleWeights>& role : {std::optional(weights_), reference_weights_})
    if (role && role->layers) result.gather_wait_seconds += role->layers->take_wait_seconds();
  return result;
}

TokenValues FsdpTrainer::log_probs(const TrainBatch& batch) {
  return score(actor_, batch, {order_by_id(batch)}, false).first;
}

std::pair<TokenValues, TokenValues> FsdpTrainer::score(PackedModel& model, const TrainBatch& batch,
                                                       const Steps& steps, bool with_entropy) {
  at::NoGradGuard no_grad;
  std::vector<std::int64_t> offsets;
  std::int64_t total = 0;
  for (const Sample& s : batch.samples) {
    offsets.push_back(total);
    total += s.response_length;
  }
  // Each token is computed by one rank, the others add 0: exact.
  std::vector<float> flat(static_cast<std::size_t>(total) * (with_entropy ? 2 : 1), 0.0f);
  const auto [first, last] =
      leaves_of_rank(setup_.train.gradient_leaves, group_.rank(), group_.size());
  std::vector<MicroBatch> micro_batches;
  std::vector<std::vector<Leaf>> plans;
  for (const auto& samples : steps) {
    const auto& leaves = plans.emplace_back(plan(batch, samples));
    for (std::int64_t l = first; l < last; ++l)
      micro_batches.insert(micro_batches.end(), leaves[l].micro_batches.begin(),
                           leaves[l].micro_batches.end());
  }
  Passes passes(model, joint_passes(batch, plans, [](const MicroBatch&) { return false; }));
  for (const MicroBatch& m : micro_batches) {
    PackedBatch packed(samples_of(batch, m), setup_.train.share_prompt);
    if (packed.loss.empty()) continue;
    const LogProbs scored = model.log_probs(packed, setup_.temperature, with_entropy);
    const at::Tensor values = scored.log_probs.to(at::kCPU);
    const at::Tensor entropy = with_entropy ? scored.entropy.to(at::kCPU) : at::Tensor();
    for (std::size_t i = 0; i < packed.loss.size(); ++i) {
      const LossToken& token = packed.loss[i];
      const std::int64_t at = offsets[m.samples[token.sample]] + token.position;
      flat[at] = values.data_ptr<float>()[i];
      if (with_entropy) flat[total + at] = entropy.data_ptr<float>()[i];
    }
    passes.end_one();
  }
  passes.end_all();
  if (group_.size() > 1) group_.all_reduce_sum(std::span<float>(flat));
  std::pair<TokenValues, TokenValues> out;
  for (std::size_t i = 0; i < batch.samples.size(); ++i) {
    const auto begin = flat.begin() + offsets[i], end = begin + batch.samples[i].response_length;
    out.first.emplace_back(begin, end);
    if (with_entropy) out.second.emplace_back(begin + total, end + total);
  }
  return out;
}

std::unique_ptr<Trainer> make_trainer(const TrainerSetup& setup, RoleWeights actor,
                                      std::optional<RoleWeights> reference, Group& group) {
  switch (setup.train.train_backend) {
    case TrainBackend::fsdp:
      return std::make_unique<FsdpTrainer>(setup, actor, reference, group);
    case TrainBackend::megatron:
    case TrainBackend::torchtitan:
      break;
  }
  throw Error("--train-backend: only fsdp is built; use --train-backend fsdp");
}

}  // namespace tandem
