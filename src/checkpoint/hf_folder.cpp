// Opening a model folder: map the files, account for every tensor, then hand out views. The writer
// is in hf_folder_writer.cpp.
#include "checkpoint/hf_folder.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <filesystem>
#include <optional>
#include <set>

#include "base/check.h"
#include "base/json.h"
#include "base/log.h"

namespace tandem {
namespace {

constexpr const char* kWholeFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr std::size_t kMaxFaultsShown = 60;

// The books of open(): what the model should have, what the files hold, and all that does not
// agree.
struct Accounts {
  explicit Accounts(std::string folder_path, const ModelConfig& model_config)
      : folder(std::move(folder_path)),
        expected(expected_tensors(model_config)),
        config(model_config) {
    for (const ExpectedTensor& tensor : expected) by_name[tensor.name] = &tensor;
  }

  std::string folder;
  std::vector<ExpectedTensor> expected;
  std::map<std::string_view, const ExpectedTensor*> by_name;
  std::map<std::string, std::string> index;              // tensor → file; empty for a single file
  std::vector<std::string> files;                        // names of the weight files to read
  std::map<std::string, HfTensor, std::less<>> tensors;  // sound and expected
  std::set<std::string, std::less<>> in_files;           // every name met
  std::set<std::string, std::less<>> excused;            // names that a fault covers already
  const ModelConfig& config;
  std::size_t num_buffers = 0;  // recomputable buffers met
  std::size_t num_extra = 0;    // tensors of the family's extra layers met
  std::vector<std::string> faults;
  std::vector<std::string> notices;

  template <typename... Args>
  void fault(fmt::format_string<Args...> text, Args&&... args) {
    faults.push_back(fmt::format(text, std::forward<Args>(args)...));
  }

  bool reads(std::string_view file) const {
    return std::find(files.begin(), files.end(), file) != files.end();
  }
};

std::vector<std::string> safetensors_files(const std::string& folder) {
  std::vector<std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".safetensors") out.push_back(entry.path().filename().string());
  }
  std::sort(out.begin(), out.end());
  return out;
}

void read_index(Accounts& accounts) {
  const std::string path = accounts.folder + "/" + kIndexFile;
  const Json map = require<Json>(read_json_file(path), "weight_map", path);
  TD_CHECK(map.is_object() && !map.empty(), "{}: weight_map is {}, wanted an object: tensor → file",
           path, map.dump());
  std::map<std::string, std::size_t> tensors_by_file;
  for (const auto& [tensor, file] : map.items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : std::string();
    if (name.empty() || name.find('/') != std::string::npos) {
      accounts.fault("{}: tensor '{}' is mapped to {}, wanted a file name of this folder", path,
                     tensor, file.dump());
      accounts.excused.insert(tensor);
      continue;
    }
    accounts.index[tensor] = name;
    ++tensors_by_file[name];
  }
  for (const auto& [file, tensors] : tensors_by_file) {
    if (file_exists(accounts.folder + "/" + file)) {
      accounts.files.push_back(file);
      continue;
    }
    accounts.fault("{}/{}: not found, but {} places {} tensors in it; download the shard again",
                   accounts.folder, file, kIndexFile, tensors);
    for (const auto& [tensor, place] : accounts.index) {
      if (place == file) accounts.excused.insert(tensor);
    }
  }
}

// Decides which files hold the weights.
void choose_files(Accounts& accounts) {
  const std::string& folder = accounts.folder;
  const std::vector<std::string> present = safetensors_files(folder);
  const bool whole = file_exists(folder + "/" + kWholeFile);
  if (file_exists(folder + "/" + kIndexFile)) {
    read_index(accounts);
    if (whole && !accounts.reads(kWholeFile)) {
      accounts.fault(
          "{}: holds both {} and a {} that does not name it; programs disagree which of them "
          "counts, remove one",
          folder, kWholeFile, kIndexFile);
    }
  } else {
    TD_CHECK(whole, "{}: no weights: wanted {} or {}, found {}{}", folder, kWholeFile, kIndexFile,
             present.empty() ? "no .safetensors file" : fmt::format("{}", fmt::join(present, ", ")),
             file_exists(folder + "/pytorch_model.bin")
                 ? "; convert pytorch_model.bin to safetensors"
                 : "");
    accounts.files.push_back(kWholeFile);
  }
  for (const std::string& file : present) {
    if (accounts.reads(file) || file == kWholeFile) continue;
    accounts.notices.push_back(fmt::format("{}/{}: ignored, {}", folder, file,
                                           accounts.index.empty()
                                               ? fmt::format("the weights are {}", kWholeFile)
                                               : fmt::format("{} does not name it", kIndexFile)));
  }
}

