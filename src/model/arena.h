// The weight arena: one allocation that holds the compute weights of a role, in the kernels' own
// layout, and the table that says where each Hugging Face tensor lies in it.
//
// A *storage* is what one kernel call reads: a matrix (q, k and v fused; gate and up fused), on the
// CPU in panels, on a GPU row-major, or a row-major vector. An *entry* is a Hugging Face tensor, or
// consecutive rows of one: a range of rows of one storage. The flat parameter vector (gradients,
// master weights, moments) holds the storages' logical rows in table order, row-major and without
// padding, so an entry and a fused storage are both contiguous there. Tied heads have no entry of
// their own.
//
// With tensor parallelism matrices are cut by output rows, so a rank's entry is rows [global_row,
// global_row + rows) of the Hugging Face tensor; a tensor that the files hold fused (qkv_proj) then
// has an entry for each of its parts. Where there are more ranks than key/value heads, several
// ranks hold the same head. ShardRule::row_parallel cuts some matrices by columns instead: their
// storage's cols begin at global_col of the tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/hf_config.h"
#include "model/parameters.h"
#include "ops/place.h"
#include "ops/weight.h"

namespace tandem {

enum class Layout : std::uint8_t { row_major, panels };

inline constexpr std::int64_t kArenaAlignment = 4096;  // of storages: they begin at pages

struct ArenaStorage {
  std::string name;  // "layers.3.qkv"
  bool matrix = false;
  Layout layout = Layout::row_major;
  std::int64_t rows = 0, cols = 0;  // vectors: [1, n]
  std::int64_t whole_rows = 0;      // over all tensor-parallel ranks
  std::int64_t offset_bytes = 0, bytes = 0;
  std::int64_t flat_begin = 0;  // of its rows·cols elements in the flat vector
};

struct ArenaEntry {
  std::string hf_name;
  std::vector<std::int64_t> hf_shape;
  std::int64_t storage = 0;
  std::int64_t row_begin = 0, rows = 0;  // in the storage
  std::int64_t global_row = 0;           // first row in the Hugging Face tensor
  std::int64_t global_col = 0;           // first column there of the storage's cols
  std::int64_t flat_begin = 0;           // of its rows·cols elements
};

struct ArenaLayout {
  Element element = Element::f32;
  Place place = Place::cpu;
  ShardRule rule = ShardRule::exact;
  std::vector<ArenaStorage> storages;
  std::vector<ArenaEntry> entries;
  std::int64_t bytes = 0;
  std::int64_t flat_elements = 0;
};

// The table for one tensor-parallel rank. Pure. Error where tensor_parallel_fault() finds one.
ArenaLayout make_arena_layout(const ModelConfig& config, Element element, std::int64_t tp_rank = 0,
                              std::int64_t tp_size = 1, Place place = Place::cpu,
                              ShardRule rule = ShardRule::exact);

class Arena {
 public:
  // shared: other processes of this host may map it (Memory).
  explicit Arena(ArenaLayout layout, bool shared = false);

  const ArenaLayout& layout() const { return layout_; }
  Place place() const { return layout_.place; }
  std::int64_t version() const { return version_; }
  const std::int64_t* version_address() const { return &version_; }
  void set_version(std::int64_t version) { version_ = version; }

  const Memory& memory() const { return memory_; }
  // Exchanges the content of two arenas of one layout without copying. Whoever keeps addresses
  // (Model) must ask for them anew.
  void swap_memory(Arena& other) noexcept { memory_.swap(other.memory_); }

  void* storage_data(std::int64_t storage) const;
  // Index by name; Error if there is none.
  std::int64_t storage_index(std::string_view name) const;

  // Rows of an entry (row 0 is its first local row) from and to row-major f32 of the host.
  void write_rows(const ArenaEntry& entry, std::int64_t row, std::int64_t rows,
                  const float* source);
  void read_rows(const ArenaEntry& entry, std::int64_t row, std::int64_t rows, float* target) const;
  // Elements [begin, end) of the flat vector, f32; cut to whole rows by the caller's choice of
  // ranges is not needed. `source` points at element `begin` and lies where the arena does.
  void write_flat(std::int64_t begin, std::int64_t end, const float* source);
  // Where each storage's elements of the flat vector lie, in order; of a bf16 arena on a GPU, where
  // every storage is one stretch.
  std::vector<ArenaPiece> gpu_pieces() const;
  // All elements, in flat order, to the host.
  void read_flat(float* target) const;

 private:
  std::byte* row_address(const ArenaEntry& entry, std::int64_t row) const;
  void copy_rows(const ArenaEntry& entry, std::int64_t row, std::int64_t rows, const float* source);

  ArenaLayout layout_;
  Memory memory_;
  std::int64_t version_ = 0;
};

}  // namespace tandem
