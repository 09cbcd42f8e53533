// Cutting, sending and taking parts.
#include "transfer/parts.h"

#include <algorithm>
#include <bit>

namespace tandem {
namespace {

// A part and the kernel's copy of it fit a core's second cache.
constexpr std::int64_t kPartBytes = 256 << 10;
constexpr std::size_t kAlignment = 64;  // of a slot: for streaming copies

// The rows of a box that a part holds, as rows of the source's entry.
struct Rows {
  std::int64_t begin, count;
};
Rows common_rows(const StreamPart& part, const TransferBox& box) {
  const std::int64_t begin = std::max(part.piece.row, box.source_row);
  return {begin, std::min(part.piece.row + part.piece.rows, box.source_row + box.rows) - begin};
}

}  // namespace

std::int64_t part_limit(const TransferSetup& setup) {
  return std::min(setup.bucket_bytes, kPartBytes);
}

void add_parts(std::vector<StreamPart>& parts, const ArenaLayout& layout, const Piece& whole,
               const std::vector<const TransferBox*>& boxes, std::int64_t limit) {
  const std::int64_t begin = layout.entries[whole.entry].row_begin;
  Piece panel = whole;
  panel.rows = std::min(kPanel, whole.rows);
  const std::int64_t panels =
      std::max<std::int64_t>(1, limit / std::max<std::int64_t>(1, piece_bytes(layout, panel)));
  for (std::int64_t row = whole.row, end = whole.row + whole.rows; row < end;) {
    // Up to a border of panels.
    const std::int64_t next = ((begin + row) / kPanel + panels) * kPanel - begin;
    StreamPart part{.piece = whole, .boxes = {}};
    part.piece.row = row;
    part.piece.rows = std::min(end, next) - row;
    part.bytes = piece_bytes(layout, part.piece);
    for (const TransferBox* box : boxes)
      if (common_rows(part, *box).count > 0) part.boxes.push_back(box);
    row += part.piece.rows;
    parts.push_back(std::move(part));
  }
}

class PartStreams::Outlet {
 public:
  Outlet(const TransferSetup& setup, std::vector<StreamPart> parts)
      : setup_(setup), parts_(std::move(parts)) {}
  void restart(std::span<RowsSum> sums) {
    sums_ = sums;
    next_ = 0;
  }

  std::optional<std::span<const std::byte>> next() {
    if (next_ == parts_.size()) return std::span<const std::byte>();
    const StreamPart& part = parts_[next_++];
    add_up(part);  // first, since that brings it into the cache
    const Arena& arena = *setup_.source;
    const RowsView view = view_entry(arena.layout(), arena.memory().data(), part.piece.entry);
    if (part.piece.cols == 0 || part.piece.cols == view.cols)
      if (const auto bytes = stretch(view, part.piece.row, part.piece.rows); !bytes.empty())
        return bytes;
    packed_.resize(static_cast<std::size_t>(part.bytes));
    pack_piece(arena, part.piece, packed_.data());
    return packed_;
  }

 private:
  // Engines that hold the same rows share a sum.
  void add_up(const StreamPart& part) {
    Piece summed;
    RowsSum sum;
    for (const TransferBox* box : part.boxes) {
      const Rows rows = common_rows(part, *box);
      const Piece piece{box->source_entry, rows.begin, rows.count, box->source_col,
                        box->row_elements};
      if (!(piece == summed)) sum = checksum_piece(*setup_.source, piece);
      summed = piece;
      sums_[static_cast<std::size_t>(box - setup_.plan.boxes.data())] += sum;
    }
  }

  const TransferSetup& setup_;
  std::vector<StreamPart> parts_;
  std::span<RowsSum> sums_;
  std::size_t next_ = 0;
  std::vector<std::byte> packed_;  // of a part that lies scattered
};

// Received parts lie in slots: one, which stays in the cache, or a few where they are handed on, so
// that a part goes while others come.
class PartStreams::Inlet {
 public:
  Inlet(const TransferSetup& setup, std::int64_t source, std::vector<StreamPart> parts,
        bool hands_on)
      : setup_(setup),
        source_(source),
        parts_(std::move(parts)),
        hands_on_(hands_on),
        num_slots_(hands_on ? 4 : 1) {
    for (const StreamPart& part : parts_)
      slot_bytes_ = std::max(slot_bytes_, static_cast<std::size_t>(part.bytes));
    slot_bytes_ = (slot_bytes_ + kAlignment - 1) / kAlignment * kAlignment;
    slots_.resize(slot_bytes_ * num_slots_ + kAlignment);
    const auto address = std::bit_cast<std::uintptr_t>(slots_.data());
    shift_ = (kAlignment - address % kAlignment) % kAlignment;
  }
  void restart(std::span<RowsSum> sums) {
    sums_ = sums;
    asked_ = filled_ = handed_ = gone_ = 0;
    bytes_ = 0;
  }
  std::int64_t bytes() const { return bytes_; }  // written into the target since the restart

