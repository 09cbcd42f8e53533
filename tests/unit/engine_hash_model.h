// A tiny deterministic language model over a real paged memory, for tests of scheduler and engine.
//
// Its "attention" folds, for a row at position p, what the slots of positions 0..p hold, in order,
// through the block table; a slot holds the hash of (token, position) that was written there. The
// token drawn depends on that fold, the seed, the sample id and the position. So any fault in block
// tables, copies, sharing or recomputation changes the answer, and the right answer is computed
// without any of them by reference_answer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/engine.h"

namespace tandem::test {

inline std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = a * 0x9E3779B97F4A7C15ull ^ (b + 0xD1B54A32D192ED03ull);
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9ull;
  return x ^ (x >> 32);
}

struct HashModel {
  std::int64_t block_tokens;
  TokenId vocab;
  std::vector<std::uint64_t> slots;  // what was written, 0 where nothing
  std::uint64_t weights = 0;         // other numbers compute other keys
  std::int64_t max_rows_seen = 0;
  std::int64_t rows_seen = 0;

  HashModel(std::int64_t num_blocks, std::int64_t block_size, TokenId vocab_size)
      : block_tokens(block_size), vocab(vocab_size), slots(num_blocks * block_size, 0) {}

  static std::uint64_t key(TokenId token, std::int64_t position, std::uint64_t weights) {
    return mix(static_cast<std::uint64_t>(token) + 1 + (weights << 32),
               static_cast<std::uint64_t>(position)) |
           1;
  }
  static SampledToken draw(std::uint64_t fold, const PlanDraw& d, TokenId vocab) {
    std::uint64_t h = mix(mix(fold, d.seed), mix(d.sample_id, d.position));
    if (d.temperature == 0) h = fold;
    if (d.evaluation) h = mix(h, 7);
    return {static_cast<TokenId>(h % static_cast<std::uint64_t>(vocab)),
            -static_cast<float>(h % 1000003) / 7919.0f};
  }

  // Fold of each row that is in logit_rows, then one draw each.
  void run(const StepPlan& plan, std::span<SampledToken> sampled) {
    rows_seen += static_cast<std::int64_t>(plan.tokens.size());
    max_rows_seen = std::max(max_rows_seen, static_cast<std::int64_t>(plan.tokens.size()));
    for (const BlockCopy& copy : plan.copies) {
      for (std::int64_t i = 0; i < block_tokens; ++i) {
        slots[copy.to * block_tokens + i] = slots[copy.from * block_tokens + i];
      }
    }
    for (std::size_t row = 0; row < plan.tokens.size(); ++row) {
      slots[plan.slots[row]] = key(plan.tokens[row], plan.positions[row], weights);
    }
    for (std::size_t i = 0; i < plan.draws.size(); ++i) {
      const std::int64_t row = plan.logit_rows[plan.draws[i].logits_index];
      sampled[i] = draw(fold(plan, row), plan.draws[i], vocab);
    }
  }

  std::uint64_t fold(const StepPlan& plan, std::int64_t row) const {
    for (const PlanSegment& s : plan.segments) {
      if (row < s.row_begin || row >= s.row_begin + s.num_rows) continue;
      const std::int64_t position = s.position_begin + row - s.row_begin;
      std::uint64_t value = 0;
      for (std::int64_t p = 0; p <= position; ++p) {
        const std::int32_t block = plan.block_ids[s.blocks_begin + p / block_tokens];
        value = mix(value, slots[block * block_tokens + p % block_tokens]);
      }
      return value;
    }
    return 0;
  }
};

// The answer to sample i of a request, computed alone and without a cache.
inline SampleResult reference_answer(const GenerateRequest& request, std::int64_t i,
                                     const EngineLimits& limits, std::uint64_t weights = 0) {
  SampleResult result;
  std::vector<TokenId> tokens = request.prompt;
  const auto is_stop = [&](TokenId token) {
    const auto in = [&](const std::vector<TokenId>& ids) {
      return std::find(ids.begin(), ids.end(), token) != ids.end();
    };
    return !request.params.ignore_eos &&
           (in(limits.eos_token_ids) || in(request.params.stop_token_ids));
  };
  result.finish = FinishReason::length;
  while (static_cast<std::int64_t>(result.output_ids.size()) < request.params.max_new_tokens &&
         static_cast<std::int64_t>(tokens.size()) < limits.context_length) {
    std::uint64_t value = 0;
    for (std::size_t p = 0; p < tokens.size(); ++p) {
      value = mix(value, HashModel::key(tokens[p], static_cast<std::int64_t>(p), weights));
    }
    const PlanDraw d = {.temperature = request.params.temperature,
                        .seed = request.params.seed,
                        .sample_id = request.first_sample_id + static_cast<std::uint64_t>(i),
                        .position = result.output_ids.size(),
                        .evaluation = request.params.evaluation};
    const SampledToken s = HashModel::draw(value, d, static_cast<TokenId>(limits.vocab_size));
    tokens.push_back(s.token);
    result.output_ids.push_back(s.token);
    result.log_probs.push_back(s.log_prob);
    if (is_stop(s.token)) {
      result.finish = FinishReason::stop;
      break;
    }
  }
  return result;
}

}  // namespace tandem::test
