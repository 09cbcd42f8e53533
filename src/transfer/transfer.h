// The seam of the ways by which new weights reach the engines, and what each of them is given.
//
// An update is a transaction over all ranks (transfer/update.h): announce version v → move → verify
// → swap at a step boundary, with cached KV of older weights dropped → serve v. A way does the
// second part only: after move() on every rank each target arena holds the rows that the plan gives
// it. Both ends of a way stand in one file.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "comm/group.h"
#include "comm/store.h"
#include "config/config.h"
#include "model/arena.h"
#include "transfer/pieces.h"
#include "transfer/plan.h"

namespace tandem {

// The whole run's plan and this process's part in it. Processes are ranks of the run.
struct TransferSetup {
  std::vector<ArenaLayout> source_layouts, target_layouts;
  std::vector<int> source_process, target_process;  // of each source and target of the plan
  TransferPlan plan;
  int process = 0;
  int num_processes = 1;
  const Arena* source = nullptr;  // this process's trainer weights; null: it trains nothing
  Arena* target = nullptr;        // where an update of its engine goes; null: it serves nothing
  const Arena* served = nullptr;  // what its engine reads: the target, or another until the swap
  Store* store = nullptr;         // may be null if all boxes stay inside their process
  GroupOptions group;
  std::int64_t bucket_bytes = 512 << 20;
  bool shared_memory = true;  // processes of one host read each other's weights from memory

  bool is_local(const TransferBox& b) const {
    return source_process[b.source_rank] == target_process[b.target_rank];
  }
  // Whether the target takes all columns of the source's rows.
  bool takes_whole_rows(const TransferBox& b) const {
    const ArenaLayout& from = source_layouts[b.source_rank];
    return from.storages[from.entries[b.source_entry].storage].cols == b.row_elements;
  }
  // Whether a box is copied inside a GPU and compared there bit for bit; it has no sums then.
  bool copies_on_gpu(const TransferBox& b) const {
    return is_local(b) && !b.in_place && target && target->place() == Place::cuda &&
           takes_whole_rows(b);
  }
};

class Transfer {
 public:
  virtual ~Transfer() = default;
  // This process's part; all processes call it together. Returns the bytes written into its target.
  // Adds to sums[box], read back from the target right after the write, while it is in cache, the
  // checksum of each box that it wrote (of one that copies_on_gpu: 0, or something else if the
  // target differs). Error naming the peer; the target then holds rows of both versions.
  virtual std::int64_t move(std::span<RowsSum> sums) = 0;
  // Whether move() also adds the checksum of a box that this process sends, while it is under way;
  // else the caller adds it up before.
  virtual bool sums_what_it_sends(const TransferBox&) const { return false; }
};

// Copies inside each process, and none where trainer and engine share an arena. The setup outlives
// every way.
std::unique_ptr<Transfer> make_colocate_transfer(const TransferSetup& setup);
// Each owner's weights to all engine processes at once.
std::unique_ptr<Transfer> make_broadcast_transfer(const TransferSetup& setup);
// Each engine process gets the bytes that it needs from the process that owns them.
std::unique_ptr<Transfer> make_p2p_transfer(const TransferSetup& setup);
// A way that fails in its third move as --debug-break-update says, for tests of what follows.
std::unique_ptr<Transfer> make_broken_transfer(const TransferSetup& setup,
                                               std::unique_ptr<Transfer> whole, BrokenUpdate how);
// Either of the two between GPUs (link.cpp).
enum class LinkMode { broadcast, p2p };
std::unique_ptr<Transfer> make_link_transfer(const TransferSetup& setup, LinkMode mode);

}  // namespace tandem
