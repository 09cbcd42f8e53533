// Rows between files and memory, a bounded number at a time, each rank just what it holds.
#include "checkpoint/weights.h"

#include <algorithm>
#include <map>
#include <vector>

#include "base/check.h"

namespace tandem {
namespace {

std::int64_t columns(const ArenaLayout& layout, const ArenaEntry& e) {
  return layout.storages[e.storage].cols;
}

// A vector is one row in the arena and `cols` rows of one element in the file; of rows that are cut
// by columns the file holds more.
void read_rows(const HfFolder& folder, const ArenaLayout& layout, const ArenaEntry& e,
               std::int64_t row, std::int64_t rows, float* out) {
  if (e.hf_shape.size() == 1 && layout.storages[e.storage].rows == 1)
    return folder.read_f32(e.hf_name, 0, e.hf_shape[0], out);
  const std::int64_t cols = columns(layout, e);
  if (e.hf_shape.size() == 1 || e.hf_shape[1] == cols)
    return folder.read_f32(e.hf_name, e.global_row + row, rows, out);
  std::vector<float> whole(static_cast<std::size_t>(rows * e.hf_shape[1]));
  folder.read_f32(e.hf_name, e.global_row + row, rows, whole.data());
  for (std::int64_t r = 0; r < rows; ++r)
    std::copy_n(whole.data() + r * e.hf_shape[1] + e.global_col, cols, out + r * cols);
}

constexpr std::int64_t kChunkElements = 1 << 22;

}  // namespace

void load_arena(const HfFolder& folder, Arena& arena) {
  std::vector<float> part;
  for (const ArenaEntry& e : arena.layout().entries) {
    const std::int64_t cols = columns(arena.layout(), e);
    // Whole panels at a time.
    const std::int64_t step =
        std::max<std::int64_t>(kPanel, kChunkElements / cols / kPanel * kPanel);
    for (std::int64_t row = 0; row < e.rows; row += step) {
      const std::int64_t rows = std::min(step, e.rows - row);
      part.resize(static_cast<std::size_t>(rows * cols));
      read_rows(folder, arena.layout(), e, row, rows, part.data());
      arena.write_rows(e, row, rows, part.data());
    }
  }
}

void load_flat(const HfFolder& folder, const ArenaLayout& layout, std::int64_t begin,
               std::int64_t end,
               const std::function<void(std::int64_t, std::span<const float>)>& take) {
  std::vector<float> part;
  for (const ArenaEntry& e : layout.entries) {
    const std::int64_t cols = columns(layout, e);
    const std::int64_t b = std::max(begin, e.flat_begin);
    const std::int64_t f = std::min(end, e.flat_begin + e.rows * cols);
    if (b >= f) continue;
    const std::int64_t row = (b - e.flat_begin) / cols;
    const std::int64_t rows = (f - e.flat_begin + cols - 1) / cols - row;
    part.resize(static_cast<std::size_t>(rows * cols));
    read_rows(folder, layout, e, row, rows, part.data());
    take(b, std::span<const float>(part).subspan(
                static_cast<std::size_t>(b - e.flat_begin - row * cols),
                static_cast<std::size_t>(f - b)));
  }
}

void save_flat(const std::string& target, const std::string& source, const ModelConfig& config,
               const ArenaLayout& layout, std::span<const float> flat) {
  TD_CHECK(static_cast<std::int64_t>(flat.size()) == layout.flat_elements,
           "{}: {} weights to save, the model has {}", target, flat.size(), layout.flat_elements);
  std::map<std::string, const ArenaEntry*> by_name;
  for (const ArenaEntry& e : layout.entries) by_name[e.hf_name] = &e;
  HfWriteOptions options;
  options.dtype = config.dtype == "float32" ? Dtype::f32 : Dtype::bf16;
  save_hf_folder(target, source, config, options,
                 [&](const std::string& name, std::int64_t row, std::int64_t rows, float* out) {
                   const ArenaEntry& e = *by_name.at(name);
                   const std::int64_t width = e.hf_shape.size() == 1 ? 1 : columns(layout, e);
                   std::copy_n(flat.data() + e.flat_begin + row * width, rows * width, out);
                 });
}

std::vector<FlatPiece> flat_pieces(const ArenaLayout& layout, std::int64_t begin,
                                   std::int64_t end) {
  std::vector<FlatPiece> pieces;
  for (const ArenaEntry& e : layout.entries) {
    const std::int64_t cols = columns(layout, e);
    const std::int64_t first = std::max(begin, e.flat_begin);
    const std::int64_t last = std::min(end, e.flat_begin + e.rows * cols);
    if (first < last)
      pieces.push_back({.entry = &e,
                        .offset = e.global_row * cols + (first - e.flat_begin),
                        .begin = first,
                        .elements = last - first});
  }
  return pieces;
}

}  // namespace tandem
