// Model folders: what is sound opens and reads bit for bit, what is not is refused with file,
// tensor and numbers, all faults at once (cases C48, C49); a written folder is whole or not there.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <random>

#include "checkpoint/hf_folder.h"

#include "base/check.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

::testing::AssertionResult holds(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "no '" << part << "' in: " << text;
}

std::size_t lines_of(const std::string& text) {
  return text.empty() ? 0
                      : 1 + static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

using Weights = std::map<std::string, SafetensorsWriter::Tensor>;
using Values = std::map<std::string, std::vector<float>>;

class HfFolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "hf-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    folder_ = root_ + "/model";
    fs::create_directory(folder_);
    use(R"({"model_type": "llama", "vocab_size": 11, "hidden_size": 8,
      "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2,
      "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": false})");
  }
  void TearDown() override { fs::remove_all(root_); }

  // Random values for every tensor of a config.
  void use(const char* config) {
    json_ = Json::parse(config);
    shapes_.clear();
    values_.clear();
    std::mt19937 random(7);
    for (const ExpectedTensor& tensor :
         expected_tensors(parse_model_config(json_, "", nullptr, ""))) {
      std::vector<float>& values = values_[tensor.name];
      // Eight bits of mantissa, so that bf16 holds them too.
      for (std::int64_t i = 0; i < shape_elements(tensor.shape); ++i) {
        values.push_back(static_cast<float>(static_cast<int>(random() % 256) - 128) / 64.0f);
      }
      shapes_[tensor.name] = {tensor.name, Dtype::f32, tensor.shape};
    }
  }

  void write_config() { std::ofstream(folder_ + "/config.json") << json_.dump(); }

  // The named tensors of shapes_/values_ into one file.
  void write_file(const std::string& file, const std::vector<std::string>& names) {
    std::vector<TensorView> views;
    for (const std::string& name : names) {
      views.push_back({name, shapes_[name].dtype, shapes_[name].shape,
                       std::as_bytes(std::span(values_[name]))});
    }
    std::ofstream(folder_ + "/" + file, std::ios::binary) << encode_safetensors(views);
  }

  std::vector<std::string> all_names() const {
    std::vector<std::string> names;
    for (const auto& [name, shape] : shapes_) names.push_back(name);
    return names;
  }

  void write_single() {
    write_config();
    write_file("model.safetensors", all_names());
  }

  // Two shards with an index: layer 1 in the second.
  void write_shards() {
    write_config();
    std::vector<std::string> first, second;
    Json map;
    for (const std::string& name : all_names()) {
      const bool in_second = name.find("layers.1.") != std::string::npos;
      (in_second ? second : first).push_back(name);
      map[name] = in_second ? kSecond : kFirst;
    }
    write_file(kFirst, first);
    write_file(kSecond, second);
    write_index(map);
  }
  void write_index(const Json& map) {
    std::ofstream(folder_ + "/model.safetensors.index.json") << Json{{"weight_map", map}}.dump();
    map_ = map;
  }

  std::string fault() {
    try {
      HfFolder::open(folder_);
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  }

  static constexpr const char* kFirst = "model-00001-of-00002.safetensors";
  static constexpr const char* kSecond = "model-00002-of-00002.safetensors";
  std::string root_, folder_;
  Json json_, map_;
  Weights shapes_;
  Values values_;
};

TEST_F(HfFolderTest, OpensOneFileAndShards) {
  write_single();
  {
    const HfFolder folder = HfFolder::open(folder_);
    EXPECT_EQ(folder.names().size(), 21u);
    EXPECT_TRUE(folder.notices().empty());
    for (const auto& [name, values] : values_) EXPECT_EQ(folder.read_f32(name), values) << name;
  }
  fs::remove(folder_ + "/model.safetensors");
  write_shards();
  const HfFolder folder = HfFolder::open(folder_);
  for (const auto& [name, values] : values_) EXPECT_EQ(folder.read_f32(name), values) << name;
  std::vector<float> row(8);
  folder.read_f32("lm_head.weight", 3, 1, row.data());
  EXPECT_EQ(row, std::vector<float>(values_["lm_head.weight"].begin() + 24,
                                    values_["lm_head.weight"].begin() + 32));
  EXPECT_THROW(folder.read_f32("lm_head.weight", 10, 2, row.data()), Error);
  EXPECT_THROW(folder.tensor("no.such"), Error);
}

