// Between a Hugging Face folder and a rank's weights: the arena (compute copy) and the flat f32
// vector of master weights. Each rank reads just the rows that it holds.
#pragma once

#include <functional>
#include <span>
#include <string>

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

}  // namespace tandem
