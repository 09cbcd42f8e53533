// Every weight of the model, told once: the storages that the kernels read, in the order of the
// forward pass, and the Hugging Face tensors (or rows of them) that each consists of. The arena's
// table and the list of tensors that a folder must hold both follow from it, so they cannot differ.
// No torch here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/hf_config.h"

namespace tandem {

enum class WeightKind : std::uint8_t {
  matrix,  // [rows of all parts, cols], cut by rows over tensor-parallel ranks part by part
  bias,    // the rows of a matrix's bias, cut like them
  vector,  // [cols], whole on every rank
};

// Rows [hf_row, hf_row + rows) of a Hugging Face tensor of hf_rows rows.
struct WeightPart {
  std::string hf_name;
  std::int64_t rows = 0;
  std::int64_t hf_row = 0;
  std::int64_t hf_rows = 0;
  // Rows of one key/value head; 0 in all other parts. Heads fewer than tensor-parallel ranks are
  // not cut: several ranks hold the same one.
  std::int64_t kv_head_rows = 0;
};

struct ModelWeight {
  std::string name;  // "layers.3.qkv"
  WeightKind kind = WeightKind::matrix;
  std::int64_t cols = 0;  // 1 for a bias
  std::vector<WeightPart> parts;
  // A matrix whose input is cut over ranks already (by heads, by the MLP's width), or its bias.
  bool after_cut = false;
};

// How tensor parallelism cuts matrices. exact: all by output rows, with their inputs gathered, so
// that no sum is cut. row_parallel (Shoeybi et al. 2019): those after a cut by input columns, so
// that their inputs stay where they are and the ranks' results are added up; their biases are whole
// on every rank.
enum class ShardRule : std::uint8_t { exact, row_parallel };

// What each of num_ranks tensor-parallel ranks holds of a weight: its columns, and rows of a part.
std::int64_t cols_of_rank(const ModelWeight& weight, std::int64_t num_ranks, ShardRule rule);
std::int64_t rows_of_rank(const ModelWeight& weight, const WeightPart& part, std::int64_t num_ranks,
                          ShardRule rule);

// 3 of "layers.3.qkv"; empty for what is no layer's.
std::optional<std::int64_t> layer_of(std::string_view weight_name);
// Slots that layers pass through where weights are sharded (layer_gather.h): of the layer that runs
// and of the next one.
inline constexpr std::int64_t kLayerSlots = 2;

// Shape of the whole Hugging Face tensor that a part belongs to.
std::vector<std::int64_t> hf_shape(const ModelWeight& weight, const WeightPart& part);

// Tied heads have no weight of their own.
std::vector<ModelWeight> model_weights(const ModelConfig& config);

// Why the model cannot be served by so many tensor-parallel ranks, and how many could; empty: it
// can. Every rank needs as many query heads and rows (columns) of each matrix that is cut as the
// others, and key/value heads of its own or, if there are fewer than ranks, one that it shares with
// as many ranks as the others.
std::string tensor_parallel_fault(const ModelConfig& config, std::int64_t num_ranks,
                                  ShardRule rule = ShardRule::exact);

// A tensor that the family's weight files hold.
struct ExpectedTensor {
  std::string name;  // Hugging Face name
  std::vector<std::int64_t> shape;
  // Not empty: the tensor may be absent, and if present must equal this one (a tied head).
  std::string copy_of;
};

// All tensors of the model in the order of model_weights().
std::vector<ExpectedTensor> expected_tensors(const ModelConfig& config);

// True for buffers that older files carry and every reader computes (…rotary_emb.inv_freq).
bool is_recomputable_buffer(std::string_view name);
// True for tensors of layers that the family's files may hold after the last one.
bool is_extra_layer(const ModelConfig& config, std::string_view name);

}  // namespace tandem
