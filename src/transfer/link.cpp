// Weights between GPUs of several processes. Inside a host a target reads its owner's memory over
// NVLink (local_copy.h) where the two can, so this is for the rest: NCCL, from arena to arena.
// Broadcast: each owner sends its boxes once, to all processes that take them. P2p, and boxes of
// which processes take different rows: each process gets its own from the process that owns them.
//
// Boxes are cut into buckets, alike at both ends and from the plan alone, and what follows each
// other at both ends is one message: a launch with a message a tensor costs more than a small
// model's weights. While a bucket is under way the one before it is added up at both ends.
#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "base/check.h"
#include "model/link.h"
#include "ops/functions.h"
#include "transfer/local_copy.h"
#include "transfer/pieces.h"

namespace tandem {
namespace {

constexpr std::int64_t kPadding = 4096;  // storages of an arena begin at multiples of it

// Rows of a box.
struct Cut {
  const TransferBox* box = nullptr;
  std::int64_t row = 0, rows = 0;  // the first of them, from the box's first
};
using Bucket = std::vector<Cut>;

class LinkTransfer final : public Transfer {
 public:
  LinkTransfer(const TransferSetup& setup, LinkMode mode) : setup_(setup), copies_(setup) {
    std::vector<const TransferBox*> paired;
    std::map<std::int64_t, std::vector<const TransferBox*>> sources;
    for (const TransferBox& box : setup.plan.boxes) {
      if (!is_sent(box)) continue;
      if (mode == LinkMode::broadcast)
        sources[box.source_rank].push_back(&box);
      else
        paired.push_back(&box);
    }
    // All processes walk the steps in one order; a process that is not in one has none.
    for (const auto& [source, boxes] : sources)
      if (!add_broadcast(source, boxes)) paired.insert(paired.end(), boxes.begin(), boxes.end());
    if (!paired.empty()) add_exchanges(paired);
  }

  std::int64_t move(std::span<RowsSum> sums) override {
    std::int64_t bytes = copies_.copy(sums);
    if (!steps_.empty()) begin(steps_.front());
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      if (i + 1 < steps_.size()) begin(steps_[i + 1]);
      Step& step = steps_[i];
      if (!step.sends.empty()) add_up(*setup_.source, step.sends, true, sums);
      step.link->wait(step.number);
      if (!step.receives.empty()) bytes += add_up(*setup_.target, step.receives, false, sums);
    }
    return bytes;
  }
  bool sums_what_it_sends(const TransferBox& box) const override { return is_sent(box); }

 private:
  // What this process sends and receives in one launch.
  struct Step {
    Link* link = nullptr;
    std::optional<int> root;  // of a broadcast
    Bucket sends, receives;
    at::Tensor packed;  // columns on their way
    std::int64_t number = 0;
  };

  bool is_sent(const TransferBox& box) const { return !box.in_place && !copies_.takes(box); }
  int owner_of(const TransferBox& b) const { return setup_.source_process[b.source_rank]; }
  int taker_of(const TransferBox& b) const { return setup_.target_process[b.target_rank]; }
  std::int64_t row_bytes(const TransferBox& b) const {
    return b.row_elements * (setup_.source_layouts[b.source_rank].element == Element::f32 ? 4 : 2);
  }

  // Of a source's boxes, if all who take some take the same rows; else nothing, and false.
  bool add_broadcast(std::int64_t source, const std::vector<const TransferBox*>& boxes) {
    const int owner = setup_.source_process[source];
    std::map<int, std::vector<const TransferBox*>> by_taker;
    for (const TransferBox* b : boxes) by_taker[taker_of(*b)].push_back(b);
    const auto& first = by_taker.begin()->second;
    for (const auto& [taker, taken] : by_taker)
      if (!same_rows(first, taken)) return false;
    std::set<int> members{owner};
    for (const auto& [taker, taken] : by_taker) members.insert(taker);
    if (!members.contains(setup_.process)) return true;
    Link* link = open_link(fmt::format("broadcast/{}", source), {members.begin(), members.end()});
    const bool owns = owner == setup_.process;
    // An owner's: those of its first receiver, and whoever else has the same boxes reports to them.
    for (Bucket& bucket : cut(owns ? first : by_taker.at(setup_.process))) {
      Step& step = steps_.emplace_back();
      step.link = link;
      step.root = link->rank_of(owner);
      (owns ? step.sends : step.receives) = std::move(bucket);
    }
    if (owns)
      for (const auto& [taker, taken] : by_taker)
        for (std::size_t i = 0; i < taken.size(); ++i)
          if (taken[i] != first[i]) same_sums_.emplace_back(taken[i], first[i]);
    return true;
  }

