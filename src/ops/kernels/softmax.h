// Log-softmax of f32 logits: log-probability of one id, entropy, gradient and sampling. Trainer and
// engine share `row_stats`, so a sampled token's log-probability is the same bits on both sides.
// The sum runs over fixed chunks of 1,024 logits (sixteen lanes and a tree each), added in
// ascending order, so that ranks which hold slices of the vocabulary can reproduce it.
#pragma once

#include <omp.h>

#include <cmath>
#include <limits>

#include "base/philox.h"
#include "ops/kernels/simd.h"

namespace tandem::TD_ISA {

inline constexpr std::int64_t kVocabularyChunk = 1024;

struct RowStats {
  float top = 0;      // largest scaled logit
  float sum = 0;      // of exp(z - top)
  float log_sum = 0;  // log(sum); NaN when a logit is NaN or infinite
  float mean = 0;     // Σ p·(z - top), for the entropy
};

inline V16 scaled(const float* logits, std::int64_t i, std::int64_t vocab, V16 inv) {
  return load_tail(logits + i, vocab - i, -std::numeric_limits<float>::infinity()) * inv;
}

// chunk_sums, when not null, receives the sum of each chunk.
template <bool kEntropy>
inline RowStats row_stats(const float* logits, std::int64_t vocab, float inv_temperature,
                          float* chunk_sums) {
  const V16 inv = set1(inv_temperature);
  const std::int64_t whole = vocab / 16 * 16;
  V16 top = set1(-std::numeric_limits<float>::infinity()), check = zero();
  for (std::int64_t i = 0; i < whole; i += 16) {
    const V16 z = load(logits + i) * inv;
    check = check + (z - z);
    top = max(z, top);
  }
  if (whole < vocab) top = max(scaled(logits, whole, vocab, inv), top);
  RowStats s;
  s.top = max_lanes(top);
  float bad = sum_lanes(check);
  for (std::int64_t i = whole; i < vocab; ++i) bad += logits[i] - logits[i];
  const V16 t = set1(s.top);
  V16 weighted = zero();
  for (std::int64_t c = 0; c < vocab; c += kVocabularyChunk) {
    V16 sum = zero();
    const std::int64_t end = c + kVocabularyChunk < vocab ? c + kVocabularyChunk : vocab;
    for (std::int64_t i = c; i < end; i += 16) {
      const V16 z = scaled(logits, i, end, inv) - t;
      const V16 e = exp(z);
      sum = sum + e;
      if constexpr (kEntropy) weighted = fma(e, max(z, set1(-1e30f)), weighted);
    }
    const float chunk = sum_lanes(sum);
    if (chunk_sums) chunk_sums[c / kVocabularyChunk] = chunk;
    s.sum += chunk;
  }
  s.log_sum = static_cast<float>(std::log(static_cast<double>(s.sum))) + bad;
  if constexpr (kEntropy) s.mean = sum_lanes(weighted) / s.sum;
  return s;
}

inline void log_softmax_gather(const float* logits, const std::int32_t* ids, float temperature,
                               float* log_probs, float* log_sum_exp, float* entropy,
                               std::int64_t rows, std::int64_t vocab) {
  const float inv = 1.0f / temperature;
#pragma omp parallel for schedule(static)
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* z = logits + r * vocab;
    const RowStats s = entropy ? row_stats<true>(z, vocab, inv, nullptr)
                               : row_stats<false>(z, vocab, inv, nullptr);
    log_probs[r] = (z[ids[r]] * inv - s.top) - s.log_sum;
    if (log_sum_exp) log_sum_exp[r] = s.top + s.log_sum;
    if (entropy) entropy[r] = s.log_sum - s.mean;
  }
}

