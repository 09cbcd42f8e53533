// Parsing, encoding and streaming of the safetensors format; the layout rules are in the header
// file.
#include "base/safetensors.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>
#include <set>
#include <utility>

#include "base/check.h"
#include "base/json.h"

namespace tandem {
namespace {

// The format's own limit on a header; a length beyond it is a broken file, not a big model.
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kAlignment = 8;

struct DtypeRow {
  Dtype dtype;
  std::string_view name;
  std::int64_t bytes;
};

constexpr std::array<DtypeRow, 15> kDtypes = {{
    {Dtype::boolean, "BOOL", 1},
    {Dtype::u8, "U8", 1},
    {Dtype::i8, "I8", 1},
    {Dtype::f8_e5m2, "F8_E5M2", 1},
    {Dtype::f8_e4m3, "F8_E4M3", 1},
    {Dtype::i16, "I16", 2},
    {Dtype::u16, "U16", 2},
    {Dtype::f16, "F16", 2},
    {Dtype::bf16, "BF16", 2},
    {Dtype::i32, "I32", 4},
    {Dtype::u32, "U32", 4},
    {Dtype::f32, "F32", 4},
    {Dtype::f64, "F64", 8},
    {Dtype::i64, "I64", 8},
    {Dtype::u64, "U64", 8},
}};

const DtypeRow& dtype_row(Dtype dtype) { return kDtypes[static_cast<std::size_t>(dtype)]; }

// false when the product leaves 63 bits.
bool checked_bytes(std::span<const std::int64_t> shape, Dtype dtype, std::uint64_t& out) {
  std::uint64_t bytes = static_cast<std::uint64_t>(dtype_bytes(dtype));
  for (std::int64_t size : shape) {
    if (size < 0) return false;
    if (size != 0 &&
        bytes > std::numeric_limits<std::int64_t>::max() / static_cast<std::uint64_t>(size)) {
      return false;
    }
    bytes *= static_cast<std::uint64_t>(size);
  }
  out = bytes;
  return true;
}

bool read_unsigned(const Json& value, std::int64_t& out) {
  if (!value.is_number_unsigned()) return false;
  const auto number = value.get<std::uint64_t>();
  if (number > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) return false;
  out = static_cast<std::int64_t>(number);
  return true;
}

bool read_unsigned_list(const Json& value, std::vector<std::int64_t>& out) {
  if (!value.is_array()) return false;
  for (const auto& item : value) {
    out.emplace_back();
    if (!read_unsigned(item, out.back())) return false;
  }
  return true;
}

// One tensor's JSON → entry; the fault's text (without the path) if it is not sound.
std::string read_entry(const std::string& name, const Json& value, std::uint64_t data_bytes,
                       SafetensorsEntry& entry) {
  entry.name = name;
  const auto field = [&](const char* key) {
    return value.is_object() && value.contains(key) ? value[key] : Json();
  };
  const Json dtype = field("dtype");
  if (!dtype.is_string()) return fmt::format("tensor '{}': no dtype in the header", name);
  if (!parse_dtype(dtype.get_ref<const std::string&>(), entry.dtype)) {
    std::string known;
    for (const DtypeRow& row : kDtypes) known += fmt::format(" {}", row.name);
    return fmt::format("tensor '{}': unknown dtype '{}' (known:{})", name,
                       dtype.get_ref<const std::string&>(), known);
  }
  if (!read_unsigned_list(field("shape"), entry.shape)) {
    return fmt::format("tensor '{}': shape is {}, wanted a list of sizes", name,
                       field("shape").dump());
  }
  std::vector<std::int64_t> offsets;
  if (!read_unsigned_list(field("data_offsets"), offsets) || offsets.size() != 2 ||
      offsets[0] > offsets[1]) {
    return fmt::format("tensor '{}': data_offsets is {}, wanted [begin, end]", name,
                       field("data_offsets").dump());
  }
  entry.begin = static_cast<std::uint64_t>(offsets[0]);
  entry.end = static_cast<std::uint64_t>(offsets[1]);
  std::uint64_t wanted = 0;
  if (!checked_bytes(entry.shape, entry.dtype, wanted)) {
    return fmt::format("tensor '{}': shape {} is beyond any memory", name, shape_text(entry.shape));
  }
  if (entry.num_bytes() != wanted) {
    return fmt::format("tensor '{}': {} {} needs {} bytes, its offsets [{}, {}] hold {}", name,
                       dtype_name(entry.dtype), shape_text(entry.shape), wanted, entry.begin,
                       entry.end, entry.num_bytes());
  }
  if (entry.end > data_bytes) {
    return fmt::format(
        "tensor '{}': ends at byte {} of the data, the file holds {} (truncated? copy the file "
        "again)",
        name, entry.end, data_bytes);
  }
  return {};
}

// Sound entries must tile [0, data_bytes) exactly.
void check_tiling(const std::vector<SafetensorsEntry>& entries, std::uint64_t data_bytes,
                  std::string_view path, std::vector<std::string>& faults) {
  std::uint64_t at = 0;
  std::string_view before = "the header";
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin < at) {
      faults.push_back(
          fmt::format("{}: tensor '{}' begins at byte {}, inside '{}' which ends at {}", path,
                      entry.name, entry.begin, before, at));
    } else if (entry.begin > at) {
      faults.push_back(
          fmt::format("{}: {} bytes between '{}' (ends at {}) and '{}' (begins at {}) belong to no "
                      "tensor",
                      path, entry.begin - at, before, at, entry.name, entry.begin));
    }
    if (entry.end >= at) {
      at = entry.end;
      before = entry.name;
    }
  }
  if (at < data_bytes) {
    faults.push_back(
        fmt::format("{}: {} bytes after the last tensor '{}' belong to no tensor (it "
                    "ends at {}, the data at {})",
                    path, data_bytes - at, before, at, data_bytes));
  }
}