  std::optional<std::span<std::byte>> next() {
    if (filled_ < asked_) {
      take(parts_[filled_], slot(filled_));
      ++filled_;
    }
    if (asked_ == parts_.size()) return std::span<std::byte>();
    if (hands_on_ && asked_ - gone_ == num_slots_) return std::nullopt;
    const std::size_t at = asked_++;
    return std::span(slot(at), static_cast<std::size_t>(parts_[at].bytes));
  }
  std::optional<std::span<const std::byte>> hand_on() {
    gone_ = handed_;
    if (handed_ == parts_.size()) return std::span<const std::byte>();
    if (handed_ == filled_) return std::nullopt;
    const std::size_t at = handed_++;
    return std::span<const std::byte>(slot(at), static_cast<std::size_t>(parts_[at].bytes));
  }

 private:
  std::byte* slot(std::size_t part) {
    return slots_.data() + shift_ + part % num_slots_ * slot_bytes_;
  }
  void take(const StreamPart& part, const std::byte* bytes) {
    const ArenaLayout& layout = setup_.source_layouts[source_];
    const RowsView view = view_piece(layout, part.piece, bytes);
    for (const TransferBox* box : part.boxes) {
      if (setup_.target_process[box->target_rank] != setup_.process) continue;
      const Rows rows = common_rows(part, *box);
      sums_[static_cast<std::size_t>(box - setup_.plan.boxes.data())] += copy_rows(
          view.columns(box->source_col - part.piece.col, box->row_elements), rows.begin, rows.count,
          *setup_.target, box->target_entry, box->target_row + rows.begin - box->source_row);
      bytes_ += rows.count * box->row_elements *
                (setup_.target->layout().element == Element::f32 ? 4 : 2);
    }
  }

  const TransferSetup& setup_;
  std::int64_t source_;
  std::vector<StreamPart> parts_;
  bool hands_on_;
  std::size_t num_slots_;
  std::span<RowsSum> sums_;
  std::size_t slot_bytes_ = 0, shift_ = 0;
  std::vector<std::byte> slots_;
  // Parts: asked for, filled, handed on, gone to the next process.
  std::size_t asked_ = 0, filled_ = 0, handed_ = 0, gone_ = 0;
  std::int64_t bytes_ = 0;
};

PartStreams::PartStreams(const TransferSetup& setup) : setup_(setup) {}
PartStreams::~PartStreams() = default;

void PartStreams::send(ByteStreams::Route to, std::vector<StreamPart> parts) {
  to_.push_back(to);
  outlets_.push_back(std::make_unique<Outlet>(setup_, std::move(parts)));
  sends_.push_back([end = outlets_.back().get()] { return end->next(); });
}

void PartStreams::receive(ByteStreams::Route from, std::int64_t source,
                          std::vector<StreamPart> parts, std::optional<ByteStreams::Route> onward) {
  from_.push_back(from);
  inlets_.push_back(std::make_unique<Inlet>(setup_, source, std::move(parts), onward.has_value()));
  receives_.push_back([end = inlets_.back().get()] { return end->next(); });
  if (!onward) return;
  to_.push_back(*onward);
  sends_.push_back([end = inlets_.back().get()] { return end->hand_on(); });
}

void PartStreams::open(const std::string& name) {
  if (!to_.empty() || !from_.empty())
    streams_.emplace(*setup_.store, name, setup_.process, to_, from_, setup_.group);
}

std::int64_t PartStreams::run(std::span<RowsSum> sums) {
  if (!streams_) return 0;
  for (auto& outlet : outlets_) outlet->restart(sums);
  for (auto& inlet : inlets_) inlet->restart(sums);
  streams_->run(sends_, receives_);
  std::int64_t bytes = 0;
  for (const auto& inlet : inlets_) bytes += inlet->bytes();
  return bytes;
}

}  // namespace tandem
