// The packed forward: KV pool, model, the rows whose next token counts, head.
#include "trainer/packed_model.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace tandem {

std::vector<LayerRange> recompute_ranges(const TrainConfig& train, std::int64_t num_layers) {
  std::vector<LayerRange> ranges;
  if (train.recompute_granularity != "full") return ranges;
  const bool uniform = train.recompute_method == "uniform";
  const std::int64_t count = train.recompute_num_layers.value_or(1);
  const std::int64_t width = uniform ? count : 1;
  const std::int64_t last = uniform ? num_layers : std::min(count, num_layers);
  for (std::int64_t begin = 0; begin < last; begin += width)
    ranges.push_back({begin, std::min(begin + width, last)});
  return ranges;
}

PackedModel::PackedModel(const ModelConfig& config, Arena& arena, LayerGather* layers,
                         std::int64_t longest_sequence)
    : layers_(layers),
      arena_(layers ? layers->arena() : arena),
      model_(config, arena_, nullptr, nullptr) {
  model_.set_gather(layers);
  if (longest_sequence > 0) model_.set_longest_sequence(longest_sequence);
}

LogProbs PackedModel::log_probs(PackedBatch& packed, double temperature, bool with_entropy) {
  if (!pool_ || pool_->num_blocks() < packed.num_blocks())
    pool_.emplace(model_.attention_shape(), model_.element(), 1,
                  std::max<std::int64_t>(packed.num_blocks() * 5 / 4, 64), model_.place());
  packed.context.pool = &*pool_;
  const auto hidden = model_.forward(packed.tokens, packed.positions, packed.context);

  std::vector<TokenId> ids;
  const auto rows =
      at::empty({static_cast<std::int64_t>(packed.loss.size())}, at::dtype(at::kLong));
  for (const LossToken& t : packed.loss) {
    rows.data_ptr<std::int64_t>()[ids.size()] = t.row;
    ids.push_back(t.id);
  }
  return head_log_probs(hidden.index_select(0, rows.to(hidden.device())), ids, model_.head(),
                        static_cast<float>(temperature), with_entropy);
}

Passes::Passes(PackedModel& model, const std::vector<bool>& with_backward)
    : layers_(model.layers()), left_(with_backward.size()) {
  if (!layers_) return;
  std::vector<std::vector<std::int64_t>> orders;
  for (const bool backward : with_backward) orders.push_back(model.model().layer_order(backward));
  layers_->begin(orders);
}

void Passes::end_one() {
  if (layers_) layers_->end_pass();
  --left_;
}

void Passes::end_all() {
  while (left_ > 0) end_one();
}

}  // namespace tandem
