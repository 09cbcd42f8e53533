// The learning rate of an optimizer step, a pure function of its index (0-based), in Megatron's
// terms: linear warm-up over lr_warmup_iters (or lr_warmup_fraction of the decay steps) from
// lr_warmup_init to lr; then constant, or linear or cosine to min_lr over what remains of
// lr_decay_iters, or lr·sqrt(warm-up / step), or WSD: constant and a decay in the last
// lr_wsd_decay_iters. After lr_decay_iters it is min_lr.
#pragma once

#include <cstdint>

#include "config/config.h"

namespace tandem {

// total_steps stands in where lr_decay_iters is not given.
double learning_rate(const OptimizerConfig& config, std::int64_t step, std::int64_t total_steps);

}  // namespace tandem
