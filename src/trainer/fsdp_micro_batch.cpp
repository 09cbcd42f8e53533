// One micro-batch of a step: forward, what its tokens are compared with, loss, backward, metrics.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "trainer/fsdp.h"

namespace tandem {

struct FsdpTrainer::Scored {
  std::vector<std::int64_t> index;     // of each loss token: its sample in the batch,
  std::vector<std::int64_t> position;  // its place in the response,
  std::vector<std::int64_t> count;     // and the loss tokens of that sample
  std::vector<std::int64_t> sample_tokens;
  // On the host, f32 [tokens]:
  at::Tensor trainer;  // the trainer's log-probabilities of the rollout's weights, or undefined
  at::Tensor engine;
  LossInput input;  // where the model computes
};

namespace {

const float* data(const at::Tensor& x) { return x.data_ptr<float>(); }

// f32 [n] of value(i), on the host.
at::Tensor filled(std::size_t n, auto&& value) {
  auto t = at::empty({static_cast<std::int64_t>(n)}, at::dtype(at::kFloat));
  for (std::size_t i = 0; i < n; ++i) t.template data_ptr<float>()[i] = value(i);
  return t;
}

// KL(engine ‖ trainer) of a token, k3 with Miles's bounds; d = trainer's - engine's.
double rollout_kl(double d) {
  const double bounded = std::clamp(d, -20.0, 20.0);
  return std::clamp(std::exp(bounded) - 1.0 - bounded, -10.0, 10.0);
}

}  // namespace

bool FsdpTrainer::measures_mismatch() const {
  const AlgorithmConfig& a = setup_.algorithm;
  return a.uses_tis() || a.use_rs || a.get_mismatch_metrics;
}

// Whether this step's forward is also the one from before the first step.
bool FsdpTrainer::measures_rollout_entropy(const StepInput& input) const {
  return setup_.algorithm.use_rollout_entropy && input.first && input.last &&
         input.values.entropies.empty();
}

// Advantages that are all 0 (groups of equal rewards) give a gradient of exactly 0, so such a
// micro-batch goes forward only, for its metrics. NaN is not 0: it must reach the gradient.
bool FsdpTrainer::learns(const StepInput& input, const MicroBatch& micro) const {
  const AlgorithmConfig& a = setup_.algorithm;
  if (a.entropy_coef != 0.0 || (a.use_kl_loss && a.kl_loss_coef != 0.0)) return true;
  return std::any_of(micro.samples.begin(), micro.samples.end(), [&](std::int64_t s) {
    const auto& values = input.values.advantages[s];
    return std::any_of(values.begin(), values.end(), [](float v) { return v != 0.0f; });
  });
}

FsdpTrainer::Scored FsdpTrainer::compare(const StepInput& input, const MicroBatch& micro,
                                         const PackedBatch& packed, const LogProbs& now,
                                         TokenMeans& means) const {
  const AlgorithmConfig& a = setup_.algorithm;
  Scored s;
  for (const LossToken& t : packed.loss) {
    const std::int64_t index = micro.samples[t.sample];
    if (s.index.empty() || s.index.back() != index) s.sample_tokens.push_back(0);
    s.index.push_back(index);
    s.position.push_back(t.position);
    s.count.push_back(input.batch.samples[index].loss_tokens());
    ++s.sample_tokens.back();
  }
  const auto gather = [&](auto&& of_sample) {
    return filled(s.index.size(),
                  [&](std::size_t i) { return of_sample(s.index[i])[s.position[i]]; });
  };
  const auto values_of = [&](const TokenValues& v) {
    return gather([&](std::int64_t i) -> const std::vector<float>& { return v[i]; });
  };
  s.engine = gather([&](std::int64_t i) -> const std::vector<float>& {
    return input.batch.samples[i].log_probs;
  });
  if (!input.values.old_log_probs.empty())
    s.trainer = values_of(input.values.old_log_probs);
  else if (input.first)
    s.trainer = now.log_probs.detach().to(at::kCPU);
  const auto there = [&](const at::Tensor& x) { return x.to(now.log_probs.device()); };

  s.input = {.log_probs = now.log_probs,
             .entropy = now.entropy,
             .old_log_probs = {},
             .reference_log_probs = {},
             .advantages = there(values_of(input.values.advantages)),
             .policy_weights = {},
             .sample_tokens = {}};
  const at::Tensor& old = a.use_rollout_logprobs ? s.engine : s.trainer;
  TD_CHECK(old.defined(), "{}", "trainer: a later step without old log-probabilities");
  s.input.old_log_probs = there(old);
  if (a.use_kl_loss)
    s.input.reference_log_probs = there(values_of(input.values.reference_log_probs));
  if (!measures_mismatch() || !s.trainer.defined()) return s;
  std::map<std::int64_t, MismatchCorrection> own;
  if (input.values.corrections.empty()) {
    std::map<std::int64_t, std::vector<float>> scores;
    for (std::size_t i = 0; i < s.index.size(); ++i) {
      auto& of_sample = scores[s.index[i]];
      of_sample.resize(input.batch.samples[s.index[i]].loss_mask.size(), 0.0f);
      of_sample[s.position[i]] = data(s.trainer)[i];
    }
    for (const auto& [index, of_sample] : scores) {
      const Sample& sample = input.batch.samples[index];
      own[index] = correct_mismatch(of_sample, sample.log_probs, sample.loss_mask, a);
      record_mismatch(input, index, own[index], means);
    }
  }
  if (a.uses_tis())
    s.input.policy_weights = there(gather([&](std::int64_t i) -> const std::vector<float>& {
      return own.empty() ? input.values.corrections[i].weights : own.at(i).weights;
    }));
  return s;
}

bool FsdpTrainer::run_micro_batch(const StepInput& input, const MicroBatch& micro,
                                  TokenMeans& means) {
  const auto samples = samples_of(input.batch, micro);
  PackedBatch packed(samples, setup_.train.share_prompt);
  means.add_micro_batch(micro.samples.front(), packed.num_rows());
  if (packed.loss.empty()) return false;

  const AlgorithmConfig& a = setup_.algorithm;
  const bool with_gradient = learns(input, micro);
  const c10::AutoGradMode mode(with_gradient);
  const bool with_entropy =
      a.entropy_coef != 0.0 || a.observe_training_entropy || measures_rollout_entropy(input);
  const LogProbs now = actor_.log_probs(packed, setup_.temperature, with_entropy);
  Scored scored = compare(input, micro, packed, now, means);
  scored.input.sample_tokens = scored.sample_tokens;
  const LossTerms terms = loss_terms(scored.input, a);
  if (with_gradient) {
    const auto weighted = [&](const at::Tensor& term, auto&& weight) {
      return (term *
              filled(scored.count.size(),
                     [&](std::size_t i) { return static_cast<float>(weight(scored.count[i])); })
                  .to(term.device()))
          .sum();
    };
    const TokenWeights& w = input.weights;
    auto loss = weighted(terms.policy, [&](std::int64_t n) { return w.policy(n); });
    if (terms.extra.defined())
      loss = loss + weighted(terms.extra, [&](std::int64_t n) { return w.mean(n); });
    loss.backward();
  }
  record(input, scored, terms, means);
  return true;
}

void FsdpTrainer::record(const StepInput& input, const Scored& s, const LossTerms& terms,
                         TokenMeans& means) const {
  using M = TokenMetric;
  const AlgorithmConfig& a = setup_.algorithm;
  std::vector<std::pair<M, at::Tensor>> columns = {
      {M::pg_clipfrac, terms.clipped},        {M::ppo_kl, terms.ppo_kl},
      {M::ess_ratio, terms.ess_ratio},        {M::kl_loss, terms.kl},
      {M::opsm_clipfrac, terms.opsm_clipped}, {M::log_probs, s.trainer}};
  const auto host = [](const at::Tensor& x) {
    return x.defined() ? x.detach().to(at::kCPU).contiguous() : at::Tensor();
  };
  const at::Tensor entropy = s.input.entropy;
  if (a.entropy_coef != 0.0 || a.observe_training_entropy)
    columns.emplace_back(M::entropy_loss, entropy);
  if (measures_rollout_entropy(input)) columns.emplace_back(M::entropy, entropy);
  if (measures_mismatch()) columns.emplace_back(M::ois, at::exp(-terms.ppo_kl));
  for (auto& [metric, column] : columns) column = host(column);
  const at::Tensor policy = host(terms.policy), extra = host(terms.extra);
  for (std::size_t i = 0; i < s.index.size(); ++i) {
    const std::int64_t sample = s.index[i];
    const double w = input.weights.mean(s.count[i]), wp = input.weights.policy(s.count[i]);
    const auto pg = static_cast<double>(data(policy)[i]);
    means.add(sample, M::pg_loss, wp * pg);
    means.add(sample, M::loss,
              wp * pg + (extra.defined() ? w * static_cast<double>(data(extra)[i]) : 0.0));
    for (const auto& [metric, column] : columns)
      if (column.defined()) means.add(sample, metric, w * static_cast<double>(data(column)[i]));
    if (!s.trainer.defined()) continue;
    const double d =
        static_cast<double>(data(s.trainer)[i]) - static_cast<double>(data(s.engine)[i]);
    means.add(sample, M::rollout_abs_diff, w * std::abs(d));
    means.add(sample, M::rollout_kl, w * rollout_kl(d));
    means.add_gap(sample, std::abs(d));
  }
}

// Over the tokens before rejection, the weight over those that are kept.
void FsdpTrainer::record_mismatch(const StepInput& input, std::int64_t sample,
                                  const MismatchCorrection& correction, TokenMeans& means) const {
  using M = TokenMetric;
  const AlgorithmConfig& a = setup_.algorithm;
  const Sample& whole = input.whole.samples[sample];
  const std::int64_t tokens = whole.loss_tokens();
  if (tokens == 0) return;
  const MismatchSums sums = mismatch_sums(correction, whole.loss_mask);
  const double w = input.whole_weights.mean(tokens);
  means.add(sample, M::tis, w * sums.ratio);
  means.add(sample, M::tis_abs, w * sums.distance);
  if (a.rejects_tokens()) means.add(sample, M::rs_rejected, w * sums.rejected);
  if (!a.uses_tis()) return;
  means.add(sample, M::tis_clipfrac, w * sums.bounded);
  const std::int64_t kept = input.batch.samples[sample].loss_tokens();
  means.add(sample, M::tis_weight, kept > 0 ? input.weights.mean(kept) * sums.weight : 0.0);
}

}  // namespace tandem
