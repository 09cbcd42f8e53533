// A step on the model: see the header.
#include "engine/runner.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <cassert>

#include "ops/place.h"

namespace tandem {

Runner::Runner(Model& model, KvPool& pool, bool graphs) : model_(model) {
  context_.pool = &pool;
  if (graphs && model.place() == Place::cuda && model.can_be_captured())
    graphs_ = std::make_unique<DecodeGraphs>(model, pool);
}

void Runner::run(const StepPlan& plan, std::span<SampledToken> sampled) {
  assert(sampled.size() == plan.draws.size());
  if (start(plan, {})) return finish(sampled);
  const at::Tensor logits = forward(plan);
  if (!plan.draws.empty()) sample(plan, logits, sampled);
}

void Runner::follow(const StepPlan& plan) {
  if (start(plan, {})) return finish({});
  forward(plan);
}

at::Tensor Runner::forward(const StepPlan& plan) {
  const c10::InferenceMode no_gradients;
  for (const BlockCopy& copy : plan.copies) context_.pool->copy_block(copy.from, copy.to);
  fill_context(plan);
  const at::Tensor hidden = model_.forward(plan.tokens, plan.positions, context_);
  const at::Tensor logits =
      plan.logit_rows.empty() ? at::Tensor() : model_.logits(hidden, plan.logit_rows);
  model_.settle();
  return logits;
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

// logits: f32 [logit_rows, vocab], contiguous; the n samples of a prompt draw from one row.
void Runner::sample(const StepPlan& plan, const at::Tensor& logits,
                    std::span<SampledToken> sampled) {
  assert(logits.is_contiguous());
  rows_.clear();
  plain_.clear();
  for (std::size_t i = 0; i < plan.draws.size(); ++i) {
    const PlanDraw& d = plan.draws[i];
    if (!d.is_plain()) {
      sampled[i] = sample_changed(plan, d, logits[d.logits_index]);
      continue;
    }
    plain_.push_back(i);
    rows_.push_back({.row = d.logits_index,
                     .temperature = d.temperature,
                     .seed = d.seed,
                     .sample_id = d.sample_id,
                     .position = d.position,
                     .evaluation = d.evaluation});
  }
  if (rows_.empty()) return;
  tokens_.resize(rows_.size());
  log_probs_.resize(rows_.size());
  kernels(model_.place())
      .sample(logits.const_data_ptr<float>(), logits.size(1), rows_.data(),
              static_cast<std::int64_t>(rows_.size()), tokens_.data(), log_probs_.data());
  for (std::size_t i = 0; i < rows_.size(); ++i) sampled[plain_[i]] = {tokens_[i], log_probs_[i]};
}

// Drawn on the host from the changed logits; recorded is what the model's own logits say.
SampledToken Runner::sample_changed(const StepPlan& plan, const PlanDraw& draw,
                                    const at::Tensor& logits) {
  const at::Tensor host = logits.cpu();
  const TokenId token =
      sampler_.draw({host.const_data_ptr<float>(), static_cast<std::size_t>(host.numel())}, draw,
                    std::span(plan.changes)
                        .subspan(static_cast<std::size_t>(draw.changes_begin),
                                 static_cast<std::size_t>(draw.num_changes)));
  const at::Tensor ids = at::full({1}, token, logits.options().dtype(at::kInt));
  const at::Tensor log_prob = at::empty({1}, logits.options()), unused = at::empty_like(log_prob);
  kernels(model_.place())
      .log_softmax_gather(logits.const_data_ptr<float>(), ids.const_data_ptr<std::int32_t>(),
                          draw.temperature == 0 ? 1.0f : static_cast<float>(draw.temperature),
                          log_prob.data_ptr<float>(), unused.data_ptr<float>(), nullptr, 1,
                          logits.numel());
  return {token, log_prob.item<float>()};
}

}  // namespace tandem
