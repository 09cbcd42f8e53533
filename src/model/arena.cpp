// Building the table from the list of weights, and moving rows in and out.
#include "model/arena.h"

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "ops/kernels/kernels.h"

namespace tandem {
namespace {

std::int64_t element_bytes(Element e) { return e == Element::f32 ? 4 : 2; }

// Places storages one after the other, each page-aligned.
class LayoutBuilder {
 public:
  LayoutBuilder(Element element, std::int64_t tp_rank, std::int64_t tp_size, Place place,
                ShardRule rule)
      : tp_rank_(tp_rank), tp_size_(tp_size) {
    layout_.element = element;
    layout_.place = place;
    layout_.rule = rule;
  }

  void add(const ModelWeight& weight) {
    const bool matrix = weight.kind == WeightKind::matrix;
    const bool panels = matrix && layout_.place == Place::cpu;
    const std::int64_t cols = cols_of_rank(weight, tp_size_, layout_.rule);
    storage_ = {.name = weight.name,
                .matrix = matrix,
                .layout = panels ? Layout::panels : Layout::row_major,
                .rows = 0,
                .cols = cols,
                .whole_rows = 0,
                .offset_bytes = layout_.bytes,
                .bytes = 0,
                .flat_begin = layout_.flat_elements};
    const std::size_t first_entry = layout_.entries.size();
    for (const WeightPart& part : weight.parts) {
      place(weight, part, first_entry);
      storage_.whole_rows += part.rows;
    }
    const std::int64_t size = element_bytes(layout_.element);
    if (storage_.layout == Layout::panels) {
      const std::int64_t k =
          layout_.element == Element::f32 ? storage_.cols : round_up(storage_.cols, 2);
      storage_.bytes = round_up(storage_.rows, kPanel) * k * size;
    } else {
      storage_.bytes = storage_.rows * storage_.cols * size;
    }
    layout_.bytes = round_up(layout_.bytes + storage_.bytes, kArenaAlignment);
    layout_.flat_elements += storage_.rows * storage_.cols;
    layout_.storages.push_back(std::move(storage_));
  }
  ArenaLayout take() { return std::move(layout_); }

 private:
  // This rank's rows of a part. Parts of one Hugging Face tensor that still follow each other there
  // and here (always on one rank) are one entry.
  void place(const ModelWeight& weight, const WeightPart& part, std::size_t first_entry) {
    // Ranks beyond the pieces that there are hold the same ones as their neighbours: all rows, or a
    // key/value head.
    const std::int64_t rows = rows_of_rank(weight, part, tp_size_, layout_.rule);
    const std::int64_t global_row = part.hf_row + tp_rank_ / (tp_size_ * rows / part.rows) * rows;
    auto& entries = layout_.entries;
    if (entries.size() > first_entry && entries.back().hf_name == part.hf_name &&
        entries.back().global_row + entries.back().rows == global_row) {
      entries.back().rows += rows;
    } else {
      entries.push_back({.hf_name = part.hf_name,
                         .hf_shape = hf_shape(weight, part),
                         .storage = static_cast<std::int64_t>(layout_.storages.size()),
                         .row_begin = storage_.rows,
                         .rows = rows,
                         .global_row = global_row,
                         .global_col = storage_.cols < weight.cols ? tp_rank_ * storage_.cols : 0,
                         .flat_begin = storage_.flat_begin + storage_.rows * storage_.cols});
    }
    storage_.rows += rows;
  }

