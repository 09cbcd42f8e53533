// How a model's compute weights are cut over ranks that all compute with the whole model (ZeRO
// stage 3, Rajbhandari et al. 2020; FSDP's full shard). Each rank keeps a consecutive part of the
// flat vector: whole panels of matrices and whole vectors, so that its bytes are those of the whole
// arena and go from rank to rank as they are. A part is an arena of its own, with entries that hold
// fewer rows; plan, loading and saving need know no more.
//
// The layers that are not kept pass through slots: layer l through slot l % num_slots, so a layer's
// weights have one address, neighbours never share memory, and slots + 1 layers are never there at
// once. What is no layer (embedding, last norm, head) is needed at both ends of every pass and has
// memory of its own.
#pragma once

#include <cstdint>
#include <vector>

#include "model/arena.h"

namespace tandem {

// Elements [begin, end) of the flat vector.
struct FlatRange {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
};

// What each rank keeps, in order and as even as whole panels allow; may be empty.
std::vector<FlatRange> shard_ranges(const ArenaLayout& whole, std::int64_t num_ranks);
// The table of one of those ranges. Its own flat vector is the range, counted from 0.
ArenaLayout make_shard_layout(const ArenaLayout& whole, FlatRange range);
// The table of the whole model with layers in slots: all but offset_bytes and bytes are whole's.
ArenaLayout make_slot_layout(const ArenaLayout& whole, std::int64_t num_slots);

}  // namespace tandem
