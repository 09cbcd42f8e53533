// The safetensors format without torch: 8 bytes of header length (little endian), a JSON header,
// the tensors' bytes. It is Tandem's form for weights on disk, for checkpoints and for batches in
// flight.
//
// Reading trusts nothing: after parse_safetensors() every entry lies inside the file, its byte
// count is shape × dtype, and the entries tile the data without overlap or gap. Writing is
// deterministic: the same tensors give the same bytes whatever the order in which they are named,
// because entries are laid out by element size (largest first, so every tensor stays aligned) and
// then by name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"

namespace tandem {

// Names in the file: BOOL U8 I8 F8_E5M2 F8_E4M3 I16 U16 F16 BF16 I32 U32 F32 F64 I64 U64.
enum class Dtype {
  boolean,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  f64,
  i64,
  u64
};

std::int64_t dtype_bytes(Dtype dtype);                // bytes of one element
std::string_view dtype_name(Dtype dtype);             // "BF16"
bool parse_dtype(std::string_view name, Dtype& out);  // false: not one of the names above

// "[576, 49152]"
std::string shape_text(std::span<const std::int64_t> shape);
// Number of elements; 1 for a scalar.
std::int64_t shape_elements(std::span<const std::int64_t> shape);

struct SafetensorsEntry {
  std::string name;
  Dtype dtype = Dtype::f32;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  // bytes from the start of the data, not of the file
  std::uint64_t end = 0;
  std::uint64_t num_bytes() const { return end - begin; }
};

using SafetensorsMetadata = std::map<std::string, std::string>;

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of their bytes
  SafetensorsMetadata metadata;           // __metadata__
  std::uint64_t data_begin = 0;           // offset of the data in the file

  const SafetensorsEntry* find(std::string_view name) const;  // null if absent
  // The bytes of an entry; file is the view that was parsed.
  std::span<const std::byte> bytes(std::span<const std::byte> file,
                                   const SafetensorsEntry& entry) const {
    return file.subspan(data_begin + entry.begin, entry.num_bytes());
  }
};

// Parses and validates the header of a whole file. `path` begins every error. The first form throws
// one Error that lists all faults; the second appends them to `faults` (one text each) and returns
// those entries that are sound.
SafetensorsHeader parse_safetensors(std::span<const std::byte> file, std::string_view path);
SafetensorsHeader parse_safetensors(std::span<const std::byte> file, std::string_view path,
                                    std::vector<std::string>& faults);

// A tensor to be written from memory: row-major bytes, exactly shape × dtype of them.
struct TensorView {
  std::string name;
  Dtype dtype = Dtype::f32;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> data;
};

template <typename T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span<const T>(values));
}

// The whole body in memory (what travels between driver and ranks). Throws Error on a byte count
// that is not shape × dtype, or a name given twice.
std::string encode_safetensors(std::span<const TensorView> tensors,
                               const SafetensorsMetadata& metadata = {});

// Writes a file whose tensors need not be in memory together. Bytes go to a temporary name beside
// `path`; finish() fsyncs and renames, so that `path` never names a half-written file. A writer
// that is destroyed before finish() removes its temporary file. Tensors, and parts of them, may be
// written in any order; finish() throws if any tensor got fewer or more bytes than it has.
class SafetensorsWriter {
 public:
  struct Tensor {
    std::string name;
    Dtype dtype = Dtype::f32;
    std::vector<std::int64_t> shape;
  };

  SafetensorsWriter(std::string path, std::vector<Tensor> tensors,
                    const SafetensorsMetadata& metadata = {});
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // Entries in the order of the file.
  std::span<const SafetensorsEntry> entries() const { return header_.entries; }
  std::uint64_t file_bytes() const;

  // Writes `data` at `offset` bytes from the start of tensor `name`.
  void write(std::string_view name, std::uint64_t offset, std::span<const std::byte> data);
  void write(std::string_view name, std::span<const std::byte> data) { write(name, 0, data); }

  // Replaces the metadata, for what is known only once the tensors are written (checksums). The
  // encoded header must keep its length: Error if not.
  void rewrite_metadata(const SafetensorsMetadata& metadata);

  void finish();

 private:
  std::string path_;
  std::string temporary_path_;
  SafetensorsHeader header_;
  std::map<std::string, std::size_t, std::less<>> index_;  // name → place in header_.entries
  std::vector<std::uint64_t> written_;                     // bytes got, by entry
  Fd fd_;
};

}  // namespace tandem
