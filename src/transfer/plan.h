// What must move so that an engine's arenas hold the trainer's weights: a pure function from two
// layouts to a list of boxes. Every way of moving (in place, broadcast, p2p, disk) executes the
// same plan.
//
// A box is a range of rows of one Hugging Face tensor, whole or some of its columns: where it lies
// at its source and where at its target, which holds nothing else of these rows. Which source
// serves a row that several hold is fixed: the target's own process if it holds it, else they take
// turns by entry, so that every owner sends its share. Invariant: every row of every target entry
// is covered exactly once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/arena.h"

namespace tandem {

struct TransferBox {
  std::int64_t source_rank = 0, target_rank = 0;    // indices into the layouts given
  std::int64_t source_entry = 0, target_entry = 0;  // indices into their entries
  std::int64_t source_row = 0, target_row = 0;      // local to the entries
  std::int64_t rows = 0;
  std::int64_t source_col = 0;    // where the target's columns begin in the source's rows
  std::int64_t row_elements = 0;  // columns of the target
  bool in_place = false;          // source and target are the same memory
};

struct TransferPlan {
  std::vector<TransferBox> boxes;
  std::int64_t total_bytes = 0;  // that the targets hold
  std::int64_t moved_bytes = 0;  // that are not in place
};

// A rank's side of a plan: its layout and the process that it lives in (equal on both sides for
// ranks that share one arena).
struct TransferSide {
  const ArenaLayout* layout = nullptr;
  std::int64_t process = 0;
  bool shares_arena = false;  // with the other side's rank of the same process
};

// Error naming the tensor if a target needs one that no source has whole, if shapes differ, or if a
// source has one that no target takes.
TransferPlan make_transfer_plan(const std::vector<TransferSide>& sources,
                                const std::vector<TransferSide>& targets);

}  // namespace tandem
