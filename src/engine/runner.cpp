// A step on the model: see the header.
#include "engine/runner.h"

#include <c10/core/InferenceMode.h>

#include <cassert>

#include "ops/kernels/kernels.h"

namespace tandem {

void Runner::run(const StepPlan& plan, std::span<SampledToken> sampled) {
  assert(sampled.size() == plan.draws.size());
  const c10::InferenceMode no_gradients;
  for (const BlockCopy& copy : plan.copies) context_.pool->copy_block(copy.from, copy.to);
  fill_context(plan);
  const at::Tensor hidden = model_.forward(plan.tokens, plan.positions, context_);
  if (plan.draws.empty()) return;
  sample(plan, model_.logits(hidden, plan.logit_rows), sampled);
}

void Runner::fill_context(const StepPlan& plan) {
  context_.segments.clear();
  for (const PlanSegment& s : plan.segments) {
    context_.segments.push_back({.row_begin = s.row_begin,
                                 .num_rows = s.num_rows,
                                 .position_begin = s.position_begin,
                                 .blocks = plan.block_ids.data() + s.blocks_begin,
                                 .num_blocks = s.num_blocks});
  }
  context_.writes.clear();
  for (std::size_t row = 0; row < plan.slots.size(); ++row) {
    context_.writes.push_back({static_cast<std::int64_t>(row), plan.slots[row]});
  }
}

// logits: f32 [logit_rows, vocab], contiguous. Draws with consecutive rows go to the kernel in one
// call; the n samples of a prompt draw from one row, each in a call of its own.
void Runner::sample(const StepPlan& plan, const at::Tensor& logits,
                    std::span<SampledToken> sampled) {
  assert(logits.is_contiguous());
  const std::int64_t vocab = logits.size(1);
  const float* values = logits.const_data_ptr<float>();
  const std::size_t count = plan.draws.size();
  rows_.clear();
  for (const PlanDraw& d : plan.draws) {
    rows_.push_back({.temperature = d.temperature,
                     .seed = d.seed,
                     .sample_id = d.sample_id,
                     .position = d.position,
                     .evaluation = d.evaluation});
  }
  tokens_.resize(count);
  log_probs_.resize(count);
  for (std::size_t begin = 0; begin < count;) {
    const std::int64_t first = plan.draws[begin].logits_index;
    std::size_t end = begin + 1;
    while (end < count &&
           plan.draws[end].logits_index == first + static_cast<std::int64_t>(end - begin)) {
      ++end;
    }
    kernels().sample(values + first * vocab, static_cast<std::int64_t>(end - begin), vocab,
                     &rows_[begin], &tokens_[begin], &log_probs_[begin]);
    begin = end;
  }
  for (std::size_t i = 0; i < count; ++i) sampled[i] = {tokens_[i], log_probs_[i]};
}

}  // namespace tandem