  std::int64_t tp_rank_, tp_size_;
  ArenaLayout layout_;
  ArenaStorage storage_;
};

}  // namespace

ArenaLayout make_arena_layout(const ModelConfig& c, Element element, std::int64_t tp_rank,
                              std::int64_t tp_size, Place place, ShardRule rule) {
  TD_CHECK(tp_size >= 1 && tp_rank >= 0 && tp_rank < tp_size,
           "tensor-parallel rank {} of {}: a rank in [0, size) wanted", tp_rank, tp_size);
  const std::string fault = tensor_parallel_fault(c, tp_size, rule);
  TD_CHECK(fault.empty(), "weights: {}", fault);
  LayoutBuilder builder(element, tp_rank, tp_size, place, rule);
  for (const ModelWeight& weight : model_weights(c)) builder.add(weight);
  return builder.take();
}

Arena::Arena(ArenaLayout layout, bool shared)
    : layout_(std::move(layout)), memory_(layout_.place, layout_.bytes, "weight arena", shared) {}

void* Arena::storage_data(std::int64_t storage) const {
  return static_cast<std::byte*>(memory_.data()) + layout_.storages[storage].offset_bytes;
}

std::int64_t Arena::storage_index(std::string_view name) const {
  for (std::size_t i = 0; i < layout_.storages.size(); ++i)
    if (layout_.storages[i].name == name) return static_cast<std::int64_t>(i);
  throw Error(fmt::format("weight arena: no storage is called '{}'", name));
}

// Where rows of an entry lie in a row-major storage.
std::byte* Arena::row_address(const ArenaEntry& entry, std::int64_t row) const {
  return static_cast<std::byte*>(storage_data(entry.storage)) +
         (entry.row_begin + row) * layout_.storages[entry.storage].cols *
             element_bytes(layout_.element);
}

void Arena::write_rows(const ArenaEntry& entry, std::int64_t row, std::int64_t rows,
                       const float* source) {
  const ArenaStorage& s = layout_.storages[entry.storage];
  if (s.layout == Layout::panels) {
    kernels().write_panels(layout_.element, storage_data(entry.storage), s.cols,
                           entry.row_begin + row, rows, source);
    return;
  }
  const std::int64_t count = rows * s.cols;
  if (layout_.element == Element::f32) {
    write_memory(place(), row_address(entry, row), source, count * 4);
    return;
  }
  std::vector<bf16> narrow(static_cast<std::size_t>(count));
  kernels().to_bf16(source, narrow.data(), count);
  write_memory(place(), row_address(entry, row), narrow.data(), count * 2);
}

void Arena::read_rows(const ArenaEntry& entry, std::int64_t row, std::int64_t rows,
                      float* target) const {
  const ArenaStorage& s = layout_.storages[entry.storage];
  if (s.layout == Layout::panels) {
    kernels().read_panels(layout_.element, storage_data(entry.storage), s.cols,
                          entry.row_begin + row, rows, target);
    return;
  }
  const std::int64_t count = rows * s.cols;
  if (layout_.element == Element::f32) {
    read_memory(place(), target, row_address(entry, row), count * 4);
    return;
  }
  std::vector<bf16> narrow(static_cast<std::size_t>(count));
  read_memory(place(), narrow.data(), row_address(entry, row), count * 2);
  kernels().to_f32(narrow.data(), target, count);
}

// Rows from where the arena lies itself.
void Arena::copy_rows(const ArenaEntry& entry, std::int64_t row, std::int64_t rows,
                      const float* source) {
  if (place() == Place::cpu) return write_rows(entry, row, rows, source);
  const std::int64_t count = rows * layout_.storages[entry.storage].cols;
  const Kernels& k = kernels(place());
  if (layout_.element == Element::f32)
    k.copy_f32(source, reinterpret_cast<float*>(row_address(entry, row)), count);
  else
    k.to_bf16(source, reinterpret_cast<bf16*>(row_address(entry, row)), count);
}

void Arena::write_flat(std::int64_t begin, std::int64_t end, const float* source) {
  for (const ArenaEntry& e : layout_.entries) {
    const std::int64_t cols = layout_.storages[e.storage].cols;
    const std::int64_t b = std::max(begin, e.flat_begin);
    const std::int64_t f = std::min(end, e.flat_begin + e.rows * cols);
    if (b >= f) continue;
    TD_CHECK((b - e.flat_begin) % cols == 0 && (f - e.flat_begin) % cols == 0,
             "{}: flat range [{}, {}) cuts a row", e.hf_name, begin, end);
    copy_rows(e, (b - e.flat_begin) / cols, (f - b) / cols, source + (b - begin));
  }
}

std::vector<ArenaPiece> Arena::gpu_pieces() const {
  TD_CHECK(place() == Place::cuda && layout_.element == Element::bf16, "{}",
           "weight arena: pieces are those of a bf16 arena on a GPU");
  std::vector<ArenaPiece> pieces;
  for (std::size_t i = 0; i < layout_.storages.size(); ++i) {
    const ArenaStorage& s = layout_.storages[i];
    pieces.push_back({.begin = s.flat_begin,
                      .count = s.rows * s.cols,
                      .to = static_cast<bf16*>(storage_data(static_cast<std::int64_t>(i)))});
  }
  return pieces;
}

void Arena::read_flat(float* target) const {
  for (const ArenaEntry& e : layout_.entries) read_rows(e, 0, e.rows, target + e.flat_begin);
}

}  // namespace tandem
