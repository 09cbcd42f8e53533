// A Hugging Face model folder, read by mmap and written back.
//
// Reading: open() accounts for every tensor of every file against what config.json says the model
// has, before any weight is used, and refuses with all faults at once, each naming file and tensor:
// a tensor that is missing, unexpected, truncated, of another shape or an unsupported dtype, a
// shard that is absent, an index that does not fit its shards, a tied head that differs from the
// embedding. The weights are one file model.safetensors, or numbered parts named by
// model.safetensors.index.json. Writing: the whole folder appears under its name only when every
// byte of it is on disk. Tied models have no head of their own here: neither names() nor the
// written files hold it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "base/safetensors.h"
#include "model/parameters.h"

namespace tandem {

struct HfTensor {
  std::string name;
  Dtype dtype = Dtype::f32;  // f32, bf16 or f16
  std::vector<std::int64_t> shape;
  std::span<const std::byte> data;  // in the mapped file; lives as long as the HfFolder

  std::int64_t rows() const { return shape.front(); }
  std::int64_t row_elements() const { return shape_elements(shape) / shape.front(); }
};

class HfFolder {
 public:
  // Throws one Error that lists all faults. Harmless oddities become notices, logged once each.
  static HfFolder open(const std::string& folder);
  // The same with a configuration that was read before.
  static HfFolder open(const std::string& folder, ModelConfig config);

  const std::string& path() const { return folder_; }
  const ModelConfig& config() const { return config_; }
  // In the order of expected_tensors().
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<std::string>& notices() const { return notices_; }
  std::uint64_t total_bytes() const;

  // Throws Error if the model has no such tensor.
  const HfTensor& tensor(std::string_view name) const;

  // Rows [row_begin, row_begin + rows) of the first dimension as f32, [rows, row_elements].
  void read_f32(std::string_view name, std::int64_t row_begin, std::int64_t rows, float* out) const;
  // The whole tensor.
  std::vector<float> read_f32(std::string_view name) const;

 private:
  HfFolder(std::string folder, ModelConfig config)
      : folder_(std::move(folder)), config_(std::move(config)) {}

  std::string folder_;
  ModelConfig config_;
  std::vector<MappedFile> files_;
  std::map<std::string, HfTensor, std::less<>> tensors_;
  std::vector<std::string> names_;
  std::vector<std::string> notices_;
};

// Row-major conversion of `count` elements; f32 → bf16 rounds to nearest even and keeps NaN.
void convert_to_f32(Dtype from, const std::byte* in, std::int64_t count, float* out);
void convert_f32_to_bf16(const float* in, std::int64_t count, std::uint16_t* out);

struct HfWriteOptions {
  Dtype dtype = Dtype::bf16;                      // bf16 or f32, for all tensors
  std::uint64_t max_shard_bytes = 5'000'000'000;  // more than this: numbered parts and an index
};

// Writes a model folder like `source` with new weights: config, generation config, tokenizer and
// template files are copied byte for byte, the weights come from the caller in any order. Nothing
// is seen under `target` before finish(); a model folder that stands there is replaced in one step,
// so `target` may be the source itself. Without finish() all that was written is removed.
// Throws Error if a model folder cannot be written at `target`: it exists and is something else, or
// its parent cannot be made or written. Makes the parent.
void check_hf_target(const std::string& target);

class HfFolderWriter {
 public:
  // Throws Error if target exists and is not a model folder.
  HfFolderWriter(std::string target, std::string source, const ModelConfig& config,
                 HfWriteOptions options = {});
  ~HfFolderWriter();
  HfFolderWriter(const HfFolderWriter&) = delete;
  HfFolderWriter& operator=(const HfFolderWriter&) = delete;

  // Whole rows from row_begin on; values.size() is a multiple of the row.
  void write_f32(std::string_view name, std::int64_t row_begin, std::span<const float> values);
  // The same, already in the writer's dtype.
  void write_bytes(std::string_view name, std::int64_t row_begin, std::span<const std::byte> bytes);

  // Throws Error, leaving `target` as it was, if a tensor is not whole.
  void finish();

 private:
  void copy_side_files();
  void open_shards(std::vector<SafetensorsWriter::Tensor> tensors);

  std::string target_;
  std::string source_;
  std::string temporary_;
  HfWriteOptions options_;
  std::vector<std::unique_ptr<SafetensorsWriter>> shards_;
  struct Place {
    SafetensorsWriter* shard;
    std::uint64_t row_bytes;
  };
  std::map<std::string, Place, std::less<>> places_;
  bool finished_ = false;
};

// Gives rows [row_begin, row_begin + rows) of a tensor as f32 into `out`.
using ReadRows = std::function<void(const std::string& name, std::int64_t row_begin,
                                    std::int64_t rows, float* out)>;

// HfFolderWriter driven by a callback, a bounded number of rows at a time.
void save_hf_folder(const std::string& target, const std::string& source, const ModelConfig& config,
                    const HfWriteOptions& options, const ReadRows& read_rows);

}  // namespace tandem
