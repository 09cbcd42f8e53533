// Scoring through the packed and through the paged context.
#include "trainer/score.h"

#include <ATen/ATen.h>

#include <cmath>

#include "base/check.h"
#include "trainer/packed_batch.h"

namespace tandem {
namespace {

Score score_of(const at::Tensor& log_probs) {
  const at::Tensor host = log_probs.to(at::kCPU);
  const float* p = host.const_data_ptr<float>();
  Score score{.log_probs = {p, p + log_probs.numel()}, .loss = 0, .gradient_norms = {}};
  double sum = 0;
  for (float v : score.log_probs) sum -= v;
  score.loss = static_cast<float>(sum / static_cast<double>(score.log_probs.size()));
  return score;
}

}  // namespace

Scorer::Scorer(const ModelConfig& config, Arena& arena, bool gradients)
    : arena_(arena),
      gradients_(gradients),
      grads_(gradients ? arena.layout().flat_elements : 0, arena.place()),
      model_(config, arena, nullptr, nullptr) {}

void Scorer::prepare(std::span<const TokenId> ids) {
  TD_CHECK(ids.size() >= 2, "score: {} tokens found, at least 2 wanted", ids.size());
  model_.set_longest_sequence(static_cast<std::int64_t>(ids.size()));
}

Score Scorer::through_trainer(std::span<const TokenId> ids) {
  prepare(ids);
  Sample sample;
  sample.tokens.assign(ids.begin(), ids.end());
  sample.response_length = static_cast<std::int64_t>(ids.size()) - 1;
  sample.loss_mask.assign(ids.size() - 1, 1);
  const Sample* const one[] = {&sample};
  PackedBatch packed(one, true);
  KvPool pool(model_.attention_shape(), model_.element(), 1, packed.num_blocks(), model_.place());
  packed.context.pool = &pool;
  const c10::AutoGradMode mode(gradients_);
  if (gradients_) model_.set_grads(grads_.data());
  const auto hidden = model_.forward(packed.tokens, packed.positions, packed.context);
  const auto log_probs =
      head_log_probs(hidden, ids.subspan(1), model_.head(), 1.0f, false).log_probs;
  Score score = score_of(log_probs.detach());
  if (!gradients_) return score;
  (-log_probs.mean()).backward();
  model_.finish_grads();
  score.gradient_norms = norms();
  return score;
}

std::map<std::string, double> Scorer::norms() const {
  std::map<std::string, double> out;
  const ArenaLayout& layout = arena_.layout();
  for (const ArenaEntry& e : layout.entries) {
    std::vector<float> part(static_cast<std::size_t>(e.rows * layout.storages[e.storage].cols));
    grads_.read(e.flat_begin, part);
    double sum = 0;
    for (const double g : part) sum += g * g;
    out[e.hf_name] = std::sqrt(sum);
  }
  return out;
}

Score Scorer::through_engine(std::span<const TokenId> ids) {
  prepare(ids);
  const c10::AutoGradMode no_grad(false);
  const auto count = static_cast<std::int64_t>(ids.size()) - 1;
  const std::int64_t num_blocks = (count + kBlockTokens - 1) / kBlockTokens;
  KvPool pool(model_.attention_shape(), model_.element(), model_.config().num_layers, num_blocks,
              model_.place());
  std::vector<std::int32_t> blocks;  // in reverse, so that block order is not position order
  for (std::int64_t b = num_blocks; b-- > 0;) blocks.push_back(static_cast<std::int32_t>(b));
  const auto all = at::empty({count}, at::dtype(at::kFloat));
  for (std::int64_t at = 0; at < count;) {
    const std::int64_t rows = at == 0 ? (count + 1) / 2 : 1;
    AttentionContext context{.pool = &pool, .segments = {}, .writes = {}, .plan = {}};
    context.segments.push_back({.row_begin = 0,
                                .num_rows = rows,
                                .position_begin = at,
                                .blocks = blocks.data(),
                                .num_blocks = num_blocks});
    std::vector<std::int32_t> positions;
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t p = at + i;
      positions.push_back(static_cast<std::int32_t>(p));
      context.writes.push_back({i, blocks[p / kBlockTokens] * kBlockTokens + p % kBlockTokens});
    }
    const auto n = static_cast<std::size_t>(rows);
    const auto hidden = model_.forward(ids.subspan(at, n), positions, context);
    const auto part = head_log_probs(hidden, ids.subspan(at + 1, n), model_.head(), 1.0f, false);
    all.narrow(0, at, rows).copy_(part.log_probs);
    at += rows;
  }
  return score_of(all);
}

}  // namespace tandem
