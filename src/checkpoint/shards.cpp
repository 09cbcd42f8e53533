// Rank files of a checkpoint, out and in. See shards.h.
#include "checkpoint/shards.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/xxh3.h"

namespace tandem {
namespace {

constexpr const char* kFormat = "tandem-shard-1";
constexpr std::int64_t kElementsAtOnce = 4 << 20;

std::span<const std::byte> header_bytes(std::span<const std::byte> file,
                                        const SafetensorsHeader& header) {
  return file.first(header.data_begin);
}

// Whole rows keep the tensor's inner dimensions, anything else is a plain run.
std::vector<std::int64_t> stored_shape(const ShardPiece& piece) {
  const std::int64_t count = piece.elements;
  if (piece.shape.empty() || piece.shape.front() == 0) return {count};
  const std::int64_t row = shape_elements(piece.shape) / piece.shape.front();
  if (row == 0 || count % row != 0 || piece.offset % row != 0) return {count};
  std::vector<std::int64_t> shape = piece.shape;
  shape.front() = count / row;
  return shape;
}

// The faults of a mapped file beyond its own format: cut short, or not the one that was written.
std::string file_fault(const std::string& path, std::span<const std::byte> bytes,
                       const ShardFile& wanted, SafetensorsHeader& header) {
  if (bytes.size() != wanted.bytes)
    return fmt::format("{}: {} bytes found, {} were written{}", path, bytes.size(), wanted.bytes,
                       bytes.empty() ? " (the file is empty)" : "");
  std::vector<std::string> faults;
  header = parse_safetensors(bytes, path, faults);
  if (!faults.empty()) return faults.front();
  if (xxh3_hex(header_bytes(bytes, header)) != wanted.header_xxh3)
    return fmt::format("{}: its header is not the one that was written (damaged on disk)", path);
  return {};
}

}  // namespace

Json to_json(const ShardFile& file) {
  return {{"name", file.name}, {"bytes", file.bytes}, {"header_xxh3", file.header_xxh3}};
}

ShardFile shard_file_from_json(const Json& json, std::string_view where) {
  ShardFile file{.name = require<std::string>(json, "name", where),
                 .bytes = require<std::uint64_t>(json, "bytes", where),
                 .header_xxh3 = require<std::string>(json, "header_xxh3", where)};
  TD_CHECK(file.name.find('/') == std::string::npos && !file.name.starts_with('.'),
           "{}: name '{}' found, a file of the same folder wanted", where, file.name);
  return file;
}

ShardFile write_shard(const std::string& folder, int rank, int size,
                      std::span<const ShardPiece> pieces, const ReadPiece& read) {
  ShardFile file{.name = fmt::format("rank_{:05}_of_{:05}.safetensors", rank, size)};
  const std::string path = folder + "/" + file.name;
  std::vector<SafetensorsWriter::Tensor> tensors;
  Json table = Json::object();
  for (const ShardPiece& piece : pieces) {
    tensors.push_back({piece.name, Dtype::f32, stored_shape(piece)});
    table[piece.name] = {{"shape", piece.shape},
                         {"offset", piece.offset},
                         {"xxh3", std::string(16, '0')}};  // filled in below
  }
  const auto metadata = [&] {
    return SafetensorsMetadata{{"format", kFormat}, {"pieces", dump_json(table)}};
  };
  SafetensorsWriter writer(path, std::move(tensors), metadata());
  std::vector<float> values;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    Xxh3 sum;
    for (std::int64_t at = 0; at < pieces[i].elements; at += kElementsAtOnce) {
      values.resize(static_cast<std::size_t>(std::min(kElementsAtOnce, pieces[i].elements - at)));
      read(i, at, values);
      const auto bytes = std::as_bytes(std::span<const float>(values));
      sum.add(bytes);
      writer.write(pieces[i].name, static_cast<std::uint64_t>(at) * 4, bytes);
    }
    table[pieces[i].name]["xxh3"] = sum.hex();
  }
  writer.rewrite_metadata(metadata());
  file.bytes = writer.file_bytes();
  writer.finish();
  const MappedFile written(path);
  file.header_xxh3 =
      xxh3_hex(header_bytes(written.bytes(), parse_safetensors(written.bytes(), path)));
  return file;
}