// The header's JSON text, or nothing with a fault.
std::string_view header_text(std::span<const std::byte> file, std::string_view path,
                             std::vector<std::string>& faults) {
  if (file.size() < kLengthBytes) {
    faults.push_back(
        fmt::format("{}: {} bytes long, a safetensors file begins with 8 bytes of header "
                    "length",
                    path, file.size()));
    return {};
  }
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    length |= static_cast<std::uint64_t>(file[i]) << (8 * i);
  }
  if (length > kMaxHeaderBytes || length > file.size() - kLengthBytes) {
    if (length >> 32 != 0) {
      faults.push_back(fmt::format(
          "{}: no safetensors file: it does not begin with the length of a header", path));
      return {};
    }
    faults.push_back(
        fmt::format("{}: header of {} bytes, but the file has {} and a header at most {} "
                    "(truncated, or not a safetensors file)",
                    path, length, file.size(), kMaxHeaderBytes));
    return {};
  }
  return {reinterpret_cast<const char*>(file.data()) + kLengthBytes, length};
}

Json parse_header_json(std::string_view text, std::string_view path,
                       std::vector<std::string>& faults) {
  std::set<std::string> seen;
  const auto see_duplicates = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth == 1 && event == Json::parse_event_t::key &&
        !seen.insert(parsed.get<std::string>()).second) {
      faults.push_back(fmt::format("{}: tensor '{}' stands twice in the header", path,
                                   parsed.get_ref<const std::string&>()));
    }
    return true;
  };
  Json json = Json::parse(text.begin(), text.end(), see_duplicates, false);
  if (!json.is_object()) {
    faults.push_back(
        fmt::format("{}: the header's {} bytes are not a JSON object", path, text.size()));
    return Json();
  }
  return json;
}

// Lays entries out by element size, then name; fills offsets. Returns the bytes of the data.
std::uint64_t lay_out(std::vector<SafetensorsEntry>& entries, std::string_view where) {
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    const std::int64_t size_a = dtype_bytes(a.dtype), size_b = dtype_bytes(b.dtype);
    return size_a != size_b ? size_a > size_b : a.name < b.name;
  });
  std::set<std::string_view> seen;
  std::uint64_t at = 0;
  for (SafetensorsEntry& entry : entries) {
    TD_CHECK(seen.insert(entry.name).second, "{}: tensor '{}' is given twice", where, entry.name);
    std::uint64_t bytes = 0;
    TD_CHECK(checked_bytes(entry.shape, entry.dtype, bytes), "{}: tensor '{}' has the shape {}",
             where, entry.name, shape_text(entry.shape));
    entry.begin = at;
    at += bytes;
    entry.end = at;
  }
  return at;
}