// d logit_j = (d_log_prob·(1[j = id] - p_j) - d_entropy·p_j·(log p_j + H)) / T.
inline void log_softmax_backward(float* logits, const std::int32_t* ids, float temperature,
                                 const float* log_sum_exp, const float* entropy,
                                 const float* d_log_prob, const float* d_entropy, std::int64_t rows,
                                 std::int64_t vocab) {
  const float inv = 1.0f / temperature;
#pragma omp parallel for schedule(static)
  for (std::int64_t r = 0; r < rows; ++r) {
    float* z = logits + r * vocab;
    const V16 lse = set1(log_sum_exp[r]), dp = set1(d_log_prob[r]);
    const V16 dh = set1(d_entropy ? d_entropy[r] : 0.0f), h = set1(entropy ? entropy[r] : 0.0f);
    for (std::int64_t i = 0; i < vocab; i += 16) {
      const V16 log_p = scaled(z, i, vocab, set1(inv)) - lse;
      const V16 p = exp(log_p);
      V16 g = zero() - dp * p;
      if (d_entropy) g = g - dh * p * (max(log_p, set1(-1e30f)) + h);
      store_tail(z + i, g * set1(inv), vocab - i);
    }
    z[ids[r]] += d_log_prob[r] * inv;
  }
}

// Inverse transform: the first token at which the running sum passes u·sum, u keyed by
// (seed, sample id, position, training or evaluation).
inline std::int32_t draw(const float* z, std::int64_t vocab, float inv, const RowStats& s,
                         const float* chunk_sums, const SampleRow& row) {
  const std::uint64_t high = row.position | (row.evaluation ? std::uint64_t{1} << 63 : 0);
  const auto words = Philox4x32::words(row.sample_id, high, row.seed);
  const double target = uniform_double(words[0], words[1]) * static_cast<double>(s.sum);
  const std::int64_t chunks = (vocab + kVocabularyChunk - 1) / kVocabularyChunk;
  double before = 0.0;
  std::int64_t c = 0;
  while (c + 1 < chunks && before + chunk_sums[c] <= target) before += chunk_sums[c++];
  // Rounding may leave the running sum short of the target; a chunk without mass is never drawn
  // from.
  while (c > 0 && chunk_sums[c] == 0.0f) before -= chunk_sums[--c];
  const std::int64_t end = std::min((c + 1) * kVocabularyChunk, vocab);
  std::int32_t last = 0;
  for (std::int64_t i = c * kVocabularyChunk; i < end; i += 16) {
    float e[16];
    store(e, exp(scaled(z, i, end, set1(inv)) - set1(s.top)));
    for (std::int64_t j = 0; j < 16 && i + j < end; ++j) {
      if (e[j] > 0.0f) last = static_cast<std::int32_t>(i + j);
      before += e[j];
      if (before > target) return last;
    }
  }
  return last;  // rounding left the running sum short: the chunk's last token with mass
}

inline void sample(const float* logits, std::int64_t vocab, const SampleRow* draws,
                   std::int64_t num_draws, std::int32_t* tokens, float* log_probs) {
  const std::int64_t chunks = (vocab + kVocabularyChunk - 1) / kVocabularyChunk;
#pragma omp parallel
  {
    thread_local std::vector<float> sums;
    sums.resize(chunks);
#pragma omp for schedule(static)
    for (std::int64_t d = 0; d < num_draws; ++d) {
      const float* z = logits + draws[d].row * vocab;
      const bool greedy = draws[d].temperature == 0.0;
      const float inv = greedy ? 1.0f : 1.0f / static_cast<float>(draws[d].temperature);
      const RowStats s = row_stats<false>(z, vocab, inv, sums.data());
      std::int32_t id = 0;
      if (greedy) {
        for (std::int64_t i = 1; i < vocab; ++i)
          if (z[i] > z[id]) id = static_cast<std::int32_t>(i);
      } else {
        id = draw(z, vocab, inv, s, sums.data(), draws[d]);
      }
      tokens[d] = id;
      log_probs[d] = (z[id] * inv - s.top) - s.log_sum;
    }
  }
}

}  // namespace tandem::TD_ISA
