// The losses as tensor expressions; autograd differentiates them.
#include "rl/losses.h"

#include <ATen/ATen.h>

#include "base/check.h"

namespace tandem {
namespace {

constexpr double kLogRatioBound = 20.0;  // exp stays far inside f32
constexpr double kLowVarBound = 10.0;

// exp of a log-ratio within ±20; the gradient outside is 0.
at::Tensor ratio_of(const at::Tensor& log_ratio) {
  return at::exp(at::clamp(log_ratio, -kLogRatioBound, kLogRatioBound));
}

// For every token the mean over its sample's tokens. Each sample is summed by itself, so that its
// bits do not depend on its neighbours.
at::Tensor sample_means(const at::Tensor& x, std::span<const std::int64_t> sample_tokens) {
  std::vector<at::Tensor> parts;
  std::int64_t begin = 0;
  for (const std::int64_t n : sample_tokens) {
    parts.push_back(x.narrow(0, begin, n).mean().expand({n}));
    begin += n;
  }
  return at::cat(parts);
}

void check_sizes(const LossInput& in) {
  std::int64_t tokens = 0;
  for (const std::int64_t n : in.sample_tokens) tokens += n;
  const auto check = [&](const char* name, const at::Tensor& x) {
    TD_CHECK(!x.defined() || x.numel() == tokens, "policy loss: {} {} for {} loss tokens",
             x.numel(), name, tokens);
  };
  check("log-probabilities", in.log_probs);
  check("entropies", in.entropy);
  check("old log-probabilities", in.old_log_probs);
  check("reference log-probabilities", in.reference_log_probs);
  check("advantages", in.advantages);
  check("policy weights", in.policy_weights);
}

}  // namespace

at::Tensor approximate_kl(const at::Tensor& log_probs, const at::Tensor& base_log_probs,
                          KlLossType type, const at::Tensor& ratio) {
  const auto d = log_probs - base_log_probs;
  const auto weighted = [&](const at::Tensor& kl) { return ratio.defined() ? ratio * kl : kl; };
  switch (type) {
    case KlLossType::k1:
      return weighted(d);
    case KlLossType::k2:
      return weighted(d * d / 2.0);
    case KlLossType::k3:
    case KlLossType::low_var_kl:
      break;
  }
  const auto bounded = at::clamp(d, -kLogRatioBound, kLogRatioBound);
  const auto k3 = weighted(at::exp(-bounded) - 1.0 + bounded);
  return type == KlLossType::k3 ? k3 : at::clamp(k3, -kLowVarBound, kLowVarBound);
}

PolicyLoss policy_loss(const at::Tensor& ppo_kl, const at::Tensor& advantages, double eps_clip,
                       double eps_clip_high, std::optional<double> eps_clip_c) {
  const auto ratio = ratio_of(-ppo_kl);
  const auto free = -ratio * advantages;
  const auto bound = -at::clamp(ratio, 1.0 - eps_clip, 1.0 + eps_clip_high) * advantages;
  // Where both agree the gradient is the free one's, so equal branches do not share it.
  auto loss = at::where(bound > free, bound, free);
  if (eps_clip_c) {
    const auto most = -*eps_clip_c * advantages;
    loss = at::where((advantages < 0).logical_and(loss > most), most, loss);
  }
  return {.loss = loss, .clipped = (bound > free).to(at::kFloat)};
}

LossTerms loss_terms(const LossInput& in, const AlgorithmConfig& a) {
  check_sizes(in);
  LossTerms out;
  const auto token_kl = in.old_log_probs - in.log_probs;
  const bool by_sequence = a.advantage_estimator == AdvantageEstimator::gspo;
  const auto ppo_kl = by_sequence ? sample_means(token_kl, in.sample_tokens) : token_kl;
  const PolicyLoss loss = policy_loss(ppo_kl, in.advantages, a.eps_clip,
                                      a.eps_clip_high.value_or(a.eps_clip), a.eps_clip_c);
  out.policy = loss.loss;
  out.clipped = loss.clipped;
  out.ppo_kl = ppo_kl.detach();
  const auto w = ratio_of(-out.ppo_kl);
  const auto mean = sample_means(w, in.sample_tokens);
  out.ess_ratio = mean * mean / sample_means(w * w, in.sample_tokens);
  if (a.use_opsm) {
    const auto masked =
        (in.advantages < 0)
            .logical_and(sample_means(token_kl.detach(), in.sample_tokens) > a.opsm_delta);
    out.policy = at::where(masked, at::zeros_like(out.policy), out.policy);
    out.opsm_clipped = masked.to(at::kFloat);
  }
  if (in.policy_weights.defined()) out.policy = out.policy * in.policy_weights;

  if (in.reference_log_probs.defined()) {
    const auto kl = approximate_kl(in.log_probs, in.reference_log_probs, a.kl_loss_type,
                                   a.use_unbiased_kl ? ratio_of(-token_kl) : at::Tensor());
    out.kl = kl.detach();
    if (a.kl_loss_coef != 0.0) out.extra = a.kl_loss_coef * kl;
  }
  if (in.entropy.defined() && a.entropy_coef != 0.0) {
    const auto bonus = -a.entropy_coef * in.entropy;
    out.extra = out.extra.defined() ? out.extra + bonus : bonus;
  }
  return out;
}

TokenWeights::TokenWeights(std::span<const std::int64_t> tokens, bool per_token,
                           std::optional<std::int64_t> constant_length)
    : per_token_(per_token), constant_length_(constant_length) {
  std::int64_t all = 0;
  for (const std::int64_t n : tokens) all += n;
  if (!tokens.empty()) sample_ = 1.0 / static_cast<double>(tokens.size());
  if (all > 0) token_ = 1.0 / static_cast<double>(all);
}

double TokenWeights::mean(std::int64_t sample_tokens) const {
  return per_token_ ? token_ : sample_ / static_cast<double>(sample_tokens);
}

double TokenWeights::policy(std::int64_t sample_tokens) const {
  return constant_length_ ? sample_ / static_cast<double>(*constant_length_) : mean(sample_tokens);
}

}  // namespace tandem
