// Warm-up and decay as Megatron's OptimizerParamScheduler defines them.
#include "trainer/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace tandem {
namespace {

double cosine_left(double done) { return 0.5 * (std::cos(std::numbers::pi * done) + 1.0); }

// What is left of lr - min_lr when the share `done` of a decay is over: 1 to 0.
double wsd_left(WsdDecayStyle style, double done) {
  switch (style) {
    case WsdDecayStyle::exponential:
      return 2.0 * std::pow(0.5, done) - 1.0;
    case WsdDecayStyle::linear:
      return 1.0 - done;
    case WsdDecayStyle::cosine:
      return cosine_left(done);
    case WsdDecayStyle::minus_sqrt:
      return 1.0 - std::sqrt(done);
  }
  return 0.0;
}

}  // namespace

double learning_rate(const OptimizerConfig& c, std::int64_t step, std::int64_t total_steps) {
  const auto s = static_cast<double>(step);
  const auto decay = static_cast<double>(c.lr_decay_iters.value_or(total_steps));
  const double warmup =
      c.lr_warmup_fraction ? *c.lr_warmup_fraction * decay : static_cast<double>(c.lr_warmup_iters);
  if (s < warmup) return c.lr_warmup_init + (c.lr - c.lr_warmup_init) * s / warmup;
  if (s == warmup && warmup > 0) return c.lr;
  const auto decayed = [&](double left) { return c.min_lr + left * (c.lr - c.min_lr); };
  if (c.lr_decay_style != LrDecayStyle::constant && (s > decay || decay <= warmup)) return c.min_lr;
  const double done = (s - warmup) / (decay - warmup);
  switch (c.lr_decay_style) {
    case LrDecayStyle::constant:
      return c.lr;
    case LrDecayStyle::linear:
      return decayed(1.0 - done);
    case LrDecayStyle::cosine:
      return decayed(cosine_left(done));
    case LrDecayStyle::inverse_square_root:
      return std::max(c.min_lr, c.lr * std::sqrt(std::max(warmup, 1.0) / std::max(s, 1.0)));
    case LrDecayStyle::wsd: {
      const auto length = static_cast<double>(c.lr_wsd_decay_iters.value());
      const double start = decay - length;
      return s <= start ? c.lr : decayed(wsd_left(c.lr_wsd_decay_style, (s - start) / length));
    }
  }
  return c.lr;
}

}  // namespace tandem
