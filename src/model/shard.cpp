// Cutting a table into parts, and laying layers into slots.
#include "model/shard.h"

#include <algorithm>
#include <optional>

#include "base/check.h"
#include "model/parameters.h"
#include "ops/kernels/kernels.h"

namespace tandem {
namespace {

std::int64_t end_of(const ArenaStorage& s) { return s.flat_begin + s.rows * s.cols; }

// The first place at or after `flat` where a part may end.
std::int64_t cut_at(const ArenaLayout& whole, std::int64_t flat) {
  for (const ArenaStorage& s : whole.storages) {
    if (flat >= end_of(s)) continue;
    if (flat <= s.flat_begin) return s.flat_begin;
    if (!s.matrix) return end_of(s);
    const std::int64_t rows = (flat - s.flat_begin + s.cols - 1) / s.cols;
    return s.flat_begin + std::min(s.rows, round_up(rows, kPanel)) * s.cols;
  }
  return whole.flat_elements;
}

// Bytes of `rows` rows of a storage that begin at a panel's border.
std::int64_t bytes_of(const ArenaStorage& s, std::int64_t rows) {
  return s.layout == Layout::panels ? s.bytes / round_up(s.rows, kPanel) * round_up(rows, kPanel)
                                    : s.bytes / s.rows * rows;
}

}  // namespace

std::vector<FlatRange> shard_ranges(const ArenaLayout& whole, std::int64_t num_ranks) {
  std::vector<FlatRange> out;
  std::int64_t begin = 0;
  for (std::int64_t r = 1; r <= num_ranks; ++r) {
    const std::int64_t end = cut_at(whole, whole.flat_elements / num_ranks * r +
                                               whole.flat_elements % num_ranks * r / num_ranks);
    out.push_back({begin, end});
    begin = end;
  }
  return out;
}

ArenaLayout make_shard_layout(const ArenaLayout& whole, FlatRange range) {
  ArenaLayout out{.element = whole.element,
                  .place = whole.place,
                  .rule = whole.rule,
                  .storages = {},
                  .entries = {},
                  .bytes = 0,
                  .flat_elements = range.size()};
  for (std::size_t i = 0; i < whole.storages.size(); ++i) {
    const ArenaStorage& s = whole.storages[i];
    const std::int64_t begin = std::max(range.begin, s.flat_begin);
    const std::int64_t end = std::min(range.end, end_of(s));
    if (begin >= end) continue;
    const std::int64_t first = (begin - s.flat_begin) / s.cols;
    const std::int64_t last = (end - s.flat_begin) / s.cols;
    TD_CHECK(begin == cut_at(whole, begin) && end == cut_at(whole, end),
             "{}: a shard of flat elements [{}, {}) cuts a panel", s.name, range.begin, range.end);
    ArenaStorage part = s;
    part.rows = last - first;
    part.offset_bytes = out.bytes;
    part.bytes = bytes_of(s, part.rows);
    part.flat_begin = begin - range.begin;
    for (const ArenaEntry& e : whole.entries) {
      if (e.storage != static_cast<std::int64_t>(i)) continue;
      const std::int64_t b = std::max(first, e.row_begin), f = std::min(last, e.row_begin + e.rows);
      if (b >= f) continue;
      ArenaEntry rows = e;
      rows.storage = static_cast<std::int64_t>(out.storages.size());
      rows.row_begin = b - first;
      rows.rows = f - b;
      rows.global_row = e.global_row + (b - e.row_begin);
      rows.flat_begin = part.flat_begin + (b - first) * s.cols;
      out.entries.push_back(std::move(rows));
    }
    out.bytes = round_up(out.bytes + part.bytes, kArenaAlignment);
    out.storages.push_back(std::move(part));
  }
  return out;
}

ArenaLayout make_slot_layout(const ArenaLayout& whole, std::int64_t num_slots) {
  ArenaLayout out = whole;
  out.bytes = 0;
  std::int64_t slot_bytes = 0, in_layer = 0, num_layers = 0;
  std::optional<std::int64_t> layer;
  for (ArenaStorage& s : out.storages) {
    if (layer_of(s.name) != layer) in_layer = 0;
    layer = layer_of(s.name);
    std::int64_t& at = layer ? in_layer : out.bytes;
    s.offset_bytes = at;
    at = round_up(at + s.bytes, kArenaAlignment);
    slot_bytes = std::max(slot_bytes, in_layer);
    if (layer) num_layers = std::max(num_layers, *layer + 1);
  }
  for (ArenaStorage& s : out.storages)
    if (const auto l = layer_of(s.name)) s.offset_bytes += out.bytes + *l % num_slots * slot_bytes;
  out.bytes += std::min(num_slots, num_layers) * slot_bytes;
  return out;
}

}  // namespace tandem
