// The seam of the ways by which new weights reach an engine. An update is a transaction: announce
// version v → move → verify → swap at a step boundary, with cached KV of older weights dropped →
// serve v. Before the swap a failure leaves the old version serving.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "model/arena.h"
#include "transfer/plan.h"

namespace tandem {

// What the transaction does to the engine that receives the weights, on its compute thread.
struct EngineSide {
  std::function<std::int64_t()> version;   // that it serves now
  std::function<bool()> quiet;             // no sample holds KV of the old weights
  std::function<void(std::int64_t)> swap;  // drop cached KV, serve this version
};

struct UpdateReport {
  std::int64_t version = 0;
  std::int64_t total_bytes = 0, moved_bytes = 0;
  double announce_seconds = 0, move_seconds = 0, verify_seconds = 0, swap_seconds = 0;
};

class Transfer {
 public:
  virtual ~Transfer() = default;
  // Makes the engine serve `version`, which must be its own plus 1. Error: the engine still runs
  // samples, or verification fails; nothing was swapped. In place the trainer may have written by
  // then: the engine refuses to run until an update succeeds.
  virtual UpdateReport update(std::int64_t version) = 0;
};

// Trainer and engine of one process. One arena for both: nothing moves, the optimizer's write was
// the update. Two arenas: boxes are copied. Both must outlive the transfer.
std::unique_ptr<Transfer> make_colocate_transfer(const Arena& trainer, Arena& engine,
                                                 EngineSide engine_side);

}  // namespace tandem