  void add_exchanges(const std::vector<const TransferBox*>& boxes) {
    std::map<std::pair<int, int>, std::vector<const TransferBox*>> pairs;
    for (const TransferBox* b : boxes) pairs[{owner_of(*b), taker_of(*b)}].push_back(b);
    std::vector<int> all;
    for (int p = 0; p < setup_.num_processes; ++p) all.push_back(p);
    Link* link = open_link("p2p", all);
    // The n-th buckets of all pairs go together; a process without one takes no part.
    std::vector<Step> steps;
    for (const auto& [pair, theirs] : pairs) {
      if (pair.first != setup_.process && pair.second != setup_.process) continue;
      std::size_t n = 0;
      for (Bucket& bucket : cut(theirs)) {
        if (n == steps.size()) steps.emplace_back().link = link;
        Bucket& into = pair.first == setup_.process ? steps[n].sends : steps[n].receives;
        into.insert(into.end(), bucket.begin(), bucket.end());
        ++n;
      }
    }
    for (Step& step : steps) steps_.push_back(std::move(step));
  }

  Link* open_link(const std::string& name, std::vector<int> members) {
    links_.push_back(std::make_unique<Link>(*setup_.store, name, std::move(members), setup_.process,
                                            LinkUse::messages, setup_.group.timeout_seconds));
    return links_.back().get();
  }

  std::vector<Bucket> cut(const std::vector<const TransferBox*>& boxes) const {
    std::vector<Bucket> buckets;
    std::int64_t room = 0;
    for (const TransferBox* b : boxes)
      for (std::int64_t row = 0; row < b->rows;) {
        if (room < row_bytes(*b) || buckets.empty()) {
          buckets.emplace_back();
          room = std::max(setup_.bucket_bytes, row_bytes(*b));
        }
        const std::int64_t rows = std::min(b->rows - row, room / row_bytes(*b));
        buckets.back().push_back({b, row, rows});
        room -= rows * row_bytes(*b);
        row += rows;
      }
    return buckets;
  }

