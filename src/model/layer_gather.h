// Weights that are sharded over ranks, made present layer by layer (FSDP's full shard). Each rank
// keeps its part of the model (model/shard.h); before a layer runs, forward or backward, the parts'
// owners send it into a slot, and while it runs the next one's weights are already on their way, on
// a thread and a group of their own. What a layer is computed with are the owners' very bytes, so
// results are those of a rank that holds everything.
//
// A gather is collective: all ranks make the same passes over the layers, told beforehand as the
// order in which layers are needed. A rank that has nothing to compute in a pass takes part in its
// gathers all the same (end_pass).
#pragma once

#include <cstddef>
#include <cstdint>
#include <future>
#include <utility>
#include <vector>

#include "base/work_thread.h"
#include "comm/group.h"
#include "model/arena.h"
#include "model/parameters.h"
#include "model/shard.h"

namespace tandem {

class LayerGather {
 public:
  // shard: of make_shard_layout(whole, shard_ranges(whole, group.size())[group.rank()]). The shard
  // and the group, which nobody else uses, must outlive it.
  LayerGather(const ArenaLayout& whole, const Arena& shard, Group& group,
              std::int64_t num_slots = kLayerSlots);

  // What a Model reads: whole's table with layers in slots.
  Arena& arena() { return arena_; }
  const Arena& shard() const { return shard_; }
  const std::vector<FlatRange>& ranges() const { return ranges_; }  // of the ranks

  // The passes that come, each with the layers in the order in which they are needed; equal on all
  // ranks. Weights that the shards got since the last call (Arena::version) are fetched first.
  void begin(const std::vector<std::vector<std::int64_t>>& passes);
  // On return the layer's weights are there, until another layer is needed. Needed layers follow
  // the passes; the present one may be needed again. Error of the group if a peer is gone.
  void need(std::int64_t layer);
  // The rest of the present pass without computing. Once for each pass.
  void end_pass();
  // Seconds that this rank waited for weights, in begin and need, since the last call.
  double take_wait_seconds() { return std::exchange(wait_seconds_, 0.0); }

 private:
  // Consecutive bytes of the arena that one rank owns, padding between storages included.
  struct Stretch {
    int owner = 0;
    std::int64_t begin = 0, end = 0;
  };
  // What this rank has of them in its shard.
  struct Copy {
    std::int64_t from = 0, to = 0, bytes = 0;
  };
  struct Unit {
    std::vector<Stretch> stretches;
    std::vector<Copy> copies;
  };
  struct Visit {
    std::int64_t layer = 0;
    std::int64_t gather = -1;  // index into gathers_; -1: the layer is still in its slot
  };
  struct Gather {
    std::int64_t layer = 0;
    std::int64_t after = -1;  // the last visit before it that reads its slot
    std::future<void> done;
  };
  void add(Unit& unit, const ArenaStorage& slot, const ArenaStorage& whole);
  void fetch(const Unit& unit);
  std::future<void> start(const Unit& unit);
  void wait_for(std::future<void>& done);
  void advance();

  const Arena& shard_;
  Group& group_;
  std::int64_t num_slots_;
  std::vector<FlatRange> ranges_;
  Arena arena_;
  std::vector<Unit> layers_;
  std::vector<Unit> rest_;          // what is no layer's
  std::vector<std::int64_t> held_;  // of each slot: its layer once all gathers are done; -1: none
  std::vector<Visit> visits_;
  std::vector<std::int64_t> pass_ends_;  // last visit of each pass
  std::vector<Gather> gathers_;
  std::int64_t visit_ = -1;
  std::size_t pass_ = 0, started_ = 0;
  double wait_seconds_ = 0;
  WorkThread thread_;  // last: its jobs read the rest
};

}  // namespace tandem
