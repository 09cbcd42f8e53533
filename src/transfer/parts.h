// Weights on a byte stream, the same for every way that sends: rows of entries in parts small
// enough to be added up, sent, received and written while they lie in the processor's cache. Both
// ends cut alike, from the plan alone.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/streams.h"
#include "transfer/transfer.h"

namespace tandem {

struct StreamPart {
  Piece piece;  // of a source's entry
  std::int64_t bytes = 0;
  std::vector<const TransferBox*> boxes;  // that need rows of it
};

// Appends the parts of a piece, whole panels where it can be, each of at most `limit` bytes or one
// panel.
void add_parts(std::vector<StreamPart>& parts, const ArenaLayout& layout, const Piece& whole,
               const std::vector<const TransferBox*>& boxes, std::int64_t limit);
// What is best, and at most a bucket.
std::int64_t part_limit(const TransferSetup& setup);

// The streams of one way to move weights that this process has an end of.
class PartStreams {
 public:
  // setup must outlive it.
  explicit PartStreams(const TransferSetup& setup);
  ~PartStreams();
  PartStreams(const PartStreams&) = delete;
  PartStreams& operator=(const PartStreams&) = delete;

  // Parts of this process's trainer weights to a peer.
  void send(ByteStreams::Route to, std::vector<StreamPart> parts);
  // Parts of the plan's source `source` from a peer into this process's target; all of them also
  // on to another peer, if there is one.
  void receive(ByteStreams::Route from, std::int64_t source, std::vector<StreamPart> parts,
               std::optional<ByteStreams::Route> onward = {});
  // Once, after the last of those: connects with the peers, which do the same.
  void open(const std::string& name);

  // All streams once. Adds the sums of what was sent and of what was written; returns the bytes
  // that were written. Error naming the peer.
  std::int64_t run(std::span<RowsSum> sums);

 private:
  class Outlet;  // the end in the process that holds the weights
  class Inlet;   // the end in a process that takes them

  const TransferSetup& setup_;
  std::vector<std::unique_ptr<Outlet>> outlets_;
  std::vector<std::unique_ptr<Inlet>> inlets_;
  std::vector<ByteStreams::Route> to_, from_;
  std::vector<ByteStreams::Source> sends_;
  std::vector<ByteStreams::Sink> receives_;
  std::optional<ByteStreams> streams_;  // empty: no streams here
};

}  // namespace tandem
