// The learning rate of an optimizer step, a pure function of its index (0-based), in Megatron's
// terms: linear warm-up over lr_warmup_iters from lr_warmup_init to lr, then constant, linear or
// cosine decay to min_lr over the remaining lr_decay_iters - lr_warmup_iters steps.
#pragma once

#include <cstdint>

#include "config/config.h"

namespace tandem {

// total_steps stands in where lr_decay_iters is not given.
double learning_rate(const OptimizerConfig& config, std::int64_t step, std::int64_t total_steps);

}  // namespace tandem
