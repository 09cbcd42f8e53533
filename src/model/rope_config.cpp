// Frequencies of the default, linear, llama3, yarn and longrope rotary embeddings.
#include "model/rope_config.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

namespace tandem {
namespace {

std::vector<float> llama3_frequencies(const RopeConfig& rope, std::vector<float> freqs) {
  const float old_length = static_cast<float>(rope.original_max_positions);
  const float low = static_cast<float>(rope.low_freq_factor),
              high = static_cast<float>(rope.high_freq_factor);
  const float factor = static_cast<float>(rope.factor);
  for (float& freq : freqs) {
    const float wavelength = static_cast<float>(2.0 * std::numbers::pi) / freq;
    if (wavelength < old_length / high) continue;
    if (wavelength > old_length / low) {
      freq = freq / factor;
    } else {
      const float smooth = (old_length / wavelength - low) / (high - low);
      freq = (1.0f - smooth) * freq / factor + smooth * freq;
    }
  }
  return freqs;
}

std::vector<float> yarn_frequencies(const RopeConfig& rope, std::vector<float> freqs) {
  const auto dim = static_cast<double>(freqs.size() * 2);
  const auto pair_at = [&](double turns) {
    return dim *
           std::log(static_cast<double>(rope.original_max_positions) /
                    (turns * 2.0 * std::numbers::pi)) /
           (2.0 * std::log(rope.theta));
  };
  double low = pair_at(rope.beta_fast), high = pair_at(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1.0);
  if (low == high) high += 0.001;
  for (std::size_t i = 0; i < freqs.size(); ++i) {
    const float ramp = std::clamp(
        (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low), 0.0f,
        1.0f);
    const float keep = 1.0f - ramp;
    const float stretched = 1.0f / (static_cast<float>(rope.factor) * (1.0f / freqs[i]));
    freqs[i] = stretched * (1.0f - keep) + freqs[i] * keep;
  }
  return freqs;
}

}  // namespace

double yarn_attention_factor(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double longrope_attention_factor(double factor, std::int64_t original_max_positions) {
  if (factor <= 1.0) return 1.0;
  return std::sqrt(1.0 + std::log(factor) / std::log(static_cast<double>(original_max_positions)));
}

std::vector<float> inv_freq(const RopeConfig& rope, std::int64_t head_dim,
                            std::int64_t longest_sequence) {
  const std::int64_t dim = rope.rotary_dim > 0 ? rope.rotary_dim : head_dim;
  const auto& divisors =
      longest_sequence > rope.original_max_positions ? rope.long_factors : rope.short_factors;
  std::vector<float> freqs(static_cast<std::size_t>(dim / 2));
  for (std::size_t i = 0; i < freqs.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(dim);
    float power = static_cast<float>(std::pow(rope.theta, static_cast<double>(exponent)));
    if (rope.type == RopeType::longrope) power = static_cast<float>(divisors[i]) * power;
    freqs[i] = 1.0f / power;
  }
  switch (rope.type) {
    case RopeType::standard:
    case RopeType::longrope:
      break;
    case RopeType::linear:
      for (float& freq : freqs) freq /= static_cast<float>(rope.factor);
      break;
    case RopeType::llama3:
      return llama3_frequencies(rope, std::move(freqs));
    case RopeType::yarn:
      return yarn_frequencies(rope, std::move(freqs));
  }
  return freqs;
}

}  // namespace tandem
