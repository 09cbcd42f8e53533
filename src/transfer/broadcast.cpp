// Broadcast: each owner sends its weights once, to all engine processes, which keep what is theirs.
// No process gathers the model. Inside a host the targets read the owner's memory instead, all at
// the same time.
#include <algorithm>
#include <map>
#include <set>

#include "base/check.h"
#include "transfer/local_copy.h"
#include "transfer/pieces.h"

namespace tandem {
namespace {

// What one owner sends: its entries in buckets, the same for every receiver.
struct Stream {
  std::int64_t source = 0;  // index into the plan's sources
  std::vector<std::vector<Piece>> buckets;
  Group group = Group::alone("transfer");
  int root = 0;
};

class BroadcastTransfer final : public Transfer {
 public:
  explicit BroadcastTransfer(const TransferSetup& setup) : setup_(setup), copies_(setup) {
    std::map<std::int64_t, std::set<std::int64_t>> entries;  // of each source, that are sent
    std::map<std::int64_t, std::set<int>> members;           // processes of its group
    for (const TransferBox& box : setup.plan.boxes) {
      if (box.in_place || copies_.takes(box)) continue;
      entries[box.source_rank].insert(box.source_entry);
      members[box.source_rank].insert(setup.source_process[box.source_rank]);
      members[box.source_rank].insert(setup.target_process[box.target_rank]);
      if (setup.target_process[box.target_rank] == setup.process)
        wanted_[{box.source_rank, box.source_entry}].push_back(&box);
    }
    for (const auto& [source, sent] : entries) {
      const std::vector<int> group(members[source].begin(), members[source].end());
      const auto me = std::find(group.begin(), group.end(), setup.process);
      if (me == group.end()) continue;
      Stream stream{.source = source, .buckets = buckets_of(source, sent)};
      stream.root = static_cast<int>(
          std::find(group.begin(), group.end(), setup.source_process[source]) - group.begin());
      stream.group = Group::gloo(*setup.store, fmt::format("transfer/broadcast/{}", source),
                                 static_cast<int>(me - group.begin()),
                                 static_cast<int>(group.size()), setup.group);
      streams_.push_back(std::move(stream));
    }
  }

  std::int64_t move(std::span<RowsSum> sums) override {
    std::int64_t bytes = copies_.copy(sums);
    // All processes walk the streams in one order; a process that is not in one skips it.
    for (Stream& stream : streams_)
      for (const auto& bucket : stream.buckets) bytes += send(stream, bucket, sums);
    return bytes;
  }

 private:
  std::vector<std::vector<Piece>> buckets_of(std::int64_t source,
                                             const std::set<std::int64_t>& entries) const {
    const ArenaLayout& layout = setup_.source_layouts[source];
    std::vector<std::vector<Piece>> buckets;
    std::int64_t room = 0;
    for (std::int64_t e : entries) {
      const Piece piece{e, 0, layout.entries[e].rows};
      const std::int64_t bytes = piece_bytes(layout, piece);
      if (buckets.empty() || room < bytes) {
        buckets.emplace_back();
        room = std::min<std::int64_t>(setup_.bucket_bytes, 32 << 20);
      }
      buckets.back().push_back(piece);
      room -= bytes;
    }
    return buckets;
  }

  std::int64_t send(Stream& stream, const std::vector<Piece>& bucket, std::span<RowsSum> sums) {
    const ArenaLayout& layout = setup_.source_layouts[stream.source];
    std::int64_t size = 0;
    for (const Piece& p : bucket) size += piece_bytes(layout, p);
    if (buffer_.size() < static_cast<std::size_t>(size))
      buffer_.resize(static_cast<std::size_t>(size));
    const std::span<std::byte> bytes(buffer_.data(), static_cast<std::size_t>(size));
    const bool owner = setup_.source_process[stream.source] == setup_.process;
    if (owner) {
      std::byte* out = bytes.data();
      for (const Piece& p : bucket) {
        pack_piece(*setup_.source, p, out);
        out += piece_bytes(layout, p);
      }
    }
    stream.group.broadcast(bytes, stream.root);
    if (owner) return 0;
    const std::byte* in = bytes.data();
    for (const Piece& p : bucket) {
      if (const auto found = wanted_.find({stream.source, p.entry}); found != wanted_.end())
        for (const TransferBox* b : found->second) {
          sums[static_cast<std::size_t>(b - setup_.plan.boxes.data())] +=
              copy_rows(view_piece(layout, p, in), b->source_row, b->rows, *setup_.target,
                        b->target_entry, b->target_row);
        }
      in += piece_bytes(layout, p);
    }
    return size;
  }

  const TransferSetup& setup_;
  LocalCopies copies_;
  std::map<std::pair<std::int64_t, std::int64_t>, std::vector<const TransferBox*>> wanted_;
  std::vector<Stream> streams_;
  std::vector<std::byte> buffer_;
};

}  // namespace

std::unique_ptr<Transfer> make_broadcast_transfer(const TransferSetup& setup) {
  return std::make_unique<BroadcastTransfer>(setup);
}

}  // namespace tandem
