// The weight update as a transaction. Each rank holds a WeightUpdate, its part: move(v) checks that
// v follows what it serves and that its engine holds no KV in use, moves the rows and adds up the
// checksums of what it sent and received; swap(v) makes the engine serve them. The driver
// (transfer/client.h) calls move on all ranks together, compares both ends of every box, and only
// then calls swap on all.
//
// With two engine arenas (--update-weight-double-buffer) the engine may run on the old version
// while rows move into the other one, and must rest for the swap only; so move() may then be called
// from another thread than swap(), one after the other. On a failure before the swap nothing was
// overwritten and the old version goes on serving. With one arena the engine rests for both, and
// after a failure refuses to run until an update succeeds. Trainer weights are never touched.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transfer/pieces.h"
#include "transfer/transfer.h"

namespace tandem {

// What the transaction does to the engine of its process, on the compute thread; version and
// tokens_sampled on any.
struct EngineSide {
  std::function<std::int64_t()> version;  // that it serves now
  std::function<bool()> quiet;            // no sample holds KV of the old weights
  // The weights that it serves are about to be written; may be empty.
  std::function<void()> overwrite;
  std::function<void(std::int64_t)> swap;             // drop cached KV, serve this version
  bool moves_aside = false;                           // what it serves stays whole during a move
  std::function<std::int64_t()> tokens_sampled = {};  // so far; empty: another rank counts
};

// The checksum of one box at one end.
struct BoxSum {
  std::int64_t box = 0;  // index into the plan
  std::string tensor;
  RowsSum sum;
};

struct MoveReport {
  std::int64_t version = 0;
  std::int64_t total_bytes = 0;     // of weights that this process's engine holds
  std::int64_t moved_bytes = 0;     // that were written for it
  std::int64_t decoded_tokens = 0;  // that its engine sampled meanwhile
  // move: its target's checksums included; verify: those of what it sends, which others' moves
  // overlap
  double announce_seconds = 0, move_seconds = 0, verify_seconds = 0;
  std::vector<BoxSum> sent, received;
};

// --check-weight-update-equal: the checksum of each box of the plan, in place or not, as the
// trainer's master weights give it, and of what the engine serves.
struct CheckReport {
  std::optional<std::int64_t> version;  // that the engine serves; empty: no engine here
  std::vector<BoxSum> fresh, served;
};

class WeightUpdate {
 public:
  // `setup` must outlive it; engine: empty on a rank that serves nothing.
  WeightUpdate(const TransferSetup& setup, std::unique_ptr<Transfer> transfer,
               std::optional<EngineSide> engine);

  // Error if `version` does not follow the served one or the engine runs samples on what would be
  // overwritten: nothing has moved then.
  MoveReport move(std::int64_t version);
  // Error unless move(version) was the last call and the engine rests.
  void swap(std::int64_t version);
  // flat: the master weights in the source arena's flat order; empty on a rank that trains nothing.
  CheckReport check(std::span<const float> flat) const;

 private:
  const std::string& tensor_of(const TransferBox& box) const;
  void check_quiet() const;

  const TransferSetup& setup_;
  std::unique_ptr<Transfer> transfer_;
  std::optional<EngineSide> engine_;
  std::int64_t staged_ = -1;       // version that was moved and not swapped
  std::int64_t target_bytes_ = 0;  // of this process's engine weights
};

}  // namespace tandem
