// Decode steps on a GPU as captured graphs: one launch instead of hundreds. A step in which every
// sequence runs one row and draws one token is padded to the next of a few row counts (buckets);
// the graph of a bucket reads tokens, positions, block tables and draws from memory that stays
// where it is and is written anew before each run. Weights and KV blocks do not move either (their
// memory keeps its addresses even while it is given back), so a graph lives through updates of the
// weights; with two arenas that take turns there is one over each.
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
  // Both on a GPU, one tensor-parallel rank; both must outlive the graphs.
  DecodeGraphs(Model& model, KvPool& pool);
  ~DecodeGraphs();

  // Runs the plan and fills `sampled`, unless the plan is no decode step (or a larger one than
  // there are buckets): then nothing is done, and false.
  bool run(const StepPlan& plan, std::span<SampledToken> sampled);

  std::int64_t captured() const;  // graphs so far

 private:
  struct Bucket;
  Bucket* bucket_for(const StepPlan& plan);
  void fill(Bucket& bucket, const StepPlan& plan);
  void forward(Bucket& bucket);
  void* capture(Bucket& bucket);

  Model& model_;
  KvPool& pool_;
  std::vector<std::unique_ptr<Bucket>> buckets_;  // ascending
};

}  // namespace tandem