// One entry of a weight file against the index and the expected shapes. True: it is to be used.
bool account_for_entry(Accounts& accounts, const std::string& file, const SafetensorsEntry& entry) {
  const std::string path = accounts.folder + "/" + file;
  const auto wanted = accounts.by_name.find(entry.name);
  if (wanted == accounts.by_name.end() && is_recomputable_buffer(entry.name)) {
    ++accounts.num_buffers;
    return false;
  }
  if (is_extra_layer(accounts.config, entry.name)) {
    ++accounts.num_extra;
    return false;
  }
  if (!accounts.index.empty()) {
    const auto place = accounts.index.find(entry.name);
    if (place == accounts.index.end() || place->second != file) {
      accounts.fault(
          "{}: holds tensor '{}', which {} {}", path, entry.name, kIndexFile,
          place == accounts.index.end() ? "does not name" : "places in " + place->second);
      accounts.excused.insert(entry.name);
      return false;
    }
  }
  if (wanted == accounts.by_name.end()) {
    accounts.fault("{}: unexpected tensor '{}' {} {}: config.json describes no such tensor", path,
                   entry.name, dtype_name(entry.dtype), shape_text(entry.shape));
    return false;
  }
  const bool known_dtype =
      entry.dtype == Dtype::f32 || entry.dtype == Dtype::bf16 || entry.dtype == Dtype::f16;
  if (entry.shape != wanted->second->shape) {
    accounts.fault("{}: tensor '{}' is {}, config.json says {}", path, entry.name,
                   shape_text(entry.shape), shape_text(wanted->second->shape));
  }
  if (!known_dtype) {
    accounts.fault("{}: tensor '{}' has dtype {}, supported are F32, BF16, F16", path, entry.name,
                   dtype_name(entry.dtype));
  }
  const bool sound = known_dtype && entry.shape == wanted->second->shape;
  if (!sound) accounts.excused.insert(entry.name);
  return sound;
}

void account_for_file(Accounts& accounts, const std::string& file,
                      std::span<const std::byte> bytes) {
  const std::size_t faults_before = accounts.faults.size();
  const SafetensorsHeader header =
      parse_safetensors(bytes, accounts.folder + "/" + file, accounts.faults);
  if (accounts.faults.size() > faults_before) {
    // Whatever belongs into a broken file and was not read is covered by the file's own faults.
    for (const ExpectedTensor& tensor : accounts.expected) {
      const auto place = accounts.index.find(tensor.name);
      const bool belongs =
          accounts.index.empty() || (place != accounts.index.end() && place->second == file);
      if (belongs && header.find(tensor.name) == nullptr) accounts.excused.insert(tensor.name);
    }
  }
  for (const SafetensorsEntry& entry : header.entries) {
    accounts.in_files.insert(entry.name);
    if (account_for_entry(accounts, file, entry)) {
      accounts.tensors[entry.name] = {entry.name, entry.dtype, entry.shape,
                                      header.bytes(bytes, entry)};
    }
  }
}

void account_for_missing(Accounts& accounts) {
  for (const auto& [tensor, file] : accounts.index) {
    if (accounts.in_files.contains(tensor) || accounts.excused.contains(tensor)) continue;
    accounts.fault("{}/{}: tensor '{}' is not in it, but {} places it there", accounts.folder, file,
                   tensor, kIndexFile);
    accounts.excused.insert(tensor);
  }
  for (const ExpectedTensor& tensor : accounts.expected) {
    if (!tensor.copy_of.empty() || accounts.tensors.contains(tensor.name) ||
        accounts.excused.contains(tensor.name))
      continue;
    accounts.fault(
        "{}: tensor '{}' {} is in no file{}", accounts.folder, tensor.name,
        shape_text(tensor.shape),
        tensor.name == "lm_head.weight"
            ? "; config.json does not tie it to the embedding (tie_word_embeddings false)"
            : "");
  }
}

// Where two tensors of one shape differ first, by value: bytes of different types may mean the
// same.
std::optional<std::int64_t> first_difference(const HfTensor& a, const HfTensor& b) {
  if (a.dtype == b.dtype && std::memcmp(a.data.data(), b.data.data(), b.data.size()) == 0)
    return std::nullopt;
  constexpr std::int64_t kChunk = 1 << 16;
  std::vector<float> left(kChunk), right(kChunk);
  const std::int64_t count = shape_elements(a.shape);
  for (std::int64_t at = 0; at < count; at += kChunk) {
    const std::int64_t n = std::min(kChunk, count - at);
    convert_to_f32(a.dtype, a.data.data() + at * dtype_bytes(a.dtype), n, left.data());
    convert_to_f32(b.dtype, b.data.data() + at * dtype_bytes(b.dtype), n, right.data());
    for (std::int64_t i = 0; i < n; ++i)
      if (!(left[i] == right[i])) return at + i;
  }
  return std::nullopt;
}

