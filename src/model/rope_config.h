// The kinds of rotary embedding a config.json may ask for, and their frequencies. No torch here.
//
// The frequencies are computed in float with the roundings of transformers' modeling_rope_utils.py,
// because a position of thousands multiplies each difference in the last bit.
#pragma once

#include <cstdint>
#include <vector>

namespace tandem {

enum class RopeType { standard, linear, llama3, yarn };

struct RopeConfig {
  RopeType type = RopeType::standard;
  double theta = 10000.0;
  double factor = 1.0;                      // linear, llama3, yarn
  double low_freq_factor = 1.0;             // llama3
  double high_freq_factor = 4.0;            // llama3
  std::int64_t original_max_positions = 0;  // llama3, yarn
  double beta_fast = 32.0;                  // yarn
  double beta_slow = 1.0;
  bool truncate = true;
  double attention_factor = 1.0;  // yarn: multiplies cos and sin; given, or computed from factor

  bool operator==(const RopeConfig&) const = default;
};

// Rotary frequencies, [head_dim / 2], radians per position. cos and sin are then multiplied by
// rope.attention_factor.
std::vector<float> inv_freq(const RopeConfig& rope, std::int64_t head_dim);

// 0.1 · mscale · ln(factor) + 1, and 1 for a factor up to 1 (YaRN, arXiv 2309.00071, section 3.4).
double yarn_attention_factor(double factor, double mscale);

}  // namespace tandem
