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

// Rows of a box that travel together.
struct Part {
  const TransferBox* box = nullptr;
  std::int64_t row = 0, rows = 0;  // from the box's first
  bool direct = false;             // from arena to arena; else packed
};

// What one pair exchanges in one round: direct parts as messages of their own, the packed ones
// after each other in one.
using Round = std::vector<Part>;

// Most bytes of a round. Two rounds are under way at a time, so this bounds the memory and lets
// packing, sending and unpacking overlap.
constexpr std::int64_t kRoundBytes = 16 << 20;
constexpr std::int64_t kLeastDirect = 64 << 10;  // smaller parts are cheaper packed

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
    for (auto& [peer, route] : outgoing) outgoing_.push_back(std::move(route));
    for (auto& [peer, route] : incoming) incoming_.push_back(std::move(route));
    if (sends)
      group_ = Group::gloo(*setup.store, "transfer/p2p", setup.process, setup.num_processes,
                           setup.group);
  }

  std::int64_t move(std::span<RowsSum> sums) override {
    std::int64_t bytes = copies_.copy(sums);
    std::size_t rounds = 0;
    for (const Route& r : outgoing_) rounds = std::max(rounds, r.rounds.size());
    for (const Route& r : incoming_) rounds = std::max(rounds, r.rounds.size());
    std::shared_ptr<Group::Pending> before;
    for (std::size_t i = 0; i <= rounds; ++i) {
      const auto now = i < rounds ? start(i) : nullptr;
      if (now) sum_sent(i, sums);
      if (before) {
        group_.finish_exchange(before);
        bytes += finish(i - 1, sums);
      }
      before = now;
    }
    return bytes;
  }
  bool sums_what_it_sends(const TransferBox& box) const override {
    return !box.in_place && !copies_.takes(box);
  }

 private:
  // All rounds of one direction between this process and a peer, in order.
  struct Route {
    int peer = 0;
    std::vector<Round> rounds;
    std::int64_t room = 0;
    std::vector<std::byte> packed[2];  // of even and odd rounds
  };

  Piece piece_of(const Part& p) const {
    return {p.box->source_entry, p.box->source_row + p.row, p.rows};
  }
  std::int64_t bytes_of(const Part& p) const {
    return piece_bytes(setup_.source_layouts[p.box->source_rank], piece_of(p));
  }

  // Both ends cut alike: it follows from plan and layouts alone.
  void add(Route& route, int peer, const TransferBox& box) {
    const std::int64_t limit = std::min(setup_.bucket_bytes, kRoundBytes);
    const std::int64_t row_bytes = std::max<std::int64_t>(1, box.row_elements * 4);
    const std::int64_t step = std::max(kPanel, limit / row_bytes / kPanel * kPanel);
    route.peer = peer;
    for (std::int64_t row = 0; row < box.rows; row += step) {
      Part part{.box = &box, .row = row, .rows = std::min(step, box.rows - row)};
      const std::int64_t bytes = bytes_of(part);
      part.direct = bytes >= kLeastDirect &&
                    same_stretch(setup_.source_layouts[box.source_rank], box.source_entry,
                                 box.source_row + row, setup_.target_layouts[box.target_rank],
                                 box.target_entry, box.target_row + row, part.rows);
      if (route.rounds.empty() || route.room < bytes) {
        route.rounds.emplace_back();
        route.room = limit;
      }
      route.rounds.back().push_back(part);
      route.room -= bytes;
    }
  }

  std::span<std::byte> packed(Route& route, std::size_t round) const {
    std::int64_t total = 0;
    for (const Part& p : route.rounds[round]) total += p.direct ? 0 : bytes_of(p);
    auto& bytes = route.packed[round % 2];
    if (bytes.size() < static_cast<std::size_t>(total))
      bytes.resize(static_cast<std::size_t>(total));
    return {bytes.data(), static_cast<std::size_t>(total)};
  }

  std::span<const std::byte> source_bytes(const Part& p) const {
    return stretch(
        view_entry(setup_.source->layout(), setup_.source->memory().data(), p.box->source_entry),
        p.box->source_row + p.row, p.rows);
  }
  std::span<std::byte> target_bytes(const Part& p) const {
    const auto bytes = stretch(
        view_entry(setup_.target->layout(), setup_.target->memory().data(), p.box->target_entry),
        p.box->target_row + p.row, p.rows);
    return {const_cast<std::byte*>(bytes.data()), bytes.size()};
  }

  // The i-th round of every route, all under way together.
  std::shared_ptr<Group::Pending> start(std::size_t i) {
    std::vector<Group::Send> sends;
    std::vector<Group::Receive> receives;
    for (Route& route : outgoing_) {
      if (i >= route.rounds.size()) continue;
      const auto bytes = packed(route, i);
      std::byte* out = bytes.data();
      for (const Part& p : route.rounds[i]) {
        if (p.direct) {
          sends.push_back({source_bytes(p), route.peer});
          continue;
        }
        pack_piece(*setup_.source, piece_of(p), out);
        out += bytes_of(p);
      }
      sends.push_back({bytes, route.peer});
    }
    for (Route& route : incoming_) {
      if (i >= route.rounds.size()) continue;
      for (const Part& p : route.rounds[i])
        if (p.direct) receives.push_back({target_bytes(p), route.peer});
      receives.push_back({packed(route, i), route.peer});
    }
    return group_.start_exchange(sends, receives);
  }

  void sum_sent(std::size_t i, std::span<RowsSum> sums) const {
    for (const Route& route : outgoing_) {
      if (i >= route.rounds.size()) continue;
      for (const Part& p : route.rounds[i])
        sums[static_cast<std::size_t>(p.box - setup_.plan.boxes.data())] +=
            checksum_rows(*setup_.source, p.box->source_entry, p.box->source_row + p.row, p.rows);
    }
  }

  std::int64_t finish(std::size_t i, std::span<RowsSum> sums) {
    std::int64_t received = 0;
    for (Route& route : incoming_) {
      if (i >= route.rounds.size()) continue;
      const std::byte* in = packed(route, i).data();
      for (const Part& p : route.rounds[i]) {
        const TransferBox& b = *p.box;
        RowsSum& sum = sums[static_cast<std::size_t>(&b - setup_.plan.boxes.data())];
        if (p.direct) {
          sum += checksum_rows(*setup_.target, b.target_entry, b.target_row + p.row, p.rows);
        } else {
          sum += copy_rows(view_piece(setup_.source_layouts[b.source_rank], piece_of(p), in),
                           b.source_row + p.row, p.rows, *setup_.target, b.target_entry,
                           b.target_row + p.row);
          in += bytes_of(p);
        }
        received += bytes_of(p);
      }
    }
    return received;
  }

  const TransferSetup& setup_;
  LocalCopies copies_;
  Group group_;
  std::vector<Route> outgoing_, incoming_;
};

}  // namespace

std::unique_ptr<Transfer> make_p2p_transfer(const TransferSetup& setup) {
  return std::make_unique<P2pTransfer>(setup);
}

}  // namespace tandem
