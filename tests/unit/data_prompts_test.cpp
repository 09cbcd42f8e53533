// Prompt files line by line, and the order in which a run draws from them.
#include "data/prompts.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <set>

#include "base/check.h"
#include "data/json_members.h"

namespace tandem {
namespace {

PromptFileOptions options_for(const std::string& label_key = "label") {
  PromptFileOptions options;
  options.path = "rows.jsonl";
  options.label_key = label_key;
  return options;
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(JsonMembers, CutsWithoutTouchingValues) {
  const std::string line =
      R"( { "a\u0062" : [1, {"x":"]},\""}] ,"n":10254939386542155531 , "s":"q\"\\", "e":{},"t":true} )";
  ASSERT_EQ(json_fault(line), "");
  const auto members = json_members(line);
  ASSERT_EQ(members.size(), 5u);
  EXPECT_EQ(members[0].key, "ab");
  EXPECT_EQ(members[0].value, R"([1, {"x":"]},\""}])");
  EXPECT_EQ(find_member(members, "n"), "10254939386542155531");
  EXPECT_EQ(json_string_text(find_member(members, "s")), "q\"\\");
  EXPECT_EQ(find_member(members, "e"), "{}");
  EXPECT_EQ(find_member(members, "absent"), "");
  EXPECT_EQ(json_elements(members[0].value)[1], R"({"x":"]},\""})");
  EXPECT_TRUE(json_elements("[ ]").empty());
  EXPECT_EQ(find_member(json_members(R"({"k":1,"k":2})"), "k"), "2");
}

TEST(JsonMembers, FaultsAreValues) {
  for (const char* bad :
       {"{", "", "{\"a\":1}}", "[1,]", "NaN", "{\"a\":\"\xff\"}", "\"\\ud800\""}) {
    EXPECT_NE(json_fault(bad), "") << bad;
  }
  EXPECT_NE(json_fault("{\"a\" 1}").find("column 6"), std::string::npos) << json_fault("{\"a\" 1}");
}

// Case C41: digits survive as number and as string, in labels and in metadata.
TEST(PromptRows, BigIntegersKeepTheirDigits) {
  for (const std::string digits :
       {"72057594038135102", "10254939386542155531", "9007199254740993", "-0.10", "1e2"}) {
    for (const std::string& label : {digits, '"' + digits + '"'}) {
      const auto rows = parse_prompt_rows(
          R"({"input":"p","label":)" + label + R"(,"metadata":{"n": )" + digits + "}}",
          options_for());
      ASSERT_EQ(rows.rows.size(), 1u);
      EXPECT_EQ(rows.rows[0].label, digits);
      EXPECT_EQ(rows.rows[0].metadata_json, R"({"n": )" + digits + "}");
    }
  }
}

const std::string kBadFile =
    "{\"input\":\"one\",\"label\":\"a\"}\r\n"  // 1 good
    "   \r\n"                                  // 2 blank
    "{\"input\": broken\r\n"                   // 3
    "{\"question\":\"x\",\"label\":\"a\"}\n"   // 4 no prompt key
    "{\"input\":\"\",\"label\":\"a\"}\n"       // 5 empty prompt
    "{\"input\":\"six\",\"label\":\"b\"}\n"    // 6 good
    "[1, 2]";                                  // 7 an array, no final newline

// Case C39.
TEST(PromptRows, BadRowsStopWithFileLineAndReason) {
  const std::string text = error_of([] { parse_prompt_rows(kBadFile, options_for()); });
  EXPECT_TRUE(text.starts_with("rows.jsonl: line 3: not valid JSON")) << text;
}

TEST(PromptRows, BadRowsSkippedAreCountedWithReasons) {
  PromptFileOptions options = options_for();
  options.skip_bad_rows = true;
  const PromptRows rows = parse_prompt_rows(kBadFile, options);
  EXPECT_EQ(rows.num_read, 6);
  ASSERT_EQ(rows.rows.size(), 2u);
  EXPECT_EQ(rows.rows[0].text, "one");
  EXPECT_EQ(rows.rows[1].text, "six");
  EXPECT_EQ(rows.rows[1].line, 6);
  ASSERT_EQ(rows.bad.size(), 4u);
  const std::vector<std::pair<int, const char*>> wanted = {
      {3, "not valid JSON"},
      {4, "no key 'input' (--input-key); the row's keys are 'question', 'label'"},
      {5, "empty prompt"},
      {7, "the row is an array, wanted an object"}};
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_EQ(rows.bad[i].line, wanted[i].first);
    EXPECT_NE(rows.bad[i].reason.find(wanted[i].second), std::string::npos) << rows.bad[i].reason;
  }
}

TEST(PromptRows, ConversationsKeepTheirBytes) {
  PromptFileOptions options = options_for("");
  options.apply_chat_template = true;
  const std::string messages = R"([{"role": "user", "content": "hi", "a": 1.0}])";
  const auto rows = parse_prompt_rows(
      "\xEF\xBB\xBF{\"input\":" + messages + R"(,"tools":"[{\"z\":1,\"a\":2}]"})" + "\n" +
          R"({"input":"a \"quoted\" word","tools":[ {"name":"f"} ],"metadata":null})",
      options);
  ASSERT_EQ(rows.rows.size(), 2u);
  EXPECT_EQ(rows.rows[0].messages_json, messages);
  EXPECT_EQ(rows.rows[0].tools_json, R"([{"z":1,"a":2}])");
  EXPECT_EQ(rows.rows[1].messages_json, R"([{"role":"user","content":"a \"quoted\" word"}])");
  EXPECT_EQ(rows.rows[1].tools_json, R"([ {"name":"f"} ])");
  EXPECT_EQ(rows.rows[1].metadata_json, "{}");
}