TEST_F(HfFolderTest, MissingFiles) {
  EXPECT_TRUE(holds(fault(), "config.json: not found"));
  write_config();
  EXPECT_TRUE(holds(fault(), "no weights: wanted model.safetensors"));
}

// C48: all three faults of a stale index are told together, before any weight is touched.
TEST_F(HfFolderTest, MissingShardIsNamedOnce) {
  write_shards();
  fs::remove(folder_ + "/" + kSecond);
  const std::string text = fault();
  EXPECT_TRUE(holds(text, std::string(kSecond) + ": not found"));
  EXPECT_TRUE(holds(text, "places 9 tensors in it"));
  EXPECT_EQ(lines_of(text), 1u) << text;
}

TEST_F(HfFolderTest, IndexAndShardsMustAgree) {
  write_shards();
  map_.erase("model.norm.weight");                      // in the shard, not in the index
  map_["model.layers.1.mlp.up_proj.weight"] = kFirst;   // in the other shard
  map_["model.layers.9.mlp.up_proj.weight"] = kSecond;  // nowhere
  map_["model.embed_tokens.weight"] = "../elsewhere";   // outside
  write_index(map_);
  const std::string text = fault();
  EXPECT_TRUE(holds(
      text, "holds tensor 'model.norm.weight', which model.safetensors.index.json does not name"));
  EXPECT_TRUE(holds(text, "holds tensor 'model.layers.1.mlp.up_proj.weight', which"));
  EXPECT_TRUE(holds(text, "tensor 'model.layers.9.mlp.up_proj.weight' is not in it"));
  EXPECT_TRUE(holds(text, "../elsewhere"));
}

TEST_F(HfFolderTest, StrayFilesAndBuffersAreNotices) {
  write_shards();
  write_file("model-00003-of-00003.safetensors", {"model.norm.weight"});
  for (const char* layer : {"0", "1"}) {
    const std::string name = fmt::format("model.layers.{}.self_attn.rotary_emb.inv_freq", layer);
    shapes_[name] = {name, Dtype::f32, {2}};
    values_[name] = {1.0f, 0.1f};
    map_[name] = kFirst;
  }
  std::vector<std::string> first;
  for (const auto& [name, file] : map_.items()) {
    if (file == kFirst) first.push_back(name);
  }
  write_file(kFirst, first);
  write_index(map_);
  const HfFolder folder = HfFolder::open(folder_);
  ASSERT_EQ(folder.notices().size(), 2u);
  EXPECT_TRUE(holds(folder.notices()[0], "model-00003-of-00003.safetensors: ignored"));
  EXPECT_TRUE(holds(folder.notices()[1], "2 rotary buffers"));
  EXPECT_EQ(folder.names().size(), 21u);
}

// Layers for predicting further tokens: known to the family, not part of the model.
TEST_F(HfFolderTest, AFamilysExtraLayersAreOneNotice) {
  use(R"({"model_type": "glm4", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 6,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    "max_position_embeddings": 64, "num_nextn_predict_layers": 1})");
  const std::size_t model_tensors = shapes_.size();
  for (const char* name :
       {"model.layers.2.eh_proj.weight", "model.layers.2.mlp.down_proj.weight"}) {
    shapes_[name] = {name, Dtype::f32, {2}};
    values_[name] = {1.0f, 2.0f};
  }
  write_single();
  const HfFolder folder = HfFolder::open(folder_);
  ASSERT_EQ(folder.notices().size(), 1u);
  EXPECT_TRUE(holds(folder.notices()[0], "2 tensors of the layers after layer 1 ignored"));
  EXPECT_EQ(folder.names().size(), model_tensors);
  json_["num_nextn_predict_layers"] = 0;
  write_config();
  EXPECT_TRUE(holds(fault(), "unexpected tensor 'model.layers.2.eh_proj.weight'"));
}

TEST_F(HfFolderTest, WholeFileBesideForeignIndexIsRefused) {
  write_single();
  write_shards();
  EXPECT_TRUE(holds(fault(), "holds both model.safetensors and a model.safetensors.index.json"));
}

