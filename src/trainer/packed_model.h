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
  // The arena, or `layers` where it is not null and gathers them instead, must outlive the model.
  // longest_sequence: TrainerSetup's, which all roles of a run must share.
  PackedModel(const ModelConfig& config, Arena& arena, LayerGather* layers,
              std::int64_t longest_sequence);

  Model& model() { return model_; }
  LayerGather* layers() const { return layers_; }
  // Of all weights, whatever this rank keeps of them.
  const ArenaLayout& layout() const { return arena_.layout(); }

  // Of packed.loss, in its order: log-probabilities at the temperature and, if asked for, the
  // entropy of the whole distribution at each of these places. packed.loss must not be empty. The
  // batch must live until backward is done; what it computes with is overwritten by the next call.
  LogProbs log_probs(PackedBatch& packed, double temperature, bool with_entropy);

 private:
  LayerGather* layers_;
  Arena& arena_;
  Model model_;
  std::optional<KvPool> pool_;  // one layer, as many blocks as the largest batch yet
};

// The passes over a model's layers that all ranks make together; with weights that are all there it
// does nothing. with_backward: one a pass, equal on all ranks.
class Passes {
 public:
  Passes(PackedModel& model, const std::vector<bool>& with_backward);
  // This rank has made one.
  void end_one();
  // And makes the rest without computing.
  void end_all();

 private:
  LayerGather* layers_;
  std::size_t left_;
};

}  // namespace tandem
