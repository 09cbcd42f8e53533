// The safetensors format: what is written is read back bit for bit, the bytes do not depend on the
// caller's order, and every way in which a file can be broken is refused with its numbers.
#include "base/safetensors.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/check.h"

namespace tandem {
namespace {

::testing::AssertionResult holds(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "no '" << part << "' in: " << text;
}

std::span<const std::byte> view(const std::string& text) {
  return std::as_bytes(std::span<const char>(text));
}

std::string file_of(const std::string& header, std::size_t data_bytes) {
  std::string out;
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>((header.size() >> (8 * i)) & 0xff));
  return out + header + std::string(data_bytes, 'x');
}

std::vector<std::string> faults_of(const std::string& file) {
  std::vector<std::string> faults;
  parse_safetensors(view(file), "w.safetensors", faults);
  return faults;
}

std::string slurp(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

class SafetensorsFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "safetensors-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string folder_;
};

TEST(Safetensors, EncodesAndParses) {
  const std::vector<float> weights = {1.5f, -2.0f, 3.25f, 0.0f, 5.0f, 6.0f};
  const std::vector<std::int64_t> ids = {7, -9};
  const std::vector<std::uint8_t> mask = {1, 0, 1};
  const std::vector<TensorView> tensors = {{"mask", Dtype::u8, {3}, bytes_of(mask)},
                                           {"weights", Dtype::f32, {2, 3}, bytes_of(weights)},
                                           {"ids", Dtype::i64, {2}, bytes_of(ids)},
                                           {"empty", Dtype::f32, {0, 4}, {}}};
  const std::string body = encode_safetensors(tensors, {{"format", "pt"}, {"version", "3"}});
  const SafetensorsHeader header = parse_safetensors(view(body), "body");
  EXPECT_EQ(header.data_begin % 8, 0u);
  EXPECT_EQ(header.metadata.at("version"), "3");
  ASSERT_EQ(header.entries.size(), 4u);
  EXPECT_EQ(header.entries.front().name, "ids");  // widest element first: all stay aligned
  EXPECT_EQ(header.entries.back().name, "mask");
  const SafetensorsEntry* entry = header.find("weights");
  ASSERT_NE(entry, nullptr);
  EXPECT_EQ(entry->shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(std::memcmp(header.bytes(view(body), *entry).data(), weights.data(), 24), 0);
  EXPECT_EQ(header.find("absent"), nullptr);
}

TEST(Safetensors, BytesDoNotDependOnTheCallersOrder) {
  const std::vector<float> a = {1}, b = {2, 3};
  const std::vector<TensorView> one = {{"a", Dtype::f32, {1}, bytes_of(a)},
                                       {"b", Dtype::f32, {2}, bytes_of(b)}};
  const std::vector<TensorView> two = {one[1], one[0]};
  EXPECT_EQ(encode_safetensors(one), encode_safetensors(two));
}

TEST(Safetensors, EncoderRefusesWrongByteCountsAndDuplicates) {
  const std::vector<float> a = {1, 2};
  const std::vector<TensorView> wrong = {{"a", Dtype::f32, {3}, bytes_of(a)}};
  EXPECT_THROW(encode_safetensors(wrong), Error);
  const std::vector<TensorView> twice = {{"a", Dtype::f32, {2}, bytes_of(a)},
                                         {"a", Dtype::f32, {2}, bytes_of(a)}};
  EXPECT_THROW(encode_safetensors(twice), Error);
}

TEST(Safetensors, DtypeNamesRoundTrip) {
  for (int i = 0; i <= static_cast<int>(Dtype::u64); ++i) {
    Dtype back = Dtype::boolean;
    EXPECT_TRUE(parse_dtype(dtype_name(static_cast<Dtype>(i)), back));
    EXPECT_EQ(back, static_cast<Dtype>(i));
  }
  EXPECT_EQ(dtype_bytes(Dtype::bf16), 2);
  EXPECT_EQ(dtype_bytes(Dtype::i64), 8);
}

struct BrokenFile {
  const char* name;
  std::string file;
  std::vector<std::string> wanted;  // parts of the one fault's text
};

class SafetensorsBroken : public ::testing::TestWithParam<BrokenFile> {};

TEST_P(SafetensorsBroken, IsRefusedWithNumbers) {
  const std::vector<std::string> faults = faults_of(GetParam().file);
  ASSERT_EQ(faults.size(), 1u) << ::testing::PrintToString(faults);
  EXPECT_TRUE(holds(faults[0], "w.safetensors"));
  for (const std::string& part : GetParam().wanted) EXPECT_TRUE(holds(faults[0], part));
}

INSTANTIATE_TEST_SUITE_P(
    Cases, SafetensorsBroken,
    ::testing::Values(
        BrokenFile{"short", "abc", {"3 bytes long"}},
        BrokenFile{
            "header_beyond_file", file_of("{}", 0).substr(0, 9), {"header of 2 bytes", "has 9"}},
        BrokenFile{"huge_header", std::string(16, '\xff'), {"no safetensors file"}},
        BrokenFile{"not_json", file_of("{\"a\":", 0), {"not a JSON object"}},
        BrokenFile{"array", file_of("[1]", 0), {"not a JSON object"}},
        BrokenFile{"twice",
                   file_of(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                           R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                           1),
                   {"'a'", "twice"}},
        BrokenFile{"overlap",
                   file_of(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                           R"("b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}})",
                           7),
                   {"'b'", "byte 3", "'a'", "ends at 4"}},
        BrokenFile{"gap",
                   file_of(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                           R"("b":{"dtype":"U8","shape":[4],"data_offsets":[6,10]}})",
                           10),
                   {"2 bytes", "'a'", "ends at 4", "'b'", "begins at 6"}},
        BrokenFile{"trailing",
                   file_of(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 9),
                   {"5 bytes after", "'a'"}},
        BrokenFile{"byte_count",
                   file_of(R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,20]}})", 20),
                   {"'a'", "F32 [2, 3]", "24", "20"}},
        BrokenFile{"truncated",
                   file_of(R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}})", 12),
                   {"'a'", "16", "12"}},
        BrokenFile{"dtype",
                   file_of(R"({"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}})", 4),
                   {"'a'", "F31", "BF16"}},
        BrokenFile{"negative",
                   file_of(R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1),
                   {"'a'", "[-1]"}},
        BrokenFile{
            "overflow",
            file_of(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})",
                    0),
            {"'a'", "4294967296"}},
        BrokenFile{"reversed",
                   file_of(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[2,1]}})", 2),
                   {"'a'", "[2,1]"}}),
    [](const auto& test) { return std::string(test.param.name); });

