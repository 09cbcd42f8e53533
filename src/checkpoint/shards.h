// The tensors of a checkpoint: one safetensors file a rank, read by any number of ranks.
//
// A file holds *pieces*: runs of elements of row-major tensors. A piece is called by its tensor's
// name; its stored shape is that of whole rows where it is whole rows, else one dimension. The
// file's metadata says for each piece the whole tensor's shape, the piece's first element in it and
// the XXH3 of its bytes ("pieces": {name: {shape, offset, xxh3}}), so a file explains itself and
// damage shows. Pieces of one tensor must not overlap between files and together cover it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "base/safetensors.h"

namespace tandem {

struct ShardPiece {
  std::string name;                 // of the tensor: "master.model.norm.weight"
  std::vector<std::int64_t> shape;  // of the whole tensor
  std::int64_t offset = 0;          // of the piece's first element in it, row-major
  std::int64_t elements = 0;        // not 0
};

// What is remembered of a written file, to tell later whether it is whole.
struct ShardFile {
  std::string name = {};  // "rank_00000_of_00002.safetensors"
  std::uint64_t bytes = 0;
  std::string header_xxh3 = {};  // of all bytes before the data
};

Json to_json(const ShardFile& file);
ShardFile shard_file_from_json(const Json& json, std::string_view where);

// Gives elements [begin, begin + out.size()) of piece number `piece`.
using ReadPiece = std::function<void(std::size_t piece, std::int64_t begin, std::span<float> out)>;

// Writes <folder>/rank_<rank>_of_<size>.safetensors, on disk when it returns. Values are asked for
// a bounded number at a time, each once.
ShardFile write_shard(const std::string& folder, int rank, int size,
                      std::span<const ShardPiece> pieces, const ReadPiece& read);

// What is wrong with a file by its length and header, or "": the data are not read.
std::string shard_fault(const std::string& folder, const ShardFile& file);

// All files of a checkpoint, mapped.
class ShardReader {
 public:
  // Throws one Error that lists every faulty file.
  ShardReader(std::string folder, std::span<const ShardFile> files);

  // Whether there is any piece of the tensor.
  bool has(std::string_view name) const { return pieces_.find(name) != pieces_.end(); }

  // Elements [offset, offset + out.size()) of a tensor of that shape. Each piece whose first
  // element lies in the range is checked whole against its XXH3, so ranks that read disjoint
  // ranges check every byte once. Errors: no such tensor, another shape, elements that no piece
  // holds, damaged bytes.
  void read(std::string_view name, std::span<const std::int64_t> shape, std::int64_t offset,
            std::span<float> out) const;

  // Checks every piece's bytes; the faults found, each naming file and tensor.
  std::vector<std::string> damage() const;

  struct Piece {
    std::string file;
    std::vector<std::int64_t> shape;  // of the whole tensor
    std::int64_t offset = 0;
    std::string xxh3;
    std::span<const std::byte> bytes;  // f32, in the mapped file

    std::int64_t end() const { return offset + static_cast<std::int64_t>(bytes.size() / 4); }
  };
  // Pieces by tensor, in the order of their offsets.
  const std::map<std::string, std::vector<Piece>, std::less<>>& pieces() const { return pieces_; }

 private:
  void add_file(const ShardFile& file, std::vector<std::string>& faults);
  void check_bytes(std::string_view name, const Piece& piece) const;

  std::string folder_;
  std::vector<MappedFile> files_;
  std::map<std::string, std::vector<Piece>, std::less<>> pieces_;
};

}  // namespace tandem
