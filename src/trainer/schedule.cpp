// Warm-up and decay as Megatron defines them.
#include "trainer/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace tandem {

double learning_rate(const OptimizerConfig& c, std::int64_t step, std::int64_t total_steps) {
  const auto warmup = static_cast<double>(c.lr_warmup_iters);
  const auto s = static_cast<double>(step);
  if (s < warmup) return c.lr_warmup_init + (c.lr - c.lr_warmup_init) * s / warmup;
  if (c.lr_decay_style == LrDecayStyle::constant) return c.lr;
  const auto decay = static_cast<double>(c.lr_decay_iters.value_or(total_steps));
  if (s > decay || decay <= warmup) return c.min_lr;
  const double done = (s - warmup) / (decay - warmup);
  const double left = c.lr_decay_style == LrDecayStyle::linear
                          ? 1.0 - done
                          : 0.5 * (std::cos(std::numbers::pi * done) + 1.0);
  return c.min_lr + left * (c.lr - c.min_lr);
}

}  // namespace tandem