TEST(Safetensors, AllFaultsComeTogether) {
  const std::string file = file_of(R"({"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]},)"
                                   R"("b":{"dtype":"F32","shape":[1],"data_offsets":[4,9]}})",
                                   9);
  EXPECT_EQ(faults_of(file).size(), 2u);
  EXPECT_THROW(parse_safetensors(view(file), "w.safetensors"), Error);
}

TEST_F(SafetensorsFolder, WriterTakesPartsInAnyOrder) {
  const std::vector<float> a = {1, 2, 3, 4}, b = {5, 6};
  const std::string path = folder_ + "/w.safetensors";
  SafetensorsWriter writer(path, {{"b", Dtype::f32, {2}}, {"a", Dtype::f32, {2, 2}}}, {{"k", "v"}});
  writer.write("a", 8, bytes_of(a).subspan(8));
  writer.write("b", bytes_of(b));
  EXPECT_FALSE(std::filesystem::exists(path));
  writer.write("a", 0, bytes_of(a).first(8));
  writer.finish();
  const std::vector<TensorView> same = {{"a", Dtype::f32, {2, 2}, bytes_of(a)},
                                        {"b", Dtype::f32, {2}, bytes_of(b)}};
  EXPECT_EQ(slurp(path), encode_safetensors(same, {{"k", "v"}}));
  EXPECT_EQ(writer.file_bytes(), std::filesystem::file_size(path));
}

TEST_F(SafetensorsFolder, UnfinishedWriterLeavesTheOldFile) {
  const std::string path = folder_ + "/w.safetensors";
  std::ofstream(path) << "old";
  {
    SafetensorsWriter writer(path, {{"a", Dtype::u8, {4}}});
    writer.write("a", std::as_bytes(std::span<const char>("abcd", 3)));
    EXPECT_THROW(writer.write("a", 3, std::as_bytes(std::span<const char>("abcd", 2))), Error);
    EXPECT_THROW(writer.write("b", {}), Error);
    EXPECT_THROW(writer.finish(), Error);  // 3 of 4 bytes
  }
  EXPECT_EQ(slurp(path), "old");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);
}

}  // namespace
}  // namespace tandem
