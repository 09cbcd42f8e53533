// See memory.h. Counts what autograd keeps per layer and row in Model::run_layer: the inputs of the
// four products, both residuals, q, k and v, the attention's result, gate and up.
#include "trainer/memory.h"

#include <algorithm>
#include <bit>

namespace tandem {
namespace {
constexpr std::int64_t kHeadElements = std::int64_t{16} << 20;  // f32 logits at a time
}

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
  return {.optimizer_bytes = 12 * ((load.flat_elements + load.num_ranks - 1) / load.num_ranks),
          .gradient_bytes = 4 * load.flat_elements * buffers,
          .activation_bytes =
              rows * load.element_bytes * (kept * model.num_layers + passing) + 4 * logits};
}

}  // namespace tandem
