// A model over its arena as the trainer runs it: packed forwards that end in the log-probabilities
// of the loss tokens. The actor and the reference are two of these; with the same weights and the
// same batch they give the same bits.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "config/config.h"
#include "model/model.h"
#include "trainer/packed_batch.h"

namespace tandem {

// The layers that backward computes again, by --recompute-granularity, -method and -num-layers.
std::vector<LayerRange> recompute_ranges(const TrainConfig& train, std::int64_t num_layers);

class PackedModel {
 public:
  // The arena must outlive the model.
  PackedModel(const ModelConfig& config, Arena& arena);

  Model& model() { return model_; }
  Arena& arena() { return arena_; }

  // Of packed.loss, in its order: log-probabilities at the temperature and, if asked for, the
  // entropy of the whole distribution at each of these places. packed.loss must not be empty. The
  // batch must live until backward is done; what it computes with is overwritten by the next call.
  LogProbs log_probs(PackedBatch& packed, double temperature, bool with_entropy);

 private:
  Arena& arena_;
  Model model_;
  std::optional<KvPool> pool_;  // one layer, as many blocks as the largest batch yet
};

}  // namespace tandem
