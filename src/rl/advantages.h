// Advantages: a sample's reward against the other answers to the same prompt, and from there to a
// value per token. Pure functions on numbers.
//
// Groups are found by prompt id, never by position or a fixed size, so dropped samples, partial
// groups and any order are right by construction. Invariant: a group (or batch) whose values are
// all equal gets exactly 0, decided by max == min, since a standard deviation of rounding errors
// would be blown up to full-size advantages. Sums run in f64 in the order given: pass samples in id
// order for equal bits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "config/config.h"
#include "data/batch.h"

namespace tandem {

struct AdvantageOptions {
  AdvantageEstimator estimator = AdvantageEstimator::grpo;
  bool rewards_normalization = true;   // false: the reward itself
  bool grpo_std_normalization = true;  // false: r - mean, without the division
};

struct GroupAdvantages {
  std::vector<float> advantages;  // one per sample, in the order given
  std::int64_t num_groups = 0;
  std::int64_t zero_std_groups = 0;  // all rewards equal: no signal; single samples among them
  std::int64_t single_sample_groups = 0;
};

// One value per sample, with mean and standard deviation (n - 1) of its group:
//   grpo, gspo                    (r - mean) / (std + 1e-6)   (Shao et al., "DeepSeekMath", 2024)
//   rloo                          r - mean of the others = (r - mean)·n / (n - 1)
//                                 (Ahmadian et al. 2024)
//   reinforce_plus_plus_baseline  r - mean                    (Hu et al. 2025)
//   reinforce_plus_plus           r
// Throws Error on a reward that is not finite. Both spans have one value per sample.
GroupAdvantages group_advantages(std::span<const std::uint64_t> prompt_ids,
                                 std::span<const double> rewards,
                                 const AdvantageOptions& options = {});

// Values for every response token of every sample: [samples][response tokens].
using TokenValues = std::vector<std::vector<float>>;

// Returns of REINFORCE++ (Hu et al. 2025): a loss token's reward is -kl_coef·kl, the last one's
// also the sample's; G_t = r_t + gamma·G_{t+1} over all response tokens, those without loss carry
// no reward. A sample without loss tokens: zeros. `kl` may be empty: 0 everywhere.
std::vector<float> discounted_returns(float reward, std::span<const float> kl,
                                      std::span<const std::uint8_t> loss_mask, double kl_coef,
                                      double gamma);

// (a - mean) / sqrt(var + 1e-8) over all loss tokens of the batch, in id order, var with n - 1.
// Values of other tokens are left as they are. One loss token or equal values: zeros.
void whiten(TokenValues& values, const TrainBatch& batch);

struct TokenAdvantages {
  TokenValues advantages, returns;  // returns: before whitening
};

// From batch.advantages (group_advantages) to a value per token: reinforce_plus_plus the discounted
// returns; reinforce_plus_plus_baseline a - kl_coef·kl; the others a. Whitened if
// normalize_advantages. `kl`: per token, or empty (0).
TokenAdvantages token_advantages(const TrainBatch& batch, const TokenValues& kl,
                                 const AlgorithmConfig& algorithm);

// Indices into the batch by sample id: the order in which everything is trained and added.
std::vector<std::int64_t> order_by_id(const TrainBatch& batch);

}  // namespace tandem