std::string shard_fault(const std::string& folder, const ShardFile& file) {
  const std::string path = folder + "/" + file.name;
  if (!file_exists(path)) return path + ": missing";
  const MappedFile mapped(path);
  SafetensorsHeader header;
  return file_fault(path, mapped.bytes(), file, header);
}

ShardReader::ShardReader(std::string folder, std::span<const ShardFile> files)
    : folder_(std::move(folder)) {
  std::vector<std::string> faults;
  for (const ShardFile& file : files) add_file(file, faults);
  TD_CHECK(faults.empty(), "{}", fmt::join(faults, "\n"));
  for (auto& [name, pieces] : pieces_)
    std::sort(pieces.begin(), pieces.end(),
              [](const Piece& a, const Piece& b) { return a.offset < b.offset; });
}

void ShardReader::add_file(const ShardFile& file, std::vector<std::string>& faults) {
  const std::string path = folder_ + "/" + file.name;
  if (!file_exists(path)) {
    faults.push_back(path + ": missing");
    return;
  }
  const MappedFile& mapped = files_.emplace_back(path);
  SafetensorsHeader header;
  if (std::string fault = file_fault(path, mapped.bytes(), file, header); !fault.empty()) {
    faults.push_back(std::move(fault));
    return;
  }
  const auto text = header.metadata.find("pieces");
  TD_CHECK(text != header.metadata.end(), "{}: its metadata has no 'pieces'; not a checkpoint's",
           path);
  const Json table = parse_json(text->second, path + ": pieces");
  for (const SafetensorsEntry& entry : header.entries) {
    const std::string where = fmt::format("{}: pieces: {}", path, entry.name);
    const Json row = require<Json>(table, entry.name, path + ": pieces");
    TD_CHECK(entry.dtype == Dtype::f32, "{}: {} found, F32 wanted", where, dtype_name(entry.dtype));
    pieces_[entry.name].push_back({.file = path,
                                   .shape = require<std::vector<std::int64_t>>(row, "shape", where),
                                   .offset = require<std::int64_t>(row, "offset", where),
                                   .xxh3 = require<std::string>(row, "xxh3", where),
                                   .bytes = header.bytes(mapped.bytes(), entry)});
  }
}

void ShardReader::check_bytes(std::string_view name, const Piece& piece) const {
  TD_CHECK(xxh3_hex(piece.bytes) == piece.xxh3,
           "{}: tensor '{}': its bytes are not those that were written (damaged on disk)",
           piece.file, name);
}

std::vector<std::string> ShardReader::damage() const {
  std::vector<std::string> faults;
  for (const auto& [name, pieces] : pieces_)
    for (const Piece& piece : pieces)
      if (xxh3_hex(piece.bytes) != piece.xxh3)
        faults.push_back(fmt::format("{}: tensor '{}': its bytes are not those that were written",
                                     piece.file, name));
  return faults;
}

void ShardReader::read(std::string_view name, std::span<const std::int64_t> shape,
                       std::int64_t offset, std::span<float> out) const {
  const auto found = pieces_.find(name);
  TD_CHECK(found != pieces_.end(), "{}: no tensor '{}'; another model's checkpoint?", folder_,
           name);
  const std::int64_t end = offset + static_cast<std::int64_t>(out.size());
  std::int64_t at = offset;
  for (const Piece& piece : found->second) {
    TD_CHECK(std::equal(piece.shape.begin(), piece.shape.end(), shape.begin(), shape.end()),
             "{}: tensor '{}' has shape {}, the model's is {}; another model's checkpoint?",
             piece.file, name, shape_text(piece.shape), shape_text(shape));
    if (piece.end() <= at || piece.offset >= end) continue;
    if (piece.offset > at) break;
    if (piece.offset >= offset) check_bytes(name, piece);
    const std::int64_t count = std::min(end, piece.end()) - at;
    std::memcpy(out.data() + (at - offset), piece.bytes.data() + (at - piece.offset) * 4,
                static_cast<std::size_t>(count) * 4);
    at += count;
  }
  TD_CHECK(at == end, "{}: tensor '{}': no file holds its element {}", folder_, name, at);
}

}  // namespace tandem
