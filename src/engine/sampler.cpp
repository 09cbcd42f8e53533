// Draws among changed and truncated distributions; see the header for what is kept.
#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/philox.h"
#include "ops/kernels/kernels.h"

namespace tandem {
namespace {

// The same number that the kernel draws with.
double uniform_of(const PlanDraw& draw) {
  const std::uint64_t high = draw.position | (draw.evaluation ? std::uint64_t{1} << 63 : 0);
  const auto words = Philox4x32::words(draw.sample_id, high, draw.seed);
  return uniform_double(words[0], words[1]);
}

}  // namespace

void apply_changes(std::span<const LogitChange> changes, std::span<float> logits) {
  for (const LogitChange& change : changes) {
    float& z = logits[change.id];
    z -= change.subtract;
    z = z > 0 ? z / change.scale : z * change.scale;
    z += change.add;
  }
}

TokenId Sampler::draw(std::span<const float> logits, const PlanDraw& draw,
                      std::span<const LogitChange> changes) {
  if (!changes.empty()) {
    changed_.assign(logits.begin(), logits.end());
    apply_changes(changes, changed_);
    logits = changed_;
  }
  if (draw.temperature > 0 && draw.truncates()) return draw_truncated(logits, draw);
  const SampleRow row = {.temperature = draw.temperature,
                         .seed = draw.seed,
                         .sample_id = draw.sample_id,
                         .position = draw.position,
                         .evaluation = draw.evaluation};
  TokenId token = 0;
  float log_prob = 0;
  kernels().sample(logits.data(), static_cast<std::int64_t>(logits.size()), &row, 1, &token,
                   &log_prob);
  return token;
}

TokenId Sampler::draw_truncated(std::span<const float> logits, const PlanDraw& draw) {
  const auto vocab = static_cast<std::int64_t>(logits.size());
  const auto temperature = static_cast<float>(draw.temperature);
  const TokenId first = 0;
  float unused = 0, log_sum_exp = 0;
  kernels().log_softmax_gather(logits.data(), &first, temperature, &unused, &log_sum_exp, nullptr,
                               1, vocab);
  const float top = *std::max_element(logits.begin(), logits.end());
  std::size_t kept = 0;
  // Few tokens hold nearly all of the mass, so their order is looked for from the top downwards.
  for (const double depth : {8.0, 20.0, std::numeric_limits<double>::infinity()}) {
    const bool all = gather(logits, draw, top, depth);
    kept = count_kept(draw, log_sum_exp, all);
    if (kept > 0) break;
  }
  if (kept == 0) return 0;  // logits that are no numbers, as the recorded log-probability shows
  const auto mass = [&](std::size_t i) {
    return std::exp(static_cast<double>(candidates_[i].logit - top) / draw.temperature);
  };
  double sum = 0;
  for (std::size_t i = 0; i < kept; ++i) sum += mass(i);
  const double target = uniform_of(draw) * sum;
  double before = 0;
  for (std::size_t i = 0; i < kept; ++i) {
    before += mass(i);
    if (before > target) return candidates_[i].id;
  }
  return candidates_[kept - 1].id;
}

// The tokens whose log-probability is at most `depth` below the largest, in order, at most top_k.
// Returns whether no token that could be kept is missing.
bool Sampler::gather(std::span<const float> logits, const PlanDraw& draw, float top, double depth) {
  const double bound = draw.min_p > 0 ? -std::log(draw.min_p) : depth;
  const bool bound_by_min_p = draw.min_p > 0 && bound <= depth;
  const double reach = std::min(bound, depth) * draw.temperature;
  candidates_.clear();
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (static_cast<double>(top) - static_cast<double>(logits[i]) <= reach &&
        logits[i] > -std::numeric_limits<float>::infinity()) {
      candidates_.push_back({logits[i], static_cast<TokenId>(i)});
    }
  }
  const auto likelier = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
  };
  const auto k = static_cast<std::size_t>(draw.top_k);
  if (draw.top_k > 0 && k <= candidates_.size()) {
    std::partial_sort(candidates_.begin(), candidates_.begin() + static_cast<std::ptrdiff_t>(k),
                      candidates_.end(), likelier);
    candidates_.resize(k);
    return true;
  }
  std::sort(candidates_.begin(), candidates_.end(), likelier);
  return bound_by_min_p || std::isinf(depth);
}

// How many of the candidates are kept; 0 if that depends on tokens not gathered.
std::size_t Sampler::count_kept(const PlanDraw& draw, double log_sum_exp, bool all) const {
  if (draw.top_p >= 1) return all ? candidates_.size() : 0;
  double before = 0;
  for (std::size_t i = 0; i < candidates_.size(); ++i) {
    if (i > 0 && before >= draw.top_p) return i;
    before += std::exp(static_cast<double>(candidates_[i].logit) / draw.temperature - log_sum_exp);
  }
  return all || before >= draw.top_p ? candidates_.size() : 0;
}

}  // namespace tandem