TEST_F(HfFolderTest, ShapesNamesAndDtypesAllAtOnce) {
  shapes_["model.norm.weight"].shape = {4};
  values_["model.norm.weight"].resize(4);
  shapes_["model.layers.0.mlp.up_proj.weight"].dtype = Dtype::i32;
  shapes_["extra.weight"] = {"extra.weight", Dtype::f32, {1}};
  values_["extra.weight"] = {1};
  shapes_.erase("model.layers.1.input_layernorm.weight");
  write_single();
  const std::string text = fault();
  EXPECT_TRUE(holds(text, "tensor 'model.norm.weight' is [4], config.json says [8]"));
  EXPECT_TRUE(holds(text, "tensor 'model.layers.0.mlp.up_proj.weight' has dtype I32"));
  EXPECT_TRUE(holds(text, "unexpected tensor 'extra.weight' F32 [1]"));
  EXPECT_TRUE(holds(text, "tensor 'model.layers.1.input_layernorm.weight' [8] is in no file"));
  EXPECT_EQ(lines_of(text), 4u) << text;
}

TEST_F(HfFolderTest, BrokenFiles) {
  write_single();
  const std::string path = folder_ + "/model.safetensors";
  const auto size = fs::file_size(path);
  fs::resize_file(path, size - 4);
  std::string text = fault();
  EXPECT_TRUE(holds(text, "truncated"));
  EXPECT_EQ(lines_of(text), 1u) << text;  // the last tensor, not a second time as missing
  fs::resize_file(path, 20);
  text = fault();
  EXPECT_TRUE(holds(text, "the file has 20"));
  EXPECT_EQ(lines_of(text), 1u) << text;
}

// Rewrites the header of model.safetensors; the data stays.
void change_header(const std::string& path, const std::function<void(Json&)>& change) {
  const std::string file = read_file(path);
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  Json header = Json::parse(file.substr(8, length));
  const std::string data = file.substr(8 + length);
  change(header);
  const std::string text = header.dump();
  length = text.size();
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(&length), 8);
  out << text << data;
}

TEST_F(HfFolderTest, OverlapsAndIndexedStrangersAreNamed) {
  write_single();
  change_header(folder_ + "/model.safetensors", [](Json& header) {
    // The last norm begins inside its neighbour.
    auto& offsets = header["model.norm.weight"]["data_offsets"];
    offsets = {offsets[0].get<int>() - 8, offsets[1].get<int>() - 8};
  });
  std::string text = fault();
  EXPECT_TRUE(holds(text, "model.safetensors"));
  EXPECT_TRUE(holds(text, "model.norm.weight"));
  fs::remove(folder_ + "/model.safetensors");

  shapes_["model.layers.0.mlp.gate.bias"] = {"model.layers.0.mlp.gate.bias", Dtype::f32, {2}};
  values_["model.layers.0.mlp.gate.bias"] = {1, 2};
  write_shards();
  text = fault();
  EXPECT_TRUE(holds(
      text, std::string(kFirst) + ": unexpected tensor 'model.layers.0.mlp.gate.bias' F32 [2]"));
  EXPECT_EQ(lines_of(text), 1u) << text;
}

// C49.
TEST_F(HfFolderTest, TiedHeads) {
  json_["tie_word_embeddings"] = true;
  values_["lm_head.weight"] = values_["model.embed_tokens.weight"];
  write_single();
  {
    const HfFolder folder = HfFolder::open(folder_);  // (a) both and equal: one is used
    ASSERT_EQ(folder.notices().size(), 1u);
    EXPECT_TRUE(holds(folder.notices()[0], "'lm_head.weight' ignored"));
    EXPECT_EQ(folder.names().back(), "model.norm.weight");
    EXPECT_THROW(folder.tensor("lm_head.weight"), Error);
  }
  // The same values in another type are the same head.
  const std::vector<float> same = values_["lm_head.weight"];
  std::vector<std::uint16_t> half(same.size());
  convert_f32_to_bf16(same.data(), static_cast<std::int64_t>(same.size()), half.data());
  shapes_["lm_head.weight"].dtype = Dtype::bf16;
  values_["lm_head.weight"].resize(same.size() / 2);
  std::memcpy(values_["lm_head.weight"].data(), half.data(), half.size() * 2);
  write_single();
  EXPECT_EQ(fault(), "");
  shapes_["lm_head.weight"].dtype = Dtype::f32;
  values_["lm_head.weight"] = same;
  values_["lm_head.weight"][87] += 1.0f;  // (b) the last element differs
  write_single();
  EXPECT_TRUE(holds(fault(),
                    "'lm_head.weight' (F32) differs from 'model.embed_tokens.weight' (F32), first "
                    "at element 87"));
  shapes_.erase("lm_head.weight");
  write_single();
  EXPECT_EQ(fault(), "");
  json_["tie_word_embeddings"] = false;  // (c) untied without a head
  write_config();
  EXPECT_TRUE(
      holds(fault(), "tensor 'lm_head.weight' [11, 8] is in no file; config.json does not tie it"));
}