TEST(PromptRows, RowFaults) {
  struct Case {
    const char* line;
    bool apply_chat_template;
    const char* reason;
  };
  for (const Case& c : std::vector<Case>{
           {R"({"input":[{"role":"user"}],"label":1})", false, "needs --apply-chat-template"},
           {R"({"input":["hi"],"label":1})", true, "message 0 is a string"},
           {R"({"input":[],"label":1})", true, "empty list"},
           {R"({"input":7,"label":1})", true, "'input' is a number"},
           {R"({"input":"p"})", false, "no key 'label' (--label-key)"},
           {R"({"input":"p","label":1,"metadata":[]})", false, "'metadata' is an array"},
           {R"({"input":"p","label":1,"tools":"[oops"})", false, "string that is not JSON"},
           {R"({"input":"p","label":1,"tools":{}})", false, "'tools' is an object"}}) {
    PromptFileOptions options = options_for();
    options.apply_chat_template = c.apply_chat_template;
    const std::string text = error_of([&] { parse_prompt_rows(c.line, options); });
    EXPECT_NE(text.find(c.reason), std::string::npos) << c.line << " gave " << text;
  }
}

TEST(PromptRows, Slices) {
  std::string file;
  for (int i = 0; i < 6; ++i) file += R"({"input":")" + std::to_string(i) + "\"}\n\n";
  const auto kept = [&](const std::string& slice) {
    PromptFileOptions options = options_for("");
    options.path = "rows.jsonl" + slice;
    std::string text;
    for (const PromptRow& row : parse_prompt_rows(file, options).rows) {
      EXPECT_EQ(std::to_string(row.row), row.text);
      text += row.text;
    }
    return text;
  };
  EXPECT_EQ(kept(""), "012345");
  EXPECT_EQ(kept("@[1:3]"), "12");
  EXPECT_EQ(kept("@[:-4]"), "01");
  EXPECT_EQ(kept("@[-2:]"), "45");
  EXPECT_EQ(kept("@[4:100]"), "45");
  EXPECT_EQ(kept("@[3:2]"), "");
  EXPECT_NE(error_of([&] { kept("@[a:3]"); }).find("not a slice"), std::string::npos);
}

std::vector<std::uint64_t> indices(const std::vector<PromptOrder::Drawn>& drawn) {
  std::vector<std::uint64_t> result;
  for (const auto& one : drawn) result.push_back(one.index);
  return result;
}

// Case C54: 64 rows, 16 a step, two epochs, saved after steps 4 and 6 (and in mid-epoch).
TEST(PromptOrder, ResumeLosesAndDoublesNothing) {
  PromptOrder whole(64, 42, true);
  const auto all = whole.next(128);
  std::multiset<std::uint64_t> seen;
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i].counter, i);
    seen.insert(all[i].index);
  }
  for (std::uint64_t i = 0; i < 64; ++i) EXPECT_EQ(seen.count(i), 2u);
  for (const std::int64_t drawn : {0, 16 * 4, 16 * 6, 5, 127, 128}) {
    PromptOrder before(64, 42, true);
    auto parts = before.next(drawn);
    PromptOrder after(64, 42, true);
    after.restore(Json::parse(before.save().dump()), "state.json");
    const auto rest = after.next(128 - drawn);
    parts.insert(parts.end(), rest.begin(), rest.end());
    EXPECT_EQ(indices(parts), indices(all)) << drawn;
  }
}

TEST(PromptOrder, StepsOfAnySizeGiveOneSequence) {
  PromptOrder whole(7, 1, true), parts(7, 1, true);
  std::vector<PromptOrder::Drawn> joined;
  for (int i = 0; i < 10; ++i) {
    for (const auto& one : parts.next(3)) joined.push_back(one);
  }
  EXPECT_EQ(indices(joined), indices(whole.next(30)));
}

TEST(PromptOrder, SeedAndEpochChooseThePermutation) {
  PromptOrder a(100, 1, true), b(100, 2, true), plain(3, 1, false);
  const auto first = indices(a.next(100)), second = indices(a.next(100));
  EXPECT_NE(first, second);
  EXPECT_NE(first, indices(b.next(100)));
  EXPECT_EQ(indices(plain.next(7)), (std::vector<std::uint64_t>{0, 1, 2, 0, 1, 2, 0}));
  // A seed means this order on every machine, for ever: saved runs depend on it.
  EXPECT_EQ(indices(PromptOrder(10, 42, true).next(10)),
            (std::vector<std::uint64_t>{5, 1, 9, 6, 7, 2, 4, 0, 8, 3}));
}

// Every permutation of three rows is met about equally often: 6,000 epochs, 1,000 each, sigma 29.
TEST(PromptOrder, ShufflesWithoutBias) {
  PromptOrder order(3, 9, true);
  std::map<std::vector<std::uint64_t>, int> counts;
  for (int epoch = 0; epoch < 6000; ++epoch) ++counts[indices(order.next(3))];
  ASSERT_EQ(counts.size(), 6u);
  for (const auto& [permutation, count] : counts) EXPECT_NEAR(count, 1000, 150);
}

TEST(PromptOrder, RefusesAnotherRunsState) {
  const Json saved = PromptOrder(64, 42, true).save();
  const auto text = [&](PromptOrder order) {
    return error_of([&] { order.restore(saved, "state.json"); });
  };
  EXPECT_NE(text(PromptOrder(63, 42, true)).find("63 prompts"), std::string::npos);
  EXPECT_TRUE(text(PromptOrder(64, 43, true)).starts_with("--rollout-seed: 43"));
  EXPECT_TRUE(text(PromptOrder(64, 42, false)).starts_with("--rollout-shuffle"));
  EXPECT_NE(error_of([] { PromptOrder(0, 1, true); }), "no error");
}

}  // namespace
}  // namespace tandem
