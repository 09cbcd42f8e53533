// Copying, packing and adding up rows of weights.
#include "transfer/pieces.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <vector>

#include "ops/place.h"

namespace tandem {
namespace {

std::int64_t size_of(Element e) { return e == Element::f32 ? 4 : 2; }

std::int64_t panel_bytes(Element e, std::int64_t cols) {
  return kPanel * (e == Element::f32 ? cols : round_up(cols, 2)) * size_of(e);
}

// Whether storage rows [begin, begin + rows) are whole panels of a storage of `storage_rows` rows.
bool whole_panels(std::int64_t begin, std::int64_t rows, std::int64_t storage_rows) {
  return begin % kPanel == 0 && (rows % kPanel == 0 || begin + rows == storage_rows);
}

// Of rows with all their columns.
const std::byte* row_data(const RowsView& v, std::int64_t row) {
  const std::int64_t at = v.first_row + row;
  return v.layout == Layout::panels ? v.data + at / kPanel * panel_bytes(v.element, v.cols)
                                    : v.data + at * v.cols * size_of(v.element);
}

// Whether columns of a panel lie there as a panel of their own would: in one stretch, with bf16 in
// the same pairs.
bool are_panels(const RowsView& v) {
  return v.layout == Layout::panels && v.place == Place::cpu &&
         (v.has_all_columns() || v.element == Element::f32 ||
          (v.first_col % 2 == 0 && v.cols % 2 == 0));
}

// The columns of the panel that holds a row, where are_panels.
const std::byte* panel_data(const RowsView& v, std::int64_t row) {
  return v.data + (v.first_row + row) / kPanel * panel_bytes(v.element, v.storage_cols) +
         v.first_col * kPanel * size_of(v.element);
}

std::int64_t rows_bytes(const RowsView& v, std::int64_t rows) {
  return v.layout == Layout::panels ? (rows + kPanel - 1) / kPanel * panel_bytes(v.element, v.cols)
                                    : rows * v.cols * size_of(v.element);
}

void read_f32(const RowsView& v, std::int64_t row, std::int64_t rows, float* out) {
  const std::int64_t count = rows * v.cols;
  if (!v.has_all_columns()) {
    RowsView all = v;
    all.cols = v.storage_cols;
    std::vector<float> values(static_cast<std::size_t>(rows * all.cols));
    read_f32(all, row, rows, values.data());
    for (std::int64_t r = 0; r < rows; ++r)
      std::copy_n(values.data() + r * all.cols + v.first_col, v.cols, out + r * v.cols);
    return;
  }
  if (v.layout == Layout::panels) {
    kernels().read_panels(v.element, v.data, v.cols, v.first_row + row, rows, out);
  } else if (v.element == Element::f32) {
    read_memory(v.place, out, row_data(v, row), count * 4);
  } else {
    std::vector<bf16> narrow(static_cast<std::size_t>(count));
    read_memory(v.place, narrow.data(), row_data(v, row), count * 2);
    kernels().to_f32(narrow.data(), out, count);
  }
}

RowsView view_of(const ArenaLayout& layout, const void* arena_data, const Piece& p) {
  const RowsView all = view_entry(layout, arena_data, p.entry);
  return p.cols == 0 ? all : all.columns(p.col, p.cols);
}

// Whether the rows travel as they lie in the storage, panel by panel if they are some columns.
bool travels_raw(const RowsView& v, const Piece& p) {
  return v.layout == Layout::row_major
             ? v.has_all_columns()
             : whole_panels(v.first_row + p.row, p.rows, v.storage_rows) && are_panels(v);
}

// Behind device rows that end at row_end: the bytes up to the page's end if their storage ends
// there too, since storages begin at pages.
std::int64_t padding_after(const RowsView& v, std::int64_t row_end) {
  if (v.first_row + row_end != v.storage_rows) return 0;
  return -reinterpret_cast<std::intptr_t>(row_data(v, row_end)) & (kArenaAlignment - 1);
}

// Of the rows' values as they are in f32, rounded as the element rounds.
RowsSum checksum_values(Element element, const float* values, std::int64_t rows, std::int64_t cols,
                        std::int64_t first) {
  std::uint32_t sums[2] = {0, 0};
  if (element == Element::f32) {
    kernels().checksum_flat(Element::f32, values, rows, cols, first, sums);
  } else {
    std::vector<bf16> narrow(static_cast<std::size_t>(rows * cols));
    kernels().to_bf16(values, narrow.data(), rows * cols);
    kernels().checksum_flat(Element::bf16, narrow.data(), rows, cols, first, sums);
  }
  return {sums[0], sums[1]};
}

// Whole panels to whole panels in memory, where both are aligned for streaming stores.
bool copies_panels(const RowsView& from, std::span<const std::byte> bytes, const RowsView& to,
                   std::int64_t target_row) {
  const auto aligned = [](const std::byte* p) {
    return reinterpret_cast<std::uintptr_t>(p) % 32 == 0;
  };
  return from.layout == Layout::panels && to.place == Place::cpu && !bytes.empty() &&
         aligned(bytes.data()) && aligned(row_data(to, target_row));
}

}  // namespace

RowsView view_entry(const ArenaLayout& layout, const void* arena_data, std::int64_t entry) {
  const ArenaEntry& e = layout.entries[entry];
  const ArenaStorage& s = layout.storages[e.storage];
  return {.data = static_cast<const std::byte*>(arena_data) + s.offset_bytes,
          .layout = s.layout,
          .element = layout.element,
          .place = layout.place,
          .cols = s.cols,
          .first_row = e.row_begin,
          .storage_rows = s.rows,
          .storage_cols = s.cols};
}

RowsView RowsView::columns(std::int64_t col, std::int64_t count) const {
  RowsView v = *this;
  v.first_col += col;
  v.cols = count;
  return v;
}

std::span<const std::byte> stretch(const RowsView& v, std::int64_t row, std::int64_t rows) {
  if (v.place != Place::cpu || !v.has_all_columns() ||
      (v.layout == Layout::panels && !whole_panels(v.first_row + row, rows, v.storage_rows)))
    return {};
  return {row_data(v, row), static_cast<std::size_t>(rows_bytes(v, rows))};
}

std::span<const std::byte> device_stretch(const RowsView& v, std::int64_t row, std::int64_t rows) {
  assert(v.place == Place::cuda && v.layout == Layout::row_major);
  return {row_data(v, row), static_cast<std::size_t>(rows_bytes(v, rows))};
}

BytesCopy device_copy(const RowsView& from, std::int64_t row, std::int64_t rows, const RowsView& to,
                      std::int64_t target_row) {
  const auto source = device_stretch(from, row, rows);
  const auto target = device_stretch(to, target_row, rows);
  assert(source.size() == target.size());
  return {.from = source.data(),
          .to = const_cast<std::byte*>(target.data()),
          .bytes = std::ssize(target) +
                   std::min(padding_after(from, row + rows), padding_after(to, target_row + rows))};
}

bool same_stretch(const ArenaLayout& source, std::int64_t source_entry, std::int64_t source_row,
                  const ArenaLayout& target, std::int64_t target_entry, std::int64_t target_row,
                  std::int64_t rows) {
  const RowsView from = view_entry(source, nullptr, source_entry);
  const RowsView to = view_entry(target, nullptr, target_entry);
  return from.layout == to.layout && from.element == to.element &&
         !stretch(from, source_row, rows).empty() && !stretch(to, target_row, rows).empty();
}

RowsSum copy_rows(const RowsView& from, std::int64_t row, std::int64_t rows, Arena& target,
                  std::int64_t target_entry, std::int64_t target_row) {
  const ArenaLayout& layout = target.layout();
  const RowsView to = view_entry(layout, target.memory().data(), target_entry);
  assert(to.cols == from.cols);
  const auto bytes = stretch(from, row, rows);
  const bool fits = to.layout == Layout::row_major ||
                    whole_panels(to.first_row + target_row, rows, to.storage_rows);
  if (!bytes.empty() && fits && from.layout == to.layout && from.element == to.element) {
    auto* out = const_cast<std::byte*>(row_data(to, target_row));
    if (copies_panels(from, bytes, to, target_row)) {
      std::uint32_t sums[2] = {0, 0};
      kernels().copy_panels(to.element, bytes.data(), out, to.cols, rows,
                            layout.entries[target_entry].global_row + target_row, sums);
      return {sums[0], sums[1]};
    }
    write_memory(layout.place, out, bytes.data(), static_cast<std::int64_t>(bytes.size()));
    return checksum_rows(target, target_entry, target_row, rows);
  }
  if (are_panels(from) && to.layout == Layout::panels && from.element == to.element && fits &&
      whole_panels(from.first_row + row, rows, from.storage_rows)) {
    std::uint32_t sums[2] = {0, 0};
    const std::int64_t first = layout.entries[target_entry].global_row + target_row;
    for (std::int64_t r = 0; r < rows; r += kPanel)
      kernels().copy_panels(to.element, panel_data(from, row + r),
                            const_cast<std::byte*>(row_data(to, target_row + r)), to.cols,
                            std::min(kPanel, rows - r), first + r, sums);
    return {sums[0], sums[1]};
  }
  if (from.place == Place::cuda && to.place == Place::cuda && from.element == to.element &&
      from.has_all_columns()) {
    const auto source = device_stretch(from, row, rows);
    cuda_part().copy(const_cast<std::byte*>(row_data(to, target_row)), source.data(),
                     static_cast<std::int64_t>(source.size()));
    return checksum_rows(target, target_entry, target_row, rows);
  }
  std::vector<float> values(static_cast<std::size_t>(rows * from.cols));
  read_f32(from, row, rows, values.data());
  target.write_rows(layout.entries[target_entry], target_row, rows, values.data());
  return checksum_rows(target, target_entry, target_row, rows);
}

std::int64_t piece_bytes(const ArenaLayout& layout, const Piece& p) {
  const RowsView view = view_of(layout, nullptr, p);
  return travels_raw(view, p) ? rows_bytes(view, p.rows) : p.rows * view.cols * 4;
}

void pack_piece(const Arena& source, const Piece& p, std::byte* out) {
  const ArenaLayout& layout = source.layout();
  const RowsView view = view_of(layout, source.memory().data(), p);
  if (!travels_raw(view, p)) return read_f32(view, p.row, p.rows, reinterpret_cast<float*>(out));
  if (view.has_all_columns())
    return read_memory(view.place, out, row_data(view, p.row), rows_bytes(view, p.rows));
  const std::int64_t bytes = panel_bytes(view.element, view.cols);
  for (std::int64_t r = 0; r < p.rows; r += kPanel, out += bytes)
    std::memcpy(out, panel_data(view, p.row + r), static_cast<std::size_t>(bytes));
}

RowsView view_piece(const ArenaLayout& layout, const Piece& p, const std::byte* packed) {
  RowsView view = view_of(layout, nullptr, p);
  if (!travels_raw(view, p)) {
    view.layout = Layout::row_major;
    view.element = Element::f32;
  }
  view.place = Place::cpu;
  view.data = packed;
  view.first_row = -p.row;
  view.storage_rows = p.rows;
  view.first_col = 0;
  view.storage_cols = view.cols;
  return view;
}

RowsSum checksum_piece(const Arena& arena, const Piece& p) {
  const ArenaLayout& layout = arena.layout();
  const ArenaEntry& e = layout.entries[p.entry];
  const RowsView view = view_of(layout, arena.memory().data(), p);
  const std::int64_t first = e.global_row + p.row, row = p.row, rows = p.rows;
  std::uint32_t sums[2] = {0, 0};
  if (!view.has_all_columns() && are_panels(view)) {
    for (std::int64_t r = 0, n; r < rows; r += n) {
      const std::int64_t in_panel = (view.first_row + row + r) % kPanel;
      n = std::min(kPanel - in_panel, rows - r);
      kernels().checksum_panels(view.element, panel_data(view, row + r), view.cols, in_panel, n,
                                first + r, sums);
    }
    return {sums[0], sums[1]};
  }
  if (!view.has_all_columns()) {
    std::vector<float> values(static_cast<std::size_t>(rows * view.cols));
    read_f32(view, row, rows, values.data());
    return checksum_values(view.element, values.data(), rows, view.cols, first);
  }
  if (view.layout == Layout::panels) {
    kernels().checksum_panels(view.element, view.data, view.cols, view.first_row + row, rows, first,
                              sums);
  } else if (view.place == Place::cpu) {
    kernels().checksum_flat(view.element, row_data(view, row), rows, view.cols, first, sums);
  } else {
    std::vector<std::byte> host(static_cast<std::size_t>(rows_bytes(view, rows)));
    read_memory(view.place, host.data(), row_data(view, row), rows_bytes(view, rows));
    kernels().checksum_flat(view.element, host.data(), rows, view.cols, first, sums);
  }
  return {sums[0], sums[1]};
}

RowsSum checksum_flat_piece(const ArenaLayout& layout, std::span<const float> flat,
                            const Piece& p) {
  const ArenaEntry& e = layout.entries[p.entry];
  const std::int64_t width = layout.storages[e.storage].cols, cols = p.cols ? p.cols : width;
  const float* values = flat.data() + e.flat_begin + p.row * width;
  std::vector<float> some;
  if (cols < width) {
    some.resize(static_cast<std::size_t>(p.rows * cols));
    for (std::int64_t r = 0; r < p.rows; ++r)
      std::copy_n(values + r * width + p.col, cols, some.data() + r * cols);
    values = some.data();
  }
  return checksum_values(layout.element, values, p.rows, cols, e.global_row + p.row);
}

std::optional<WordsPiece> device_words(const RowsView& v, std::int64_t row, std::int64_t rows,
                                       std::int64_t global_row) {
  const std::int64_t size = size_of(v.element), row_bytes = v.cols * size;
  // Rows of an odd number of bf16 end in half a word.
  if (v.place != Place::cuda || row_bytes % 4 != 0 || v.first_col * size % 4 != 0 ||
      v.storage_cols * size % 4 != 0)
    return std::nullopt;
  const std::int64_t words = row_bytes / 4, pitch = v.storage_cols * size / 4;
  const std::byte* data = v.data + ((v.first_row + row) * v.storage_cols + v.first_col) * size;
  WordsPiece piece{.data = data,
                   .rows = rows,
                   .row_words = words,
                   .pitch_words = pitch,
                   .first_index = global_row * words};
  if (pitch == words) {  // one stretch
    piece.row_words = piece.pitch_words = rows * words;
    piece.rows = 1;
  }
  return piece;
}

std::vector<RowsSum> checksum_pieces(const Arena& arena, std::span<const Piece> pieces) {
  std::vector<RowsSum> out(pieces.size());
  const ArenaLayout& layout = arena.layout();
  std::vector<WordsPiece> jobs;
  std::vector<std::size_t> which;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const Piece& p = pieces[i];
    const auto job = device_words(view_of(layout, arena.memory().data(), p), p.row, p.rows,
                                  layout.entries[p.entry].global_row + p.row);
    if (!job) {
      out[i] = checksum_piece(arena, p);
      continue;
    }
    jobs.push_back(*job);
    which.push_back(i);
  }
  if (jobs.empty()) return out;
  std::vector<std::uint32_t> sums(2 * jobs.size());
  cuda_part().sum_words(jobs.data(), std::ssize(jobs), sums.data());
  for (std::size_t i = 0; i < jobs.size(); ++i) out[which[i]] = {sums[2 * i], sums[2 * i + 1]};
  return out;
}

}  // namespace tandem
