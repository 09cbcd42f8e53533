// Capturing and running the buckets' graphs.
#include "engine/decode_graph.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cassert>
#include <map>

#include "ops/place.h"

namespace tandem {
namespace {

constexpr std::int64_t kLargest = 512;

std::vector<std::int64_t> bucket_sizes() {
  std::vector<std::int64_t> sizes{1, 2, 4, 8};
  for (std::int64_t n = 16; n < 128; n += 16) sizes.push_back(n);
  for (std::int64_t n = 128; n <= kLargest; n += 32) sizes.push_back(n);
  return sizes;
}

}  // namespace

// What a graph reads, on the device and, pinned and in turns, on the host.
struct DecodeGraphs::Bucket {
  std::int64_t rows = 0;
  at::Tensor input, host_input[2];  // draws, tokens, positions, sources
  AttentionContext context;
  std::map<const void*, void*> graphs;  // by where the weights were at the capture

  ~Bucket() {
    for (const auto& [weights, graph] : graphs) cuda_part().free_graph(graph);
  }
  template <class T>
  static T* at_byte(const at::Tensor& t, std::int64_t byte) {
    return reinterpret_cast<T*>(t.data_ptr<std::uint8_t>() + byte);
  }
  std::int64_t tokens_at() const { return rows * static_cast<std::int64_t>(sizeof(SampleRow)); }
  std::int64_t positions_at() const { return tokens_at() + rows * 4; }
  std::int64_t sources_at() const { return positions_at() + rows * 4; }
  std::int64_t bytes() const { return sources_at() + rows * 4; }
};

DecodeGraphs::DecodeGraphs(Model& model, KvPool& pool) : model_(model), pool_(pool) {
  const auto device = at::dtype(at::kByte).device(device_of(Place::cuda));
  const auto pinned = at::dtype(at::kByte).pinned_memory(true);
  for (const std::int64_t rows : bucket_sizes()) {
    auto b = std::make_unique<Bucket>();
    b->rows = rows;
    b->input = at::empty({b->bytes()}, device);
    for (at::Tensor& host : b->host_input) host = at::empty({b->bytes()}, pinned);
    b->context.pool = &pool;
    buckets_.push_back(std::move(b));
  }
  output_ = at::empty({kLargest * 8}, device);
  for (Turn& turn : turns_) {
    turn.output = at::empty({kLargest * 8}, pinned);
    turn.mark = cuda_part().new_mark();
  }
}

DecodeGraphs::~DecodeGraphs() {
  for (const Turn& turn : turns_) cuda_part().free_mark(turn.mark);
}

std::int64_t DecodeGraphs::captured() const {
  std::size_t count = 0;
  for (const auto& b : buckets_) count += b->graphs.size();
  return static_cast<std::int64_t>(count);
}

DecodeGraphs::Bucket* DecodeGraphs::bucket_for(const StepPlan& plan) {
  const auto rows = static_cast<std::int64_t>(plan.tokens.size());
  const bool decode = rows > 0 && rows <= kLargest && plan.segments.size() == plan.tokens.size() &&
                      plan.draws.size() == plan.tokens.size() &&
                      plan.logit_rows.size() == plan.tokens.size() &&
                      std::all_of(plan.draws.begin(), plan.draws.end(),
                                  [](const PlanDraw& d) { return d.is_plain(); });
  if (!decode) return nullptr;
  return std::find_if(buckets_.begin(), buckets_.end(),
                      [&](const auto& b) { return b->rows >= rows; })
      ->get();
}

// Writes the step's input where the graph reads it.
void DecodeGraphs::fill(Bucket& b, const StepPlan& plan, std::span<const std::int32_t> sources) {
  const at::Tensor& host = b.host_input[started_ % 2];
  auto* draws = Bucket::at_byte<SampleRow>(host, 0);
  auto* tokens = Bucket::at_byte<std::int32_t>(host, b.tokens_at());
  auto* positions = Bucket::at_byte<std::int32_t>(host, b.positions_at());
  auto* source = Bucket::at_byte<std::int32_t>(host, b.sources_at());
  static_assert(sizeof(TokenId) == 4);
  const std::int32_t spare = pool_.spare_block();
  b.context.segments.clear();
  b.context.writes.clear();
  const auto rows = static_cast<std::int64_t>(plan.tokens.size());
  for (std::int64_t i = 0; i < b.rows; ++i) {
    const bool real = i < rows;
    tokens[i] = real ? plan.tokens[i] : 0;
    positions[i] = real ? plan.positions[i] : 0;
    source[i] = real && !sources.empty() ? sources[static_cast<std::size_t>(i)] : -1;
    draws[i] = {.row = i, .temperature = 0.0};
    if (real) {
      const PlanDraw& d = plan.draws[i];
      draws[i] = {.row = d.logits_index,
                  .temperature = d.temperature,
                  .seed = d.seed,
                  .sample_id = d.sample_id,
                  .position = d.position,
                  .evaluation = d.evaluation};
    }
    Segment s;
    s.row_begin = i;
    s.num_rows = 1;
    s.position_begin = positions[i];
    s.blocks = real ? plan.block_ids.data() + plan.segments[i].blocks_begin : &spare;
    s.num_blocks = real ? plan.segments[i].num_blocks : 1;
    b.context.segments.push_back(s);
    b.context.writes.push_back({i, real ? plan.slots[i] : spare * kBlockTokens});
  }
  b.input.copy_(host, /*non_blocking=*/true);
  if (!b.context.plan)
    b.context.plan.reset(cuda_part().reserve_plan(
        b.rows, b.rows * (model_.config().max_position_embeddings / kBlockTokens + 1)));
  cuda_part().update_plan(b.context.plan.get(), model_.element(), model_.attention_shape(),
                          {.segments = b.context.segments.data(),
                           .num_segments = b.rows,
                           .writes = b.context.writes.data(),
                           .num_writes = b.rows,
                           .rows = b.rows});
}

void DecodeGraphs::forward(Bucket& b) {
  const auto ids = at::dtype(at::kInt).device(b.input.device());
  const auto view = [&](std::int64_t byte) {
    return at::from_blob(b.input.data_ptr<std::uint8_t>() + byte, {b.rows}, ids);
  };
  cuda_part().feed_tokens(Bucket::at_byte<std::int32_t>(b.input, b.tokens_at()),
                          Bucket::at_byte<std::int32_t>(b.input, b.sources_at()),
                          Bucket::at_byte<std::int32_t>(output_, 0), b.rows);
  const at::Tensor z =
      model_.logits(model_.forward(view(b.tokens_at()), view(b.positions_at()), b.context));
  cuda_part().sample_on_device(
      z.data_ptr<float>(), z.size(1), Bucket::at_byte<SampleRow>(b.input, 0), b.rows,
      Bucket::at_byte<std::int32_t>(output_, 0), Bucket::at_byte<float>(output_, kLargest * 4));
}

void* DecodeGraphs::capture(Bucket& b) {
  forward(b);  // once for real: libraries set themselves up, which a capture must not see
  model_.settle();
  cuda_part().synchronize();
  void* const graph = cuda_part().begin_graph();
  forward(b);
  cuda_part().end_graph(graph);
  return graph;
}

bool DecodeGraphs::start(const StepPlan& plan, std::span<const std::int32_t> sources) {
  assert(started_ - finished_ < 2);
  Bucket* b = bucket_for(plan);
  if (!b) return false;
  const c10::InferenceMode no_gradients;
  for (const BlockCopy& copy : plan.copies) pool_.copy_block(copy.from, copy.to);
  fill(*b, plan, sources);
  // An update that swaps two arenas has a graph over each.
  void*& graph = b->graphs[model_.head().data];
  if (!graph) graph = capture(*b);
  cuda_part().run_graph(graph);
  const Turn& turn = turns_[started_++ % 2];
  turn.output.copy_(output_, /*non_blocking=*/true);
  cuda_part().set_mark(turn.mark);
  return true;
}

void DecodeGraphs::finish(std::span<SampledToken> sampled) {
  assert(finished_ < started_);
  const Turn& turn = turns_[finished_++ % 2];
  model_.settle();
  cuda_part().wait_for_mark(turn.mark);
  const auto* tokens = Bucket::at_byte<std::int32_t>(turn.output, 0);
  const auto* log_probs = Bucket::at_byte<float>(turn.output, kLargest * 4);
  for (std::size_t i = 0; i < sampled.size(); ++i) sampled[i] = {tokens[i], log_probs[i]};
}

}  // namespace tandem
