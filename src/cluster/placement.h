// Which process of a run does what: the map that the driver draws before anything starts and that
// every rank is given whole, so that each knows its peers. A rank holds a trainer shard, a part of
// an engine, or both (colocated). Invariants: ranks are numbered 0..n-1; trainer ranks 0..T-1 and,
// inside each engine, its ranks 0..width-1 occur exactly once, in the order of ranks; rank 0 is
// trainer rank 0.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"

namespace tandem {

struct RankRole {
  int rank = 0;
  int node = 0;
  int trainer_rank = -1;  // -1: no trainer here
  int engine = -1;        // -1: no engine here
  int engine_rank = -1;   // within the engine (tensor parallel)
  int engine_width = 0;   // ranks of that engine

  bool trains() const { return trainer_rank >= 0; }
  bool serves() const { return engine >= 0; }
  bool leads_engine() const { return engine_rank == 0; }
};

struct Placement {
  std::vector<RankRole> ranks;
  int num_trainers = 0;  // trainer ranks
  int num_engines = 0;

  // Ranks that hold a part of any engine, in order of (engine, engine_rank).
  std::vector<int> engine_ranks() const;
  std::vector<int> trainer_ranks() const;  // in order of trainer_rank
  // A trainer and an engine of one rank, for every engine rank.
  bool all_colocated() const;
  std::string describe() const;  // one line a rank
};

// What one rank is told beside the config.
struct RankAssignment {
  int rank = 0;
  Placement placement;
  std::string store_host;  // of the run's key-value store; empty: one rank alone needs none
  int store_port = 0;

  const RankRole& role() const { return placement.ranks.at(static_cast<std::size_t>(rank)); }
};

Json to_json(const RankAssignment& assignment);
// Error naming the field if the text is no assignment.
RankAssignment assignment_from_json(const Json& json);

}  // namespace tandem