TEST(HfConversion, HalfPrecisionBothWays) {
  const std::vector<std::pair<std::uint16_t, float>> halves = {
      {0x3c00, 1.0f},     {0xc000, -2.0f},    {0x7bff, 65504.0f},
      {0x0400, 0x1p-14f}, {0x0001, 0x1p-24f}, {0x03ff, 1023 * 0x1p-24f},
      {0x8000, -0.0f},    {0x7c00, INFINITY}, {0xfc00, -INFINITY}};
  for (const auto& [bits, wanted] : halves) {
    float out = 0;
    convert_to_f32(Dtype::f16, reinterpret_cast<const std::byte*>(&bits), 1, &out);
    EXPECT_EQ(std::memcmp(&out, &wanted, 4), 0) << out << " " << wanted;
  }
  const std::uint16_t nan = 0x7e01;
  float out = 0;
  convert_to_f32(Dtype::f16, reinterpret_cast<const std::byte*>(&nan), 1, &out);
  EXPECT_TRUE(std::isnan(out));

  const std::vector<float> in = {1.0f, 1.00390625f, 1.01171875f, 3.4e38f, -INFINITY, NAN, 1e-40f};
  std::vector<std::uint16_t> bf16(in.size());
  convert_f32_to_bf16(in.data(), static_cast<std::int64_t>(in.size()), bf16.data());
  EXPECT_EQ(bf16[0], 0x3f80);
  EXPECT_EQ(bf16[1], 0x3f80);  // halfway, to even
  EXPECT_EQ(bf16[2], 0x3f82);  // halfway, to even
  EXPECT_EQ(bf16[3], 0x7f80);  // beyond the largest
  EXPECT_EQ(bf16[4], 0xff80);
  std::vector<float> back(in.size());
  convert_to_f32(Dtype::bf16, reinterpret_cast<const std::byte*>(bf16.data()),
                 static_cast<std::int64_t>(in.size()), back.data());
  EXPECT_TRUE(std::isnan(back[5]));
}

TEST_F(HfFolderTest, WritesAFolderThatOpensAgain) {
  write_single();
  // Bytes that a reader and writer of JSON would not give back: order, spaces, digits, line ends.
  const std::map<std::string, std::string> kept = {
      {"config.json", json_.dump() + " \r\n"},
      {"generation_config.json", "{\n  \"top_p\": 0.90, \"eos_token_id\": [2,\t3]\n}"},
      {"tokenizer.json", "{\"b\": 1, \"a\": 1e0}"},
      {"tokenizer_config.json", "{ }"},
      {"tokenizer.model", std::string("\x00\xff\x0a", 3)},
      {"special_tokens_map.json", "{}"},
      {"chat_template.jinja", "{{ x }}\r\n"},
      {"additional_chat_templates/rag.jinja", "{{ y }}"},
      {"modeling_own.py", "pass\n"}};
  fs::create_directory(folder_ + "/additional_chat_templates");
  for (const auto& [name, text] : kept)
    std::ofstream(folder_ + "/" + name, std::ios::binary) << text;
  std::ofstream(folder_ + "/optimizer.bin") << "no";
  const HfFolder source = HfFolder::open(folder_);
  const std::string target = root_ + "/out";
  EXPECT_EQ(HfWriteOptions{}.max_shard_bytes, 5'000'000'000u);
  for (const auto& [dtype, max_bytes] :
       {std::pair{Dtype::bf16, std::uint64_t{1} << 30}, {Dtype::f32, std::uint64_t{1000}}}) {
    save_hf_folder(target, folder_, source.config(), {dtype, max_bytes},
                   [&](const std::string& name, std::int64_t begin, std::int64_t rows, float* out) {
                     source.read_f32(name, begin, rows, out);
                   });
    const HfFolder written = HfFolder::open(target);
    EXPECT_EQ(written.names(), source.names());
    EXPECT_EQ(written.tensor("model.norm.weight").dtype, dtype);
    for (const auto& [name, values] : values_) EXPECT_EQ(written.read_f32(name), values) << name;
    for (const auto& [name, text] : kept) EXPECT_EQ(read_file(target + "/" + name), text) << name;
    EXPECT_FALSE(file_exists(target + "/optimizer.bin"));
  }
  EXPECT_TRUE(file_exists(target + "/model.safetensors.index.json"));  // the second was in parts
  EXPECT_FALSE(file_exists(target + "/model.safetensors"));  // nothing of the first is left
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), {}), 2);
}

