// Between a Hugging Face folder and a rank's weights: the arena (compute copy) and the flat f32
// vector of master weights. Each rank reads just the rows that it holds.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/hf_folder.h"
#include "model/arena.h"

namespace tandem {

// Fills every entry of the arena from the folder.
void load_arena(const HfFolder& folder, Arena& arena);

// Elements [begin, end) of the flat vector of `layout`, in f32: part by part, each with the index
// of its first element.
void load_flat(const HfFolder& folder, const ArenaLayout& layout, std::int64_t begin,
               std::int64_t end,
               const std::function<void(std::int64_t, std::span<const float>)>& take);

// Writes the model folder `target` from the whole flat vector (no tensor parallelism), in the
// dtype that the source folder's config.json names (bf16 where it names none).
void save_flat(const std::string& target, const std::string& source, const ModelConfig& config,
               const ArenaLayout& layout, std::span<const float> flat);

// A run of elements of one Hugging Face tensor that lies in [begin, end) of the flat vector.
struct FlatPiece {
  const ArenaEntry* entry;    // its hf_name and hf_shape are the tensor's
  std::int64_t offset = 0;    // first element in the whole tensor, row-major
  std::int64_t begin = 0;     // in the flat vector
  std::int64_t elements = 0;  // never 0
};

// The pieces of a flat range, in the order of the table. Every element of the range is in one.
std::vector<FlatPiece> flat_pieces(const ArenaLayout& layout, std::int64_t begin, std::int64_t end);

}  // namespace tandem
