// Decode steps on a GPU as captured graphs: one launch instead of hundreds. A step in which every
// sequence runs one row and draws one token is padded to the next of a few row counts (buckets);
// the graph of a bucket reads tokens, positions, block tables and draws from memory that stays
// where it is and is written anew before each run. The tokens drawn stay on the device too, where
// the next step may read them before the host does: so two steps can be under way, each with host
// memory of its own, and the host prepares one while the other runs. Weights and KV blocks do not
// move either (their memory keeps its addresses even while it is given back), so a graph lives
// through updates of the weights; with two arenas that take turns there is one over each.
//
// Draws from changed logits (top-p, penalties) are made on the host, so such a step runs without.
// A padded row is a sequence of one token whose key and value go to the pool's spare block.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "model/kv_pool.h"
#include "model/model.h"

namespace tandem {

class DecodeGraphs {
 public:
  // Both on a GPU; both must outlive the graphs. All tensor-parallel ranks of the model capture and
  // run the same graphs, since each takes the same plans.
  DecodeGraphs(Model& model, KvPool& pool);
  ~DecodeGraphs();

  // Starts the plan, unless it is no decode step (or a larger one than there are buckets): then
  // nothing is done, and false. See AsyncRunner; at most two plans are started and not finished.
  bool start(const StepPlan& plan, std::span<const std::int32_t> sources);
  void finish(std::span<SampledToken> sampled);

  std::int64_t captured() const;  // graphs so far

 private:
  struct Bucket;
  Bucket* bucket_for(const StepPlan& plan);
  void fill(Bucket& bucket, const StepPlan& plan, std::span<const std::int32_t> sources);
  void forward(Bucket& bucket);
  void* capture(Bucket& bucket);

  Model& model_;
  KvPool& pool_;
  std::vector<std::unique_ptr<Bucket>> buckets_;  // ascending
  // What the last step drew: tokens, then log-probabilities.
  at::Tensor output_;
  struct Turn {
    at::Tensor output;     // on the host
    void* mark = nullptr;  // set once it is there
  };
  Turn turns_[2];
  std::int64_t started_ = 0, finished_ = 0;  // steps; a step's turn is its number modulo 2
};

}  // namespace tandem
