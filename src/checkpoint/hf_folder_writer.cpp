// Writing a model folder: everything goes to <target>.part, is fsynced, and takes the target's name
// in one rename. An older folder under that name is exchanged with it and removed afterwards, so a
// crash at any moment leaves a whole folder under the name.

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>

#include "base/check.h"
#include "base/json.h"
#include "checkpoint/hf_folder.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kRowsAtOnceBytes = 16 << 20;
constexpr const char* kMoreTemplates = "additional_chat_templates";

// What a folder holds beside weights and is worth keeping: configs, tokenizer, templates, and the
// code that an auto_map of its config.json names.
bool is_side_file(const std::string& name) {
  constexpr std::array<std::string_view, 8> kNames = {"config.json",
                                                      "generation_config.json",
                                                      "special_tokens_map.json",
                                                      "added_tokens.json",
                                                      "vocab.json",
                                                      "vocab.txt",
                                                      "merges.txt",
                                                      "preprocessor_config.json"};
  const std::string_view view = name;
  return std::find(kNames.begin(), kNames.end(), view) != kNames.end() ||
         view.starts_with("tokenizer") || view.starts_with("chat_template") ||
         view.ends_with(".jinja") || view.ends_with(".tiktoken") || view.ends_with(".model") ||
         view.ends_with(".py");
}

std::string without_slash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

}  // namespace

void check_hf_target(const std::string& target) {
  TD_CHECK(!file_exists(target) || fs::is_directory(target), "{}: exists and is not a folder",
           target);
  TD_CHECK(!file_exists(target) || fs::is_empty(target) || file_exists(target + "/config.json"),
           "{}: exists and is not a model folder (no config.json); name another folder", target);
  const std::string parent = fs::absolute(target).parent_path().string();
  create_folders(parent);
  const std::string fault = why_not_writable(parent);
  TD_CHECK(fault.empty(), "{}: its folder {} cannot be written: {}", target, parent, fault);
}

HfFolderWriter::HfFolderWriter(std::string target, std::string source, const ModelConfig& config,
                               HfWriteOptions options)
    : target_(without_slash(std::move(target))),
      source_(without_slash(std::move(source))),
      temporary_(target_ + ".part"),
      options_(options) {
  TD_CHECK(options_.dtype == Dtype::bf16 || options_.dtype == Dtype::f32,
           "{}: model folders are written in BF16 or F32, not {}", target_,
           dtype_name(options_.dtype));
  check_hf_target(target_);
  remove_tree(temporary_);
  create_folders(temporary_);
  copy_side_files();
  std::vector<SafetensorsWriter::Tensor> tensors;
  for (ExpectedTensor& tensor : expected_tensors(config)) {
    if (tensor.copy_of.empty()) tensors.push_back({tensor.name, options_.dtype, tensor.shape});
  }
  open_shards(std::move(tensors));
}

HfFolderWriter::~HfFolderWriter() {
  if (finished_) return;
  shards_.clear();
  remove_tree(temporary_);
}

void HfFolderWriter::copy_side_files() {
  for (const auto& entry : fs::directory_iterator(source_)) {
    const std::string name = entry.path().filename().string();
    if (entry.is_regular_file() && is_side_file(name)) {
      write_file_atomic(temporary_ + "/" + name, read_file(entry.path().string()));
    }
  }
  const std::string more = source_ + "/" + kMoreTemplates;
  if (!fs::is_directory(more)) return;
  create_folders(temporary_ + "/" + kMoreTemplates);
  for (const auto& entry : fs::directory_iterator(more)) {
    if (!entry.is_regular_file()) continue;
    write_file_atomic(
        fmt::format("{}/{}/{}", temporary_, kMoreTemplates, entry.path().filename().string()),
        read_file(entry.path().string()));
  }
}

