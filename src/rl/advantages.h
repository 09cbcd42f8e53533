// Group-relative advantages (GRPO: Shao et al., "DeepSeekMath", 2024): a sample's reward against
// the other answers to the same prompt. Pure functions on scalars.
//
// Groups are found by prompt id, never by position or a fixed size, so dropped samples, partial
// groups and any order are right by construction. Invariant: a group whose rewards are all equal
// gets exactly 0, decided by max == min, since a standard deviation of rounding errors would be
// blown up to full-size advantages. Sums run in the order given: pass samples in id order for equal
// bits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tandem {

struct AdvantageOptions {
  bool rewards_normalization = true;   // false: the advantage is the reward itself
  bool grpo_std_normalization = true;  // false: r - mean, without the division
};

struct GroupAdvantages {
  std::vector<float> advantages;  // one per sample, in the order given
  std::int64_t num_groups = 0;
  std::int64_t zero_std_groups = 0;  // all rewards equal: no signal; single samples among them
  std::int64_t single_sample_groups = 0;
};

// (r - mean) / (std + 1e-6) with the sample standard deviation (n - 1) of the group, in f64.
// Throws Error on a reward that is not finite. Both spans have one value per sample.
GroupAdvantages grpo_advantages(std::span<const std::uint64_t> prompt_ids,
                                std::span<const double> rewards,
                                const AdvantageOptions& options = {});

}  // namespace tandem
