// `tandem score`: the log-probability of every next token of given texts, through the trainer's
// packed forward or the engine's paged one, and with --gradients the loss and the gradient norm of
// each parameter. One JSON object a line on standard output. What these numbers are compared with is
// another program's (transformers), so the arithmetic is the one that training and rollout use.
#include <ATen/ATen.h>

#include <cmath>

#include "base/json.h"
#include "base/log.h"
#include "cli/texts.h"
#include "cli/usage.h"
#include "config/resolve.h"
#include "rank/worker.h"
#include "trainer/gradients.h"
#include "trainer/packed_batch.h"

namespace tandem {
namespace {

std::span<const TokenId> targets(const TokenRow& row) {
  return {row.ids.data() + 1, row.ids.size() - 1};
}

class Scorer {
 public:
  Scorer(Weights& weights, bool gradients)
      : weights_(weights),
        grads_(gradients ? weights.arena.layout().flat_elements : 0),
        model_(weights.folder.config(), weights.arena, nullptr, gradients ? grads_.data() : nullptr) {}

  // Packed, as in training. With gradients: of the mean cross-entropy of this row.
  OrderedJson through_trainer(const TokenRow& row, bool gradients) {
    Sample sample;
    sample.tokens = row.ids;
    sample.response_length = static_cast<std::int64_t>(row.ids.size()) - 1;
    sample.loss_mask.assign(row.ids.size() - 1, 1);
    const Sample* const one[] = {&sample};
    PackedBatch packed(one, true);
    KvPool pool(model_.attention_shape(), model_.element(), 1, packed.num_blocks());
    packed.context.pool = &pool;
    const c10::AutoGradMode mode(gradients);
    if (gradients) model_.set_grads(grads_.data());
    const auto hidden = model_.forward(packed.tokens, packed.positions, packed.context);
    const auto log_probs = head_log_probs(hidden, targets(row), model_.head(), 1.0f, false).log_probs;
    OrderedJson json = answer(row, log_probs.detach());
    if (!gradients) return json;
    const auto loss = -log_probs.mean();
    loss.backward();
    model_.finish_grads();
    json["loss"] = loss.item<float>();
    OrderedJson norms = OrderedJson::object();
    const ArenaLayout& layout = weights_.arena.layout();
    for (const ArenaEntry& e : layout.entries) {
      double sum = 0;
      for (std::int64_t i = 0; i < e.rows * layout.storages[e.storage].cols; ++i) {
        const double g = grads_.data()[e.flat_begin + i];
        sum += g * g;
      }
      norms[e.hf_name] = std::sqrt(sum);
    }
    json["gradient_norms"] = std::move(norms);
    return json;
  }

  // Paged, as in rollout: a prefill of the first half, then one row at a time.
  OrderedJson through_engine(const TokenRow& row) {
    const c10::AutoGradMode no_grad(false);
    const auto count = static_cast<std::int64_t>(row.ids.size()) - 1;
    const std::int64_t num_blocks = (count + kBlockTokens - 1) / kBlockTokens;
    KvPool pool(model_.attention_shape(), model_.element(), weights_.folder.config().num_layers,
                num_blocks);
    std::vector<std::int32_t> blocks;  // in reverse, so that block order is not position order
    for (std::int64_t b = num_blocks; b-- > 0;) blocks.push_back(static_cast<std::int32_t>(b));
    const auto all = at::empty({count}, at::dtype(at::kFloat));
    for (std::int64_t at = 0; at < count;) {
      const std::int64_t rows = at == 0 ? (count + 1) / 2 : 1;
      AttentionContext context{.pool = &pool, .segments = {}, .writes = {}};
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
      const auto hidden = model_.forward({row.ids.data() + at, static_cast<std::size_t>(rows)},
                                         positions, context);
      const auto part =
          head_log_probs(hidden, targets(row).subspan(at, rows), model_.head(), 1.0f, false);
      all.narrow(0, at, rows).copy_(part.log_probs);
      at += rows;
    }
    return answer(row, all);
  }

 private:
  static OrderedJson answer(const TokenRow& row, const at::Tensor& log_probs) {
    const float* p = log_probs.data_ptr<float>();
    return {{"input_ids", row.ids},
            {"logprobs", std::vector<float>(p, p + log_probs.numel())}};
  }

  Weights& weights_;
  FlatBuffer grads_;
  Model model_;
};

}  // namespace

int command_score(const std::vector<std::string>& words) {
  ScoreConfig config;
  const auto parsed = read_flags(
      words, config, "usage: tandem score --hf-checkpoint DIR --input FILE.jsonl [flags]\n");
  if (!parsed) return 0;
  resolve(config, this_host());
  start_log({});
  for (const auto& note : parsed->notes) TD_LOG(info, "{}", note);
  TD_LOG(info, "{}", start_compute(config.compute));
  TokenizerProcess tokenizer({.folder = config.model.hf_checkpoint});
  const auto rows = read_token_rows(config.input, tokenizer);
  Weights weights(config.model.hf_checkpoint, compute_element(config.model.dtype));
  const std::int64_t limit = weights.folder.config().max_position_embeddings;
  for (std::size_t i = 0; i < rows.size(); ++i)
    TD_CHECK(rows[i].ids.size() >= 2 && static_cast<std::int64_t>(rows[i].ids.size()) <= limit,
             "{}: row {} has {} tokens, 2 to {} wanted", config.input, i + 1, rows[i].ids.size(),
             limit);
  Scorer scorer(weights, config.gradients);
  for (const TokenRow& row : rows)
    fmt::print("{}\n", dump_json(config.through == Side::engine
                                     ? scorer.through_engine(row)
                                     : scorer.through_trainer(row, config.gradients)));
  return 0;
}

}  // namespace tandem