// Fills shards in the order of the model, each up to the limit; one shard keeps the plain name.
void HfFolderWriter::open_shards(std::vector<SafetensorsWriter::Tensor> tensors) {
  std::vector<std::vector<SafetensorsWriter::Tensor>> groups(1);
  std::uint64_t in_group = 0, total = 0;
  for (SafetensorsWriter::Tensor& tensor : tensors) {
    const auto bytes =
        static_cast<std::uint64_t>(shape_elements(tensor.shape) * dtype_bytes(tensor.dtype));
    if (in_group > 0 && in_group + bytes > options_.max_shard_bytes) {
      groups.emplace_back();
      in_group = 0;
    }
    in_group += bytes;
    total += bytes;
    groups.back().push_back(std::move(tensor));
  }
  Json weight_map = Json::object();
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const std::string file =
        groups.size() == 1 ? "model.safetensors"
                           : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, groups.size());
    auto& shard = shards_.emplace_back(std::make_unique<SafetensorsWriter>(
        temporary_ + "/" + file, groups[i], SafetensorsMetadata{{"format", "pt"}}));
    for (const SafetensorsEntry& entry : shard->entries()) {
      places_[entry.name] = {shard.get(),
                             entry.num_bytes() / static_cast<std::uint64_t>(entry.shape.front())};
      weight_map[entry.name] = file;
    }
  }
  if (groups.size() > 1) {
    OrderedJson index;
    index["metadata"]["total_size"] = total;
    index["weight_map"] = weight_map;
    write_file_atomic(temporary_ + "/model.safetensors.index.json", dump_json_pretty(index));
  }
}

void HfFolderWriter::write_bytes(std::string_view name, std::int64_t row_begin,
                                 std::span<const std::byte> bytes) {
  const auto place = places_.find(name);
  TD_CHECK(place != places_.end(), "{}: the model has no tensor '{}'", target_, name);
  const std::uint64_t row_bytes = place->second.row_bytes;
  TD_CHECK(row_begin >= 0 && bytes.size() % row_bytes == 0,
           "{}: tensor '{}': {} bytes from row {} are not whole rows of {}", target_, name,
           bytes.size(), row_begin, row_bytes);
  place->second.shard->write(name, static_cast<std::uint64_t>(row_begin) * row_bytes, bytes);
}

void HfFolderWriter::write_f32(std::string_view name, std::int64_t row_begin,
                               std::span<const float> values) {
  if (options_.dtype == Dtype::f32) return write_bytes(name, row_begin, std::as_bytes(values));
  std::vector<std::uint16_t> halves(values.size());
  convert_f32_to_bf16(values.data(), static_cast<std::int64_t>(values.size()), halves.data());
  write_bytes(name, row_begin, bytes_of(halves));
}

void HfFolderWriter::finish() {
  TD_CHECK(!finished_, "{}: finished twice", target_);
  for (auto& shard : shards_) shard->finish();
  sync_folder(temporary_);
  replace_folder(temporary_, target_);
  finished_ = true;
}

void save_hf_folder(const std::string& target, const std::string& source, const ModelConfig& config,
                    const HfWriteOptions& options, const ReadRows& read_rows) {
  HfFolderWriter writer(target, source, config, options);
  std::vector<float> rows;
  for (const ExpectedTensor& tensor : expected_tensors(config)) {
    if (!tensor.copy_of.empty()) continue;
    const std::int64_t row = shape_elements(tensor.shape) / tensor.shape.front();
    const std::int64_t step = std::max<std::int64_t>(1, kRowsAtOnceBytes / (4 * row));
    for (std::int64_t begin = 0; begin < tensor.shape.front(); begin += step) {
      const std::int64_t count = std::min(step, tensor.shape.front() - begin);
      rows.resize(static_cast<std::size_t>(count * row));
      read_rows(tensor.name, begin, count, rows.data());
      writer.write_f32(tensor.name, begin, rows);
    }
  }
  writer.finish();
}

}  // namespace tandem
