// Bytes of tokens under each kind of decoder, and where a stream may be cut. The bytes against the
// tokenizers library: tests/golden/vocabulary_test.py.
#include "data/vocabulary.h"

#include <gtest/gtest.h>

#include "base/check.h"

namespace tandem {
namespace {

TEST(Vocabulary, ByteLevelCharactersNameBytes) {
  const Vocabulary v = Vocabulary::parse(
      R"({"decoder": {"type": "ByteLevel"},
          "model": {"vocab": {"a": 0, "Ġb": 1, "Ċ": 2, "Ã": 3, "©": 4, "ÿ": 5, "Ń": 6}},
          "added_tokens": [{"id": 9, "content": "<|im end|>", "special": true},
                           {"id": 8, "content": "日", "special": false}]})",
      "test");
  EXPECT_EQ(v.size(), 10);
  EXPECT_EQ(v.bytes(0), "a");
  EXPECT_EQ(v.bytes(1), " b");
  EXPECT_EQ(v.bytes(2), "\n");
  EXPECT_EQ(std::string(v.bytes(3)) + std::string(v.bytes(4)), "é");
  EXPECT_EQ(v.bytes(5), "\xFF");
  EXPECT_EQ(v.bytes(6), "\xAD") << "the last of the bytes without a printable character";
  EXPECT_EQ(v.bytes(7), "") << "no token has this id";
  EXPECT_EQ(v.bytes(8), "日") << "an added token that names no bytes is its own text";
  EXPECT_EQ(v.bytes(9), "<|im end|>");
  EXPECT_TRUE(v.is_special(9));
  EXPECT_FALSE(v.is_special(8));
  EXPECT_EQ(v.bytes(10), "");
  EXPECT_EQ(v.bytes(-1), "");
  EXPECT_EQ(v.longest_bytes(), 10u);
}

TEST(Vocabulary, SentencePieceTokensHaveSpacesAndFallbackBytes) {
  const Vocabulary v = Vocabulary::parse(
      R"({"decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
          "model": {"vocab": {"▁a▁b": 0, "<0xE2>": 1, "<0x0a>": 2, "<0xZZ>": 3}}})",
      "test");
  EXPECT_EQ(v.bytes(0), " a b");
  EXPECT_EQ(v.bytes(1), "\xE2");
  EXPECT_EQ(v.bytes(2), "\n");
  EXPECT_EQ(v.bytes(3), "<0xZZ>");
  EXPECT_TRUE(v.strips_first_space());
  const Vocabulary unigram = Vocabulary::parse(
      R"({"decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"},
          "model": {"vocab": [["<unk>", 0], ["▁the", -2.5]]}})",
      "test");
  EXPECT_EQ(unigram.bytes(1), " the");
  EXPECT_FALSE(unigram.strips_first_space());
}

TEST(Vocabulary, NamesWhatItDoesNotKnow) {
  const auto fault = [](const char* json) -> std::string {
    try {
      Vocabulary::parse(json, "dir/tokenizer.json");
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_TRUE(fault(R"({"decoder": {"type": "WordPiece"}, "model": {"vocab": {}}})")
                  .starts_with("dir/tokenizer.json: decoder: 'WordPiece' found"));
  EXPECT_TRUE(
      fault(R"({"model": {"vocab": {}}})").starts_with("dir/tokenizer.json: key 'decoder'"));
  EXPECT_TRUE(fault(R"({"decoder": {"type": "ByteLevel"}, "model": {}})")
                  .starts_with("dir/tokenizer.json: model.vocab is missing"));
}

TEST(WholeCharacters, HoldsBackTheBeginningOfOne) {
  const std::string text = "aé日😀";
  for (std::size_t cut = 0; cut <= text.size(); ++cut) {
    const std::size_t whole = whole_characters(std::string_view(text).substr(0, cut));
    const std::size_t wanted = cut < 1 ? 0 : cut < 3 ? 1 : cut < 6 ? 3 : cut < 10 ? 6 : 10;
    EXPECT_EQ(whole, wanted) << cut;
  }
  EXPECT_EQ(whole_characters("a\xFF"), 2u) << "a byte of no character holds nothing back";
  EXPECT_EQ(whole_characters("a\x80\x80\x80\x80\x80"), 6u);
  EXPECT_EQ(whole_characters("\xC0"), 1u);
}

}  // namespace
}  // namespace tandem