TEST_F(HfFolderTest, UnfinishedWriterChangesNothing) {
  write_single();
  const HfFolder source = HfFolder::open(folder_);
  const std::string before = read_file(folder_ + "/model.safetensors");
  {
    HfFolderWriter writer(folder_, folder_, source.config(), {Dtype::f32});  // onto its own source
    writer.write_f32("model.norm.weight", 0, std::vector<float>(8, 9.0f));
    EXPECT_THROW(writer.write_f32("model.norm.weight", 8, std::vector<float>(1, 9.0f)), Error);
    EXPECT_THROW(writer.write_f32("lm_head.weight", 0, std::vector<float>(3, 9.0f)), Error);
    EXPECT_THROW(writer.write_f32("no.such", 0, {}), Error);
    EXPECT_THROW(writer.finish(), Error);
  }
  EXPECT_EQ(read_file(folder_ + "/model.safetensors"), before);
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), {}), 1);
  // Whole: the source is replaced while its mapping is still read.
  save_hf_folder(folder_, folder_, source.config(), {Dtype::f32},
                 [&](const std::string& name, std::int64_t begin, std::int64_t rows, float* out) {
                   source.read_f32(name, begin, rows, out);
                   out[0] = 5.0f;
                 });
  EXPECT_EQ(HfFolder::open(folder_).read_f32("model.norm.weight")[0], 5.0f);
}

TEST_F(HfFolderTest, WriterLeavesForeignFoldersAlone) {
  write_single();
  const HfFolder source = HfFolder::open(folder_);
  fs::create_directory(root_ + "/home");
  std::ofstream(root_ + "/home/letter.txt") << "dear";
  EXPECT_THROW(HfFolderWriter(root_ + "/home", folder_, source.config()), Error);
  EXPECT_EQ(read_file(root_ + "/home/letter.txt"), "dear");
}

// Root may write everywhere by its permissions, and still nobody can make a file in /proc: a run that
// learned this at its end would have lost the model.
TEST_F(HfFolderTest, TargetThatCannotBeMadeIsFoundBefore) {
  EXPECT_EQ(why_not_writable(root_), "");
  EXPECT_NE(why_not_writable("/proc"), "");
  try {
    check_hf_target("/proc/model");
    FAIL() << "accepted";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("/proc cannot be written: "), std::string::npos) << e.what();
  }
  EXPECT_NO_THROW(check_hf_target(root_ + "/new/model"));
  EXPECT_FALSE(file_exists(root_ + "/new/model"));
}

// The folders that transformers made open without a word.
TEST(HfGolden, TinyModelsOpen) {
  std::size_t models = 0;
  for (const auto& entry : fs::directory_iterator(TANDEM_SOURCE_DIR "/tests/golden/tiny")) {
    const HfFolder folder = HfFolder::open(entry.path().string());
    EXPECT_TRUE(folder.notices().empty()) << entry.path();
    const Json expected = read_json_file(entry.path().string() + "/expected.json");
    for (const auto& [name, norm] : expected["sequences"][0]["gradient_norms"].items()) {
      EXPECT_GT(folder.tensor(name).data.size(), 0u);
    }
    EXPECT_EQ(expected["sequences"][0]["gradient_norms"].size(), folder.names().size());
    ++models;
  }
  EXPECT_GE(models, 15u);
}

}  // namespace
}  // namespace tandem