  static bool same_rows(const std::vector<const TransferBox*>& a,
                        const std::vector<const TransferBox*>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const TransferBox* x, const TransferBox* y) {
                        return x->source_entry == y->source_entry &&
                               x->source_row == y->source_row && x->rows == y->rows &&
                               x->source_col == y->source_col && x->row_elements == y->row_elements;
                      });
  }

  // Where rows of a box lie in an arena.
  struct Range {
    std::int64_t storage = 0, begin = 0, end = 0;  // bytes from the arena's begin
    bool first = false, last = false;              // of the storage
  };
  Range range_of(const Cut& cut, bool at_source) const {
    const TransferBox& b = *cut.box;
    const ArenaLayout& layout =
        at_source ? setup_.source_layouts[b.source_rank] : setup_.target_layouts[b.target_rank];
    const ArenaEntry& e = layout.entries[at_source ? b.source_entry : b.target_entry];
    const ArenaStorage& s = layout.storages[e.storage];
    const std::int64_t row = e.row_begin + (at_source ? b.source_row : b.target_row) + cut.row;
    const std::int64_t bytes = row_bytes(b);
    return {.storage = e.storage,
            .begin = s.offset_bytes + row * bytes,
            .end = s.offset_bytes + (row + cut.rows) * bytes,
            .first = row == 0,
            .last = row + cut.rows == s.rows};
  }
  // Whether b's rows follow a's at one end, past padding alone.
  static bool follows(const Range& a, const Range& b) {
    return a.end == b.begin || (a.last && b.first && b.storage == a.storage + 1 &&
                                b.begin - a.end >= 0 && b.begin - a.end < kPadding);
  }

  // Runs of cuts that follow each other at both ends, each one message; both ends find the same.
  template <class Add>
  void for_runs(const Bucket& cuts, Add&& add) const {
    for (std::size_t i = 0; i < cuts.size();) {
      std::size_t end = i + 1;
      const bool whole = setup_.takes_whole_rows(*cuts[i].box);
      while (whole && end < cuts.size() && is_next(cuts[end - 1], cuts[end])) ++end;
      add(std::span(cuts).subspan(i, end - i), whole);
      i = end;
    }
  }
  bool is_next(const Cut& a, const Cut& b) const {
    if (owner_of(*a.box) != owner_of(*b.box) || taker_of(*a.box) != taker_of(*b.box) ||
        !setup_.takes_whole_rows(*b.box))
      return false;
    const Range from_a = range_of(a, true), from_b = range_of(b, true);
    const Range to_a = range_of(a, false), to_b = range_of(b, false);
    return follows(from_a, from_b) && follows(to_a, to_b) &&
           from_b.begin - from_a.end == to_b.begin - to_a.end;
  }

  void begin(Step& step) {
    std::vector<LinkPart> sends, receives;
    std::int64_t packed = 0;
    for (const Cut& c : step.sends)
      if (!setup_.takes_whole_rows(*c.box)) packed += c.rows * row_bytes(*c.box);
    if (packed > 0)
      step.packed = at::empty({packed}, at::dtype(at::kByte).device(device_of(Place::cuda)));
    packed = 0;
    for_runs(step.sends, [&](std::span<const Cut> run, bool whole) {
      const int peer = step.root ? 0 : taker_of(*run.front().box);
      if (whole) {
        sends.push_back(part(*setup_.source, run, true, peer));
        return;
      }
      const Cut& c = run.front();
      auto* to = static_cast<std::byte*>(step.packed.data_ptr()) + packed;
      pack_columns(c, to);
      sends.push_back({.data = to, .bytes = c.rows * row_bytes(*c.box), .peer = peer});
      packed += c.rows * row_bytes(*c.box);
    });
    for_runs(step.receives, [&](std::span<const Cut> run, bool) {
      receives.push_back(part(*setup_.target, run, false, owner_of(*run.front().box)));
    });
    step.number = step.root ? step.link->broadcast(sends.empty() ? receives : sends, *step.root)
                            : step.link->exchange(sends, receives);
  }

  LinkPart part(const Arena& arena, std::span<const Cut> run, bool at_source, int peer) const {
    const std::int64_t begin = range_of(run.front(), at_source).begin;
    return {.data = static_cast<std::byte*>(arena.memory().data()) + begin,
            .bytes = range_of(run.back(), at_source).end - begin,
            .peer = peer};
  }

  // Columns of rows side by side.
  void pack_columns(const Cut& c, std::byte* to) const {
    const TransferBox& b = *c.box;
    const ArenaLayout& layout = setup_.source->layout();
    const RowsView all = view_entry(layout, setup_.source->memory().data(), b.source_entry);
    const auto type = at::dtype(scalar_type(layout.element)).device(device_of(all.place));
    const std::int64_t first = all.first_row + b.source_row + c.row;
    at::from_blob(to, {c.rows, b.row_elements}, type)
        .copy_(at::from_blob(const_cast<std::byte*>(all.data), {all.storage_rows, all.storage_cols},
                             type)
                   .narrow(0, first, c.rows)
                   .narrow(1, b.source_col, b.row_elements));
  }

  // Adds the sums of the cuts as they lie at one end; returns their bytes.
  std::int64_t add_up(const Arena& arena, const Bucket& cuts, bool at_source,
                      std::span<RowsSum> sums) const {
    std::int64_t bytes = 0;
    std::vector<Piece> pieces;
    for (const Cut& c : cuts) {
      const TransferBox& b = *c.box;
      Piece piece =
          at_source ? source_piece(b) : Piece{.entry = b.target_entry, .row = b.target_row};
      piece.row += c.row;
      piece.rows = c.rows;
      pieces.push_back(piece);
      bytes += c.rows * row_bytes(b);
    }
    const auto found = checksum_pieces(arena, pieces);
    const auto index = [&](const TransferBox* b) {
      return static_cast<std::size_t>(b - setup_.plan.boxes.data());
    };
    for (std::size_t i = 0; i < cuts.size(); ++i) {
      sums[index(cuts[i].box)] += found[i];
      if (!at_source) continue;
      for (const auto& [other, box] : same_sums_)
        if (box == cuts[i].box) sums[index(other)] += found[i];
    }
    return bytes;
  }

  const TransferSetup& setup_;
  LocalCopies copies_;
  std::vector<std::unique_ptr<Link>> links_;
  std::vector<Step> steps_;
  // Boxes of a broadcast that this process sends, and the one whose rows they share.
  std::vector<std::pair<const TransferBox*, const TransferBox*>> same_sums_;
};

}  // namespace

std::unique_ptr<Transfer> make_link_transfer(const TransferSetup& setup, LinkMode mode) {
  return std::make_unique<LinkTransfer>(setup, mode);
}

}  // namespace tandem