// Length and JSON, padded with spaces so that the data begins at a multiple of 8.
std::string encode_header(std::span<const SafetensorsEntry> entries,
                          const SafetensorsMetadata& metadata) {
  // Put together by hand: the library's ordered object would search linearly for each key.
  std::string text = "{";
  if (!metadata.empty()) text += fmt::format("\"__metadata__\":{}", dump_json(Json(metadata)));
  for (const SafetensorsEntry& entry : entries) {
    text +=
        fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                    text.size() > 1 ? "," : "", dump_json(Json(entry.name)),
                    dtype_name(entry.dtype), fmt::join(entry.shape, ","), entry.begin, entry.end);
  }
  text += "}";
  text.append((kAlignment - text.size() % kAlignment) % kAlignment, ' ');
  std::string out;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    out.push_back(static_cast<char>((text.size() >> (8 * i)) & 0xff));
  }
  return out + text;
}

void write_fully(int fd, std::span<const std::byte> data, std::uint64_t at, std::string_view path) {
  while (!data.empty()) {
    const ssize_t n = ::pwrite(fd, data.data(), data.size(), static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    TD_CHECK(n > 0, "{}: cannot write {} bytes at {}: {}", path, data.size(), at,
             n < 0 ? errno_text(errno) : std::string("no progress"));
    data = data.subspan(static_cast<std::size_t>(n));
    at += static_cast<std::uint64_t>(n);
  }
}

}  // namespace

std::int64_t dtype_bytes(Dtype dtype) { return dtype_row(dtype).bytes; }
std::string_view dtype_name(Dtype dtype) { return dtype_row(dtype).name; }

