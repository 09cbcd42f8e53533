// Trainer against engine: corrections for sampling from slightly other probabilities than those
// that are trained. In exact mode every ratio is 1 and all of this changes nothing; with fast
// kernels, stale weights or a foreign engine it bounds the bias.
//
// The ratio is trainer's / engine's probability of the sampled tokens, both with the weights that
// sampled them. Invariant: rejected tokens leave the loss mask, so that they leave numerator and
// denominator together.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "config/config.h"

namespace tandem {

struct MismatchCorrection {
  std::vector<float> ratio;        // before any bound, at tis_level
  std::vector<float> weights;      // of the policy loss: 1 without use_tis
  std::vector<std::uint8_t> mask;  // the loss mask without the rejected tokens
};

// Of one sample; the three spans have one value per response token. Only loss tokens enter the
// sequence's product (level sequence) or geometric mean; the values of other tokens are 1. Ratios
// are exponentials of sums within ±20.
//   tis_mode clip (TIS, Yao et al. 2025): weight = ratio within [tis_clip_low, tis_clip]
//   icepop (Ling team 2025): weight = ratio inside of the bounds, 0 outside
//   mask: weight = ratio, tokens outside of the bounds are rejected
//   use_rs: tokens whose ratio at rs_level is outside of [rs_lower_bound, rs_upper_bound] are
//   rejected; rs_veto_threshold: a token ratio below it rejects the sequence
// A ratio that is NaN is kept, so that it shows.
MismatchCorrection correct_mismatch(std::span<const float> trainer_log_probs,
                                    std::span<const float> engine_log_probs,
                                    std::span<const std::uint8_t> loss_mask,
                                    const AlgorithmConfig& algorithm);

// Sums over the loss tokens of a sample (before rejection), for metrics.
struct MismatchSums {
  double ratio = 0;     // train/tis
  double distance = 0;  // |ratio - 1|: train/tis_abs
  double bounded = 0;   // tokens whose weight is not their ratio: train/tis_clipfrac
  double weight = 0;    // what the loss is really multiplied by, over the tokens that are kept
  double rejected = 0;  // tokens
};
MismatchSums mismatch_sums(const MismatchCorrection& correction,
                           std::span<const std::uint8_t> loss_mask);

}  // namespace tandem
