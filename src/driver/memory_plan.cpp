// See memory_plan.h.
#include "driver/memory_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"
#include "model/parameters.h"
#include "trainer/memory.h"

namespace tandem {
namespace {

// libtorch and the rest, resident once kernels have run (measured; a GPU's context comes on top).
constexpr std::int64_t kProgramBytes = std::int64_t{220} << 20;

std::int64_t parameters(const ModelConfig& model) {
  std::int64_t elements = 0;
  for (const ExpectedTensor& tensor : expected_tensors(model)) {
    std::int64_t count = tensor.copy_of.empty() ? 1 : 0;
    for (const std::int64_t size : tensor.shape) count *= size;
    elements += count;
  }
  return elements;
}

// Of one rank's part of an engine; key/value heads fewer than ranks are on several of them.
std::int64_t engine_part(const ModelConfig& model, std::int64_t width, ShardRule rule) {
  std::int64_t elements = 0;
  for (const ModelWeight& weight : model_weights(model))
    for (const WeightPart& part : weight.parts)
      elements += rows_of_rank(weight, part, width, rule) * cols_of_rank(weight, width, rule);
  return elements;
}

std::string cell(std::int64_t bytes) {
  return bytes == 0 ? "-" : human_bytes(static_cast<double>(bytes));
}

}  // namespace

std::vector<RankMemory> plan_memory(const Config& config, const ModelConfig& model,
                                    const Placement& placement, std::int64_t sample_tokens) {
  const std::int64_t element = config.model.dtype == ComputeDtype::float32 ? 4 : 2;
  const std::int64_t elements = parameters(model);
  const ShardRule rule = config.compute.is_exact() ? ShardRule::exact : ShardRule::row_parallel;
  const bool doubled = config.transfer.update_weight_double_buffer;
  const TrainerMemory trainer = estimate_trainer_memory(
      model, config.train,
      {.flat_elements = elements,
       .num_ranks = placement.num_trainers,
       .element_bytes = element,
       .samples = config.train.global_batch_size.value_or(1),
       .sample_tokens = sample_tokens,
       .on_gpu = config.compute.device == Device::cuda,
       .shares_prompts = config.train.share_prompt && config.rollout.n_samples_per_prompt > 1});
  std::vector<RankMemory> ranks;
  for (const RankRole& role : placement.ranks) {
    RankMemory memory{.program_bytes = kProgramBytes};
    if (role.trains()) {
      // The reference is taken to be of the model's size.
      memory.weight_bytes += trainer.weight_bytes * (config.algorithm.uses_reference() ? 2 : 1);
      memory.optimizer_bytes = trainer.optimizer_bytes;
      if (!config.debug.debug_rollout_only) {
        memory.gradient_bytes = trainer.gradient_bytes;
        memory.activation_bytes = trainer.activation_bytes;
      }
    }
    if (role.serves()) {
      const std::int64_t part = element * engine_part(model, role.engine_width, rule);
      const bool shares = role.trains() && role.engine_width == 1 && !doubled;
      memory.weight_bytes += shares ? 0 : part * (doubled ? 2 : 1);
      memory.kv_bytes = config.engine.kv_cache_tokens.value_or(0) * model.num_layers * 2 * element *
                        std::max(model.kv_rows() / role.engine_width, model.head_dim);
    }
    ranks.push_back(memory);
  }
  return ranks;
}

std::string memory_table(const std::vector<RankMemory>& ranks) {
  constexpr const char* kRow = "{:>6}{:>12}{:>12}{:>12}{:>12}{:>12}{:>13}{:>12}{:>12}\n";
  std::string text = fmt::format(fmt::runtime(kRow), "rank", "program", "weights", "KV cache",
                                 "optimizer", "gradients", "activations", "= rollout", "= train");
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const RankMemory& r = ranks[i];
    text += fmt::format(fmt::runtime(kRow), i, cell(r.program_bytes), cell(r.weight_bytes),
                        cell(r.kv_bytes), cell(r.optimizer_bytes), cell(r.gradient_bytes),
                        cell(r.activation_bytes), cell(r.rollout_bytes()), cell(r.train_bytes()));
  }
  return text;
}

}  // namespace tandem
