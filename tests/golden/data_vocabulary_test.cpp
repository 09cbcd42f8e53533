// Vocabulary's bytes against texts: small SentencePiece-like tokenizers decoded by the tokenizers
// library (tools/make_vocabulary_golden.py), and the demo model's ids of 1,000 strings.
#include "data/vocabulary.h"

#include <gtest/gtest.h>

#include "base/file.h"
#include "base/json.h"

namespace tandem {
namespace {

const std::string kGolden = std::string(TANDEM_SOURCE_DIR) + "/tests/golden/";

std::string text_of(const Vocabulary& vocabulary, const std::vector<TokenId>& ids) {
  std::string text;
  for (const TokenId id : ids) text += vocabulary.bytes(id);
  if (vocabulary.strips_first_space() && text.starts_with(' ')) text.erase(0, 1);
  return text;
}

TEST(Vocabulary, DecodesAsTheTokenizersLibrary) {
  for (const char* name : {"llama", "unigram"}) {
    const Json golden = read_json_file(kGolden + "vocabulary_" + name + ".json");
    const Vocabulary vocabulary = Vocabulary::parse(dump_json(golden.at("tokenizer")), name);
    ASSERT_GE(golden.at("rows").size(), 200u);
    for (const Json& row : golden.at("rows")) {
      EXPECT_EQ(text_of(vocabulary, row.at("ids").get<std::vector<TokenId>>()),
                row.at("text").get<std::string>())
          << name;
    }
  }
}

TEST(Vocabulary, GivesTheDemoModelsTextsBack) {
  const Vocabulary vocabulary =
      Vocabulary::load(std::string(TANDEM_SOURCE_DIR) + "/models/SmolLM2-135M-Instruct");
  const Json golden = read_json_file(kGolden + "tokenizer_smollm2.json");
  std::size_t equal = 0, lossy = 0;
  for (const Json& row : golden.at("rows")) {
    const auto wanted = row[0].get<std::string>();
    const std::string found = text_of(vocabulary, row[1].get<std::vector<TokenId>>());
    equal += found == wanted;
    // A byte that the vocabulary lacks gets no id, so the text comes back shorter.
    lossy += found.size() < wanted.size();
  }
  EXPECT_EQ(equal + lossy, golden.at("rows").size());
  EXPECT_GT(equal, 900u);
  EXPECT_EQ(vocabulary.bytes(2), "<|im_end|>");
  EXPECT_TRUE(vocabulary.is_special(2));
}

}  // namespace
}  // namespace tandem
