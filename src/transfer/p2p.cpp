// Point to point: every engine process gets exactly the rows that it holds, from the process that
// the plan names. Inside a host the target reads them from the owner's memory; between hosts each
// pair exchanges buckets, all pairs at once, and nobody receives a byte that it does not keep.
#include <algorithm>
#include <map>

#include "base/check.h"
#include "transfer/local_copy.h"
#include "transfer/pieces.h"

namespace tandem {
namespace {

struct Message {
  int peer = 0;
  std::vector<const TransferBox*> boxes;  // packed one after the other, in plan order
  std::vector<std::byte> bytes;
};

class P2pTransfer final : public Transfer {
 public:
  explicit P2pTransfer(const TransferSetup& setup)
      : setup_(setup), copies_(setup), group_(Group::alone("transfer")) {
    bool sends = false;  // any process, so that all of them build the group or none
    std::map<int, Route> outgoing, incoming;
    for (const TransferBox& box : setup.plan.boxes) {
      if (box.in_place || copies_.takes(box)) continue;
      sends = true;
      const int from = setup.source_process[box.source_rank];
      const int to = setup.target_process[box.target_rank];
      if (from == setup.process) add(outgoing[to], to, box);
      if (to == setup.process) add(incoming[from], from, box);
    }
    for (auto& [peer, route] : outgoing) outgoing_.push_back(std::move(route.messages));
    for (auto& [peer, route] : incoming) incoming_.push_back(std::move(route.messages));
    if (sends)
      group_ = Group::gloo(*setup.store, "transfer/p2p", setup.process, setup.num_processes,
                           setup.group);
  }

  std::int64_t move() override {
    std::int64_t bytes = copies_.copy();
    std::size_t rounds = 0;
    for (const auto& route : outgoing_) rounds = std::max(rounds, route.size());
    for (const auto& route : incoming_) rounds = std::max(rounds, route.size());
    for (std::size_t i = 0; i < rounds; ++i) bytes += exchange(i);
    return bytes;
  }

 private:
  struct Route {
    std::vector<Message> messages;
    std::int64_t room = 0;
  };

  Piece piece_of(const TransferBox& b) const { return {b.source_entry, b.source_row, b.rows}; }
  std::int64_t bytes_of(const TransferBox& b) const {
    return piece_bytes(setup_.source_layouts[b.source_rank], piece_of(b));
  }

  void add(Route& route, int peer, const TransferBox& box) {
    const std::int64_t bytes = bytes_of(box);
    if (route.messages.empty() || route.room < bytes) {
      route.messages.push_back({.peer = peer, .boxes = {}, .bytes = {}});
      route.room = setup_.bucket_bytes;
    }
    route.messages.back().boxes.push_back(&box);
    route.room -= bytes;
  }

  std::int64_t size_of(const Message& m) const {
    std::int64_t total = 0;
    for (const TransferBox* b : m.boxes) total += bytes_of(*b);
    return total;
  }

  // The i-th bucket of every route, all under way together.
  std::int64_t exchange(std::size_t i) {
    std::vector<Group::Send> sends;
    std::vector<Group::Receive> receives;
    for (auto& route : outgoing_)
      if (i < route.size()) {
        Message& m = route[i];
        m.bytes.resize(static_cast<std::size_t>(size_of(m)));
        std::byte* out = m.bytes.data();
        for (const TransferBox* b : m.boxes) {
          pack_piece(*setup_.source, piece_of(*b), out);
          out += bytes_of(*b);
        }
        sends.push_back({m.bytes, m.peer});
      }
    for (auto& route : incoming_)
      if (i < route.size()) {
        route[i].bytes.resize(static_cast<std::size_t>(size_of(route[i])));
        receives.push_back({route[i].bytes, route[i].peer});
      }
    group_.exchange(sends, receives);
    std::int64_t received = 0;
    for (auto& route : incoming_)
      if (i < route.size()) {
        const std::byte* in = route[i].bytes.data();
        for (const TransferBox* b : route[i].boxes) {
          copy_rows(view_piece(setup_.source_layouts[b->source_rank], piece_of(*b), in),
                    b->source_row, b->rows, *setup_.target, b->target_entry, b->target_row);
          in += bytes_of(*b);
        }
        received += static_cast<std::int64_t>(route[i].bytes.size());
        route[i].bytes = {};
      }
    for (auto& route : outgoing_)
      if (i < route.size()) route[i].bytes = {};
    return received;
  }

  const TransferSetup& setup_;
  LocalCopies copies_;
  Group group_;
  std::vector<std::vector<Message>> outgoing_, incoming_;  // a peer's buckets in order
};

}  // namespace

std::unique_ptr<Transfer> make_p2p_transfer(const TransferSetup& setup) {
  return std::make_unique<P2pTransfer>(setup);
}

}  // namespace tandem