// A tied head that is stored as well must be the embedding; it is not used.
void account_for_copies(Accounts& accounts) {
  for (const ExpectedTensor& tensor : accounts.expected) {
    const auto copy = accounts.tensors.find(tensor.name);
    if (tensor.copy_of.empty() || copy == accounts.tensors.end()) continue;
    const auto original = accounts.tensors.find(tensor.copy_of);
    if (original != accounts.tensors.end()) {
      const HfTensor &a = copy->second, &b = original->second;
      const auto difference = first_difference(a, b);
      if (!difference) {
        accounts.notices.push_back(
            fmt::format("{}: '{}' ignored, it equals '{}' to which config.json ties it",
                        accounts.folder, tensor.name, tensor.copy_of));
      } else {
        accounts.fault(
            "{}: '{}' ({}) differs from '{}' ({}), first at element {}, but config.json ties them; "
            "set tie_word_embeddings false or remove the tensor",
            accounts.folder, tensor.name, dtype_name(a.dtype), tensor.copy_of, dtype_name(b.dtype),
            *difference);
      }
    }
    accounts.tensors.erase(copy);
  }
}

void throw_faults(const std::vector<std::string>& faults) {
  if (faults.empty()) return;
  const std::size_t shown = std::min(faults.size(), kMaxFaultsShown);
  std::string text = fmt::format("{}", fmt::join(std::span(faults).first(shown), "\n"));
  if (shown < faults.size()) text += fmt::format("\nand {} more faults", faults.size() - shown);
  throw Error(text);
}

float half_to_float(std::uint16_t half) {
  // Shift exponent and mantissa into place, then let one product fix the exponent's bias; it is
  // exact, subnormals included. Infinity and NaN keep the full exponent.
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t rest = static_cast<std::uint32_t>(half & 0x7fffu) << 13;
  float value;
  std::memcpy(&value, &rest, 4);
  value *= 0x1p112f;
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((half & 0x7c00u) == 0x7c00u) bits = rest | 0x7f800000u;
  bits |= sign;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace

void convert_to_f32(Dtype from, const std::byte* in, std::int64_t count, float* out) {
  // Tensor data may begin at any byte of a foreign file, hence the copies into aligned words.
  if (from == Dtype::f32) {
    std::memcpy(out, in, static_cast<std::size_t>(count) * 4);
    return;
  }
  assert(from == Dtype::bf16 || from == Dtype::f16);
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint16_t half;
    std::memcpy(&half, in + 2 * i, 2);
    if (from == Dtype::bf16) {
      const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
      std::memcpy(out + i, &bits, 4);
    } else {
      out[i] = half_to_float(half);
    }
  }
}

void convert_f32_to_bf16(const float* in, std::int64_t count, std::uint16_t* out) {
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, in + i, 4);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    out[i] = static_cast<std::uint16_t>(is_nan ? (bits >> 16) | 0x40u : rounded);
  }
}

HfFolder HfFolder::open(const std::string& folder) {
  return open(folder, read_model_config(folder));
}

HfFolder HfFolder::open(const std::string& folder, ModelConfig config) {
  HfFolder self(folder, std::move(config));
  Accounts accounts(folder, self.config_);
  choose_files(accounts);
  for (const std::string& file : accounts.files) {
    account_for_file(accounts, file, self.files_.emplace_back(folder + "/" + file).bytes());
  }
  account_for_missing(accounts);
  account_for_copies(accounts);
  throw_faults(accounts.faults);
  if (accounts.num_buffers > 0) {
    accounts.notices.push_back(
        fmt::format("{}: {} rotary buffers ignored, they are computed from config.json", folder,
                    accounts.num_buffers));
  }
  if (accounts.num_extra > 0) {
    accounts.notices.push_back(
        fmt::format("{}: {} tensors of the layers after layer {} ignored, num_nextn_predict_layers "
                    "names them and this program does not use them; a saved folder lacks them",
                    folder, accounts.num_extra, self.config_.num_layers - 1));
  }
  for (const std::string& notice : accounts.notices) TD_LOG(info, "{}", notice);
  for (const ExpectedTensor& tensor : accounts.expected) {
    if (tensor.copy_of.empty()) self.names_.push_back(tensor.name);
  }
  self.tensors_ = std::move(accounts.tensors);
  self.notices_ = std::move(accounts.notices);
  return self;
}

std::uint64_t HfFolder::total_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& [name, tensor] : tensors_) bytes += tensor.data.size();
  return bytes;
}

const HfTensor& HfFolder::tensor(std::string_view name) const {
  const auto it = tensors_.find(name);
  TD_CHECK(it != tensors_.end(), "{}: the model has no tensor '{}'", folder_, name);
  return it->second;
}

void HfFolder::read_f32(std::string_view name, std::int64_t row_begin, std::int64_t rows,
                        float* out) const {
  const HfTensor& found = tensor(name);
  TD_CHECK(row_begin >= 0 && rows >= 0 && row_begin <= found.rows() - rows,
           "{}: tensor '{}' has {} rows, {} from {} on were asked for", folder_, name, found.rows(),
           rows, row_begin);
  const std::int64_t row = found.row_elements();
  convert_to_f32(found.dtype, found.data.data() + row_begin * row * dtype_bytes(found.dtype),
                 rows * row, out);
}

std::vector<float> HfFolder::read_f32(std::string_view name) const {
  const HfTensor& found = tensor(name);
  std::vector<float> out(static_cast<std::size_t>(shape_elements(found.shape)));
  read_f32(name, 0, found.rows(), out.data());
  return out;
}

}  // namespace tandem
