// Runs a step's plan on the model of this rank: block copies, forward over the paged KV pool,
// logits of the rows that need them, one sampled token and log-probability per draw.
//
// Nothing is decided here, so leader and follower ranks that run the same plan do the same. The
// order matters: copies before the forward, since the forward writes into their sources.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/decode_graph.h"
#include "engine/engine.h"
#include "engine/sampler.h"
#include "model/kv_pool.h"
#include "model/model.h"

namespace tandem {

class Runner {
 public:
  // Both must outlive the runner. The scheduler's limits must have num_blocks = pool.num_blocks()
  // and block_tokens = kBlockTokens.
  // On a GPU `graphs` lets decode steps run as captured graphs (decode_graph.h).
  Runner(Model& model, KvPool& pool, bool graphs = true);

  // Fills sampled[plan.draws.size()]. Records no gradients. Not while a plan is started.
  void run(const StepPlan& plan, std::span<SampledToken> sampled);
  // The two halves of an AsyncRunner; `start` takes decode steps on a GPU.
  bool start(const StepPlan& plan, std::span<const std::int32_t> sources) {
    return graphs_ && graphs_->start(plan, sources);
  }
  void finish(std::span<SampledToken> sampled) { graphs_->finish(sampled); }
  // The same on a rank that hands no tokens on: it draws nothing, or for nobody in a captured step.
  void follow(const StepPlan& plan);
  // All of it but the draws: logits [logit_rows, vocab], undefined if the plan has none.
  at::Tensor forward(const StepPlan& plan);
  std::int64_t captured_graphs() const { return graphs_ ? graphs_->captured() : 0; }

 private:
  void fill_context(const StepPlan& plan);
  void sample(const StepPlan& plan, const at::Tensor& logits, std::span<SampledToken> sampled);
  SampledToken sample_changed(const StepPlan& plan, const PlanDraw& draw, const at::Tensor& logits);

  Model& model_;
  AttentionContext context_;
  std::unique_ptr<DecodeGraphs> graphs_;
  Sampler sampler_;
  std::vector<SampleRow> rows_;  // the rest is scratch of sample(), kept between steps
  std::vector<std::size_t> plain_;
  std::vector<TokenId> tokens_;
  std::vector<float> log_probs_;
};

}  // namespace tandem
