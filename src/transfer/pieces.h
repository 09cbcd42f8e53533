// Rows of a weight on their way: how they lie in an arena, in a peer's mapped arena or in a
// message, and how they get into a target arena. Where source and target keep the same form and the
// rows start and end at panel borders the bytes are copied as they are; otherwise they go through
// row-major f32, which holds every bf16 exactly. Some columns of rows count as a matrix of their
// own: they are packed, written and added up so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "model/arena.h"
#include "transfer/plan.h"

namespace tandem {

// Rows that can be read: row r of the entry is row first_row + r of a storage at `data`, which lies
// in host memory unless place says otherwise; of its storage_cols columns, those from first_col on.
struct RowsView {
  const std::byte* data = nullptr;
  Layout layout = Layout::row_major;
  Element element = Element::f32;
  Place place = Place::cpu;
  std::int64_t cols = 0;
  std::int64_t first_row = 0;
  std::int64_t storage_rows = 0;  // rows past the last one of a storage are padding
  std::int64_t first_col = 0, storage_cols = 0;

  bool has_all_columns() const { return cols == storage_cols; }
  // Columns [col, col + count) of these.
  RowsView columns(std::int64_t col, std::int64_t count) const;
};

// An entry in an arena whose memory starts at `arena_data` (its own, or a mapping of a peer's).
RowsView view_entry(const ArenaLayout& layout, const void* arena_data, std::int64_t entry);

// The bytes of rows [row, row + rows) where they lie in one stretch of host memory that holds
// nothing else; else an empty span.
std::span<const std::byte> stretch(const RowsView& view, std::int64_t row, std::int64_t rows);
// The same of device memory, where every matrix is row-major.
std::span<const std::byte> device_stretch(const RowsView& view, std::int64_t row,
                                          std::int64_t rows);
// Rows of device memory with all their columns, as they are, to a target's rows of the same form.
// Where both are the last of their storages it takes the bytes behind them along, up to where a
// page ends at either end: they are nobody's, and boxes that follow each other become one run.
BytesCopy device_copy(const RowsView& from, std::int64_t row, std::int64_t rows, const RowsView& to,
                      std::int64_t target_row);
// Rows of device memory as words to add up on the device; the first is row global_row of its
// tensor. Nothing where they do not end and begin at whole words.
std::optional<WordsPiece> device_words(const RowsView& view, std::int64_t row, std::int64_t rows,
                                       std::int64_t global_row);
// Whether rows of a source entry lie in a stretch in both layouts, in the same form: then they can
// go from memory to memory as they are.
bool same_stretch(const ArenaLayout& source, std::int64_t source_entry, std::int64_t source_row,
                  const ArenaLayout& target, std::int64_t target_entry, std::int64_t target_row,
                  std::int64_t rows);

// Rows of one entry, all their columns or some. As a message's part they travel as panels when they
// start and end at panel borders, else (matrices) as row-major f32.
struct Piece {
  std::int64_t entry = 0, row = 0, rows = 0;
  std::int64_t col = 0, cols = 0;  // cols 0: all of them
  bool operator==(const Piece&) const = default;
};
// What a box takes from its source.
inline Piece source_piece(const TransferBox& b) {
  return {b.source_entry, b.source_row, b.rows, b.source_col, b.row_elements};
}
std::int64_t piece_bytes(const ArenaLayout& layout, const Piece& piece);
void pack_piece(const Arena& source, const Piece& piece, std::byte* out);
// The packed piece as rows; row numbers are those of the entry.
RowsView view_piece(const ArenaLayout& layout, const Piece& piece, const std::byte* packed);

// The additive checksum (ops/kernels/checksum.h) of a piece; equal for equal values whatever the
// layout.
struct RowsSum {
  std::uint32_t a = 0, b = 0;
  RowsSum& operator+=(const RowsSum& o) {
    a += o.a;
    b += o.b;
    return *this;
  }
  bool operator==(const RowsSum&) const = default;
};
RowsSum checksum_piece(const Arena& arena, const Piece& piece);
inline RowsSum checksum_rows(const Arena& arena, std::int64_t entry, std::int64_t row,
                             std::int64_t rows) {
  return checksum_piece(arena, {.entry = entry, .row = row, .rows = rows});
}
// Rows [row, row + rows) of the view into rows [target_row, …) of a target's entry; returns the
// checksum of what was written.
RowsSum copy_rows(const RowsView& from, std::int64_t row, std::int64_t rows, Arena& target,
                  std::int64_t target_entry, std::int64_t target_row);
// Of many pieces; on a GPU in one launch.
std::vector<RowsSum> checksum_pieces(const Arena& arena, std::span<const Piece> pieces);
// The same of a piece that lies in a flat f32 vector (ArenaEntry::flat_begin), as it would be once
// it is written into an arena of that layout.
RowsSum checksum_flat_piece(const ArenaLayout& layout, std::span<const float> flat,
                            const Piece& piece);

}  // namespace tandem