bool parse_dtype(std::string_view name, Dtype& out) {
  for (const DtypeRow& row : kDtypes) {
    if (row.name == name) {
      out = row.dtype;
      return true;
    }
  }
  return false;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

std::int64_t shape_elements(std::span<const std::int64_t> shape) {
  std::int64_t elements = 1;
  for (std::int64_t size : shape) elements *= size;
  return elements;
}

const SafetensorsEntry* SafetensorsHeader::find(std::string_view name) const {
  const auto it = std::find_if(entries.begin(), entries.end(),
                               [&](const SafetensorsEntry& entry) { return entry.name == name; });
  return it == entries.end() ? nullptr : &*it;
}

SafetensorsHeader parse_safetensors(std::span<const std::byte> file, std::string_view path,
                                    std::vector<std::string>& faults) {
  SafetensorsHeader header;
  const std::size_t faults_before = faults.size();
  const std::string_view text = header_text(file, path, faults);
  if (faults.size() != faults_before) return header;
  const Json json = parse_header_json(text, path, faults);
  if (json.is_null()) return header;

  header.data_begin = kLengthBytes + text.size();
  const std::uint64_t data_bytes = file.size() - header.data_begin;
  bool all_sound = true;
  for (const auto& [name, value] : json.items()) {
    if (name == "__metadata__") {
      for (const auto& [key, item] : value.items()) {
        if (item.is_string()) {
          header.metadata[key] = item.get<std::string>();
        } else {
          faults.push_back(
              fmt::format("{}: __metadata__ '{}' is {}, wanted text", path, key, item.dump()));
        }
      }
      continue;
    }
    SafetensorsEntry entry;
    std::string fault = read_entry(name, value, data_bytes, entry);
    if (fault.empty()) {
      header.entries.push_back(std::move(entry));
    } else {
      faults.push_back(fmt::format("{}: {}", path, fault));
      all_sound = false;
    }
  }
  std::sort(header.entries.begin(), header.entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  // With an unsound entry its bytes would show up a second time, as a gap.
  if (all_sound) check_tiling(header.entries, data_bytes, path, faults);
  return header;
}

SafetensorsHeader parse_safetensors(std::span<const std::byte> file, std::string_view path) {
  std::vector<std::string> faults;
  SafetensorsHeader header = parse_safetensors(file, path, faults);
  TD_CHECK(faults.empty(), "{}", fmt::join(faults, "\n"));
  return header;
}

std::string encode_safetensors(std::span<const TensorView> tensors,
                               const SafetensorsMetadata& metadata) {
  std::vector<SafetensorsEntry> entries;
  std::map<std::string_view, std::span<const std::byte>> data;
  for (const TensorView& tensor : tensors) {
    entries.push_back({tensor.name, tensor.dtype, tensor.shape, 0, 0});
    data[tensor.name] = tensor.data;
  }
  const std::uint64_t data_bytes = lay_out(entries, "safetensors body");
  std::string body = encode_header(entries, metadata);
  body.reserve(body.size() + data_bytes);
  for (const SafetensorsEntry& entry : entries) {
    const std::span<const std::byte> bytes = data[entry.name];
    TD_CHECK(bytes.size() == entry.num_bytes(),
             "safetensors body: tensor '{}': {} {} needs {} bytes, {} given", entry.name,
             dtype_name(entry.dtype), shape_text(entry.shape), entry.num_bytes(), bytes.size());
    body.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  return body;
}

SafetensorsWriter::SafetensorsWriter(std::string path, std::vector<Tensor> tensors,
                                     const SafetensorsMetadata& metadata)
    : path_(std::move(path)), temporary_path_(path_ + ".part") {
  for (Tensor& tensor : tensors) {
    header_.entries.push_back(
        {std::move(tensor.name), tensor.dtype, std::move(tensor.shape), 0, 0});
  }
  lay_out(header_.entries, path_);
  for (std::size_t i = 0; i < header_.entries.size(); ++i) index_[header_.entries[i].name] = i;
  written_.assign(header_.entries.size(), 0);
  const std::string head = encode_header(header_.entries, metadata);
  header_.data_begin = head.size();
  header_.metadata = metadata;
  fd_ = Fd(::open(temporary_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  TD_CHECK(fd_, "{}: cannot create: {}", temporary_path_, errno_text(errno));
  write_fully(fd_.get(), std::as_bytes(std::span<const char>(head)), 0, temporary_path_);
}

SafetensorsWriter::~SafetensorsWriter() {
  if (fd_) ::unlink(temporary_path_.c_str());
}

std::uint64_t SafetensorsWriter::file_bytes() const {
  return header_.data_begin + (header_.entries.empty() ? 0 : header_.entries.back().end);
}

void SafetensorsWriter::write(std::string_view name, std::uint64_t offset,
                              std::span<const std::byte> data) {
  const auto it = index_.find(name);
  TD_CHECK(it != index_.end(), "{}: tensor '{}' was not announced to the writer", path_, name);
  const SafetensorsEntry& entry = header_.entries[it->second];
  TD_CHECK(offset <= entry.num_bytes() && data.size() <= entry.num_bytes() - offset,
           "{}: tensor '{}' has {} bytes, {} at offset {} do not fit", path_, name,
           entry.num_bytes(), data.size(), offset);
  write_fully(fd_.get(), data, header_.data_begin + entry.begin + offset, temporary_path_);
  written_[it->second] += data.size();
}

void SafetensorsWriter::rewrite_metadata(const SafetensorsMetadata& metadata) {
  const std::string head = encode_header(header_.entries, metadata);
  TD_CHECK(head.size() == header_.data_begin, "{}: a header of {} bytes found, {} wanted", path_,
           head.size(), header_.data_begin);
  write_fully(fd_.get(), std::as_bytes(std::span<const char>(head)), 0, temporary_path_);
  header_.metadata = metadata;
}

void SafetensorsWriter::finish() {
  TD_CHECK(fd_, "{}: finished twice", path_);
  for (std::size_t i = 0; i < written_.size(); ++i) {
    TD_CHECK(written_[i] == header_.entries[i].num_bytes(),
             "{}: tensor '{}' has {} bytes, {} written", path_, header_.entries[i].name,
             header_.entries[i].num_bytes(), written_[i]);
  }
  TD_CHECK(::fsync(fd_.get()) == 0, "{}: cannot sync: {}", temporary_path_, errno_text(errno));
  TD_CHECK(::rename(temporary_path_.c_str(), path_.c_str()) == 0, "{}: cannot rename {}: {}", path_,
           temporary_path_, errno_text(errno));
  fd_.close();
  const std::size_t slash = path_.rfind('/');
  sync_folder(slash == std::string::npos ? "." : path_.substr(0, slash + 1));
}

}  // namespace tandem
