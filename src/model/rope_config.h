// The kinds of rotary embedding a config.json may ask for, and their frequencies. No torch here.
//
// The frequencies are computed in float with the roundings of transformers' modeling_rope_utils.py,
// because a position of thousands multiplies each difference in the last bit.
#pragma once

#include <cstdint>
#include <vector>

namespace tandem {

enum class RopeType { standard, linear, llama3, yarn, longrope };

struct RopeConfig {
  RopeType type = RopeType::standard;
  double theta = 10000.0;
  std::int64_t rotary_dim = 0;    // leading elements of a head that are turned; 0: the whole head
  bool interleaved = false;       // pairs are elements (2i, 2i + 1), not (i, i + rotary_dim / 2)
  double factor = 1.0;            // linear, llama3, yarn, longrope
  double low_freq_factor = 1.0;   // llama3
  double high_freq_factor = 4.0;  // llama3
  std::int64_t original_max_positions = 0;  // llama3, yarn, longrope
  double beta_fast = 32.0;                  // yarn
  double beta_slow = 1.0;
  bool truncate = true;
  double attention_factor = 1.0;  // yarn, longrope: multiplies cos and sin; given or computed
  // longrope: divisors of the frequencies, [rotary_dim / 2]; the long ones count for sequences
  // longer than original_max_positions, and then for all of their positions.
  std::vector<double> short_factors, long_factors;

  bool operator==(const RopeConfig&) const = default;
};

// Rotary frequencies, [rotary_dim / 2], radians per position. cos and sin are then multiplied by
// rope.attention_factor. longest_sequence decides between longrope's two sets and is unused else.
std::vector<float> inv_freq(const RopeConfig& rope, std::int64_t head_dim,
                            std::int64_t longest_sequence = 0);

// 0.1 · mscale · ln(factor) + 1, and 1 for a factor up to 1 (YaRN, arXiv 2309.00071, section 3.4).
double yarn_attention_factor(double factor, double mscale);
// sqrt(1 + ln(factor) / ln(original)), and 1 for a factor up to 1 (LongRoPE, arXiv 2402.13753).
double longrope_attention_factor(double factor, std::int64_t original_max_positions);

}  // namespace tandem
