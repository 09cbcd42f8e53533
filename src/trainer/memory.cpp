// See memory.h. Counts what autograd keeps per layer and row in Model::run_layer: the inputs of the
// four products, both residuals, q, k and v, the attention's result, gate and up.
#include "trainer/memory.h"

#include <algorithm>
#include <bit>
#include <map>

#include "model/parameters.h"
#include "ops/cuda/workspace.h"

namespace tandem {
namespace {
constexpr std::int64_t kHeadElements = std::int64_t{16} << 20;  // f32 logits at a time

// Elements that a rank holds of weights which are sharded over num_ranks: its part, what is no
// layer's, and the slots of layers.
std::int64_t sharded_elements(const ModelConfig& model, std::int64_t elements,
                              std::int64_t num_ranks) {
  std::map<std::int64_t, std::int64_t> layers;
  std::int64_t rest = 0, largest = 0;
  for (const ModelWeight& weight : model_weights(model)) {
    const auto layer = layer_of(weight.name);
    for (const WeightPart& part : weight.parts)
      (layer ? layers[*layer] : rest) += part.rows * weight.cols;
  }
  for (const auto& [layer, size] : layers) largest = std::max(largest, size);
  return (elements + num_ranks - 1) / num_ranks + rest +
         std::min(kLayerSlots, std::ssize(layers)) * largest;
}

// Of one layer's backward on a GPU in bf16: what it adds up in, keys and values where they are
// gathered, and their gradients. keys: if every sample's prompt stands in the micro-batch once, and
// counts once as keys for each sample; then at most the limit of what takes most, cuDNN's.
std::int64_t attention_bytes(const ModelConfig& model, std::int64_t rows, std::int64_t keys) {
  const AttentionShape shape{
      .num_heads = model.num_heads, .num_kv_heads = model.num_kv_heads, .head_dim = model.head_dim};
  const std::int64_t accumulators =
      std::max(std::min(kMaxCudnnWorkspace, cudnn_workspace(shape, rows, keys)),
               flash_workspace(shape, rows, rows));
  return accumulators + 2 * 4 * keys * model.num_kv_heads * model.head_dim;
}
}  // namespace

TrainerMemory estimate_trainer_memory(const ModelConfig& model, const TrainConfig& train,
                                      const TrainerLoad& load) {
  const std::int64_t leaves = (train.gradient_leaves + load.num_ranks - 1) / load.num_ranks;
  // A binary counter of sums and the leaf that is being added up; leaves that are no whole subtree
  // leave one sum more.
  const bool whole = std::has_single_bit(static_cast<std::uint64_t>(load.num_ranks));
  const std::int64_t buffers = std::bit_width(static_cast<std::uint64_t>(leaves)) + (whole ? 0 : 1);
  const std::int64_t leaf_samples =
      (load.samples + train.gradient_leaves - 1) / train.gradient_leaves;
  const std::int64_t rows = std::max(
      load.sample_tokens, std::min(train.max_tokens_per_gpu, leaf_samples * load.sample_tokens));
  const std::int64_t kept = 4 * model.hidden_size + 2 * model.q_rows() + 2 * model.kv_rows() +
                            3 * model.intermediate_size;
  // Backward holds the gradients of one layer's widest tensors and of the residual beside them.
  const std::int64_t passing = 2 * model.hidden_size + 3 * model.intermediate_size;
  const std::int64_t logits = std::min<std::int64_t>(rows * model.vocab_size, kHeadElements);
  const std::int64_t keys =
      load.shares_prompts ? std::max(rows, leaf_samples * load.sample_tokens) : rows;
  const std::int64_t attention =
      load.on_gpu && load.element_bytes == 2 ? attention_bytes(model, rows, keys) : 0;
  const bool sharded = train.fsdp_reshard_after_forward && load.num_ranks > 1;
  return {.weight_bytes = load.element_bytes *
                          (sharded ? sharded_elements(model, load.flat_elements, load.num_ranks)
                                   : load.flat_elements),
          .optimizer_bytes = 12 * ((load.flat_elements + load.num_ranks - 1) / load.num_ranks),
          .gradient_bytes = 4 * load.flat_elements * buffers,
          .activation_bytes = rows * load.element_bytes * (kept * model.num_layers + passing) +
                              4 * logits + attention};
}

}  // namespace tandem
