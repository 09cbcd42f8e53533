// Turns joined into samples: only sampled ids are trained, each at its place (cases C35, C46, C47).
#include "data/turns.h"

#include <gtest/gtest.h>

#include "base/check.h"

namespace tandem {
namespace {

using Ids = std::vector<TokenId>;
using Mask = std::vector<std::uint8_t>;

Turn turn(Ids prompt, Ids answer, std::int64_t version = 1) {
  Turn t{std::move(prompt), std::move(answer), {}, {}};
  for (std::size_t i = 0; i < t.answer.size(); ++i) {
    t.log_probs.push_back(-0.5f * static_cast<float>(i + 1));
    t.weight_versions.push_back(version);
  }
  return t;
}

// Every sample keeps the invariant of sample.h.
void expect_whole(const Sample& s) {
  const auto length = static_cast<std::size_t>(s.response_length);
  EXPECT_EQ(s.log_probs.size(), length);
  EXPECT_EQ(s.loss_mask.size(), length);
  EXPECT_EQ(s.weight_versions.size(), length);
  EXPECT_GT(s.prompt_length(), 0);
}

// C46: "he" (7) and "llo" (8) were sampled; the text would be the one token "hello" (9).
TEST(TurnJoiner, SampledIdsAreTrainedAsTheyAre) {
  TurnJoiner joiner;
  joiner.add(turn({1, 2}, {7, 8}));
  ASSERT_EQ(joiner.samples().size(), 1u);
  const Sample& s = joiner.samples()[0];
  expect_whole(s);
  EXPECT_EQ(s.tokens, (Ids{1, 2, 7, 8}));
  EXPECT_EQ(s.response_length, 2);
  EXPECT_EQ(s.loss_mask, (Mask{1, 1}));
}

TEST(TurnJoiner, TheNextPromptIsTheOldIdsAndTheNewOnes) {
  const Turn first = turn({1, 2}, {7, 8}, 4);
  const Ids next = append_only_prompt(first, Ids{3, 5});
  EXPECT_EQ(next, (Ids{1, 2, 7, 8, 3, 5}));
  TurnJoiner joiner;
  joiner.add(first);
  joiner.add(turn(next, {6}, 5));
  ASSERT_EQ(joiner.samples().size(), 1u);
  EXPECT_EQ(joiner.num_mismatches(), 0);
  const Sample& s = joiner.samples()[0];
  expect_whole(s);
  EXPECT_EQ(s.tokens, (Ids{1, 2, 7, 8, 3, 5, 6}));
  EXPECT_EQ(s.prompt_length(), 2);
  EXPECT_EQ(s.loss_mask, (Mask{1, 1, 0, 0, 1}));
  EXPECT_EQ(s.log_probs, (std::vector<float>{-0.5f, -1.0f, 0, 0, -0.5f}));
  EXPECT_EQ(s.weight_versions, (std::vector<std::int64_t>{4, 4, 4, 4, 5}));
}

// A text that encodes to other ids than were sampled is another prefix: two samples.
TEST(TurnJoiner, RetokenisedPromptsBeginANewSample) {
  TurnJoiner joiner;
  joiner.add(turn({1, 2}, {7, 8}));
  joiner.add(turn({1, 2, 9, 3}, {6}));
  EXPECT_EQ(joiner.num_mismatches(), 1);
  ASSERT_EQ(joiner.samples().size(), 2u);
  EXPECT_EQ(joiner.samples()[0].tokens, (Ids{1, 2, 7, 8}));
  EXPECT_EQ(joiner.samples()[1].tokens, (Ids{1, 2, 9, 3, 6}));
  EXPECT_EQ(joiner.samples()[1].loss_mask, (Mask{1}));
}

// C47: the second prompt lacks the thinking (20, 21) of the first answer.
TEST(TurnJoiner, DroppedThinkingGivesTwoSamplesWithTheirOwnMasks) {
  TurnJoiner joiner;
  joiner.add(turn({1, 2}, {20, 21, 30}, 1));
  joiner.add(turn({1, 2, 30, 3}, {22, 31}, 2));
  joiner.add(turn({1, 2, 30, 3, 22, 31, 4}, {32}, 3));  // and the third continues the second
  ASSERT_EQ(joiner.samples().size(), 2u);
  for (const Sample& s : joiner.samples()) expect_whole(s);
  EXPECT_EQ(joiner.samples()[0].tokens, (Ids{1, 2, 20, 21, 30}));
  EXPECT_EQ(joiner.samples()[0].loss_mask, (Mask{1, 1, 1}));
  EXPECT_EQ(joiner.samples()[1].tokens, (Ids{1, 2, 30, 3, 22, 31, 4, 32}));
  EXPECT_EQ(joiner.samples()[1].loss_mask, (Mask{1, 1, 0, 1}));
  EXPECT_EQ(joiner.num_mismatches(), 1);
}

TEST(TurnJoiner, RefusesUnevenTurns) {
  TurnJoiner joiner;
  Turn uneven = turn({1}, {2, 3});
  uneven.log_probs.pop_back();
  EXPECT_THROW(joiner.add(uneven), Error);
  EXPECT_THROW(joiner.add(turn({}, {2})), Error);
}

TEST(AddedText, IsTheRestOrAnErrorThatShowsThePlace) {
  EXPECT_EQ(added_text("<u>hi<a>", "<u>hi<a>yo<u>"), "yo<u>");
  EXPECT_EQ(added_text("", "x"), "x");
  try {
    added_text("<a><think>hm</think>yes", "<a>yes<u>more");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("from byte 3 on: '<think>"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace tandem
