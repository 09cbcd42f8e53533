// Rule rewards as tables: response, label, verdict.
#include "rl/rewards.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/check.h"

namespace tandem {
namespace {

TEST(LastNumber, Reading) {
  const std::vector<std::pair<std::string, std::optional<std::string>>> cases = {
      {"", std::nullopt},
      {"none at all.", std::nullopt},
      {"12 + 7 = 19", "19"},
      {"The answer is 19.", "19"},
      {"19\n", "19"},
      {"so -5", "-5"},
      {"so \xE2\x88\x92"
       "5",
       "-5"},
      {"(-5)", "-5"},
      {"-0", "0"},
      {"12-7", "7"},  // a subtraction
      {"(3)-7", "7"},
      {"GPT-4", "4"},  // a hyphen
      {"= -7", "-7"},
      {"1,234", "1234"},
      {"$1,234,567.50", "1234567.5"},
      {"1, 234", "234"},
      {"1,2,3", "3"},
      {"1234,567", "567"},
      {"12,3456", "3456"},
      {"100,200", "100200"},
      {"12.5", "12.5"},
      {"12.00", "12"},
      {"0.50", "0.5"},
      {"12. Then", "12"},
      {"007", "7"},
      {"000", "0"},
      {"10254939386542155531", "10254939386542155531"},
      {"0010254939386542155531.0", "10254939386542155531"},
  };
  for (const auto& [text, wanted] : cases) EXPECT_EQ(last_number(text), wanted) << text;
}

TEST(LastBoxed, Reading) {
  const std::vector<std::pair<std::string, std::optional<std::string>>> cases = {
      {"no box", std::nullopt},
      {R"(\boxed{5})", "5"},
      {R"(\boxed{1} then \boxed{\frac{1}{2}} done)", R"(\frac{1}{2})"},
      {R"(\boxed{\left\{1\right\}})", R"(\left\{1\right\})"},
      {R"(\boxed{7} and \boxed{8)", "7"},  // the last one never closes
      {R"(\boxed{8)", std::nullopt},
      {R"($\boxed 9$)", "9"},
      {R"(\boxed {4})", "4"},
      {R"(\boxed{3} \fbox{6})", "6"},
      {R"(\boxed{})", ""},
      {R"(\boxed)", std::nullopt},
  };
  for (const auto& [text, wanted] : cases) {
    const auto found = last_boxed(text);
    EXPECT_EQ(found ? std::optional<std::string>(*found) : std::nullopt, wanted) << text;
  }
}

TEST(MathEqual, Pairs) {
  struct Case {
    const char* a;
    const char* b;
    bool equal;
  };
  for (const Case& c :
       std::vector<Case>{{"5", "5", true},
                         {"5", "6", false},
                         {"5.0", "5", true},
                         {"0.5", R"(\frac{1}{2})", true},
                         {"1/2", R"(\dfrac12)", true},
                         {R"(\frac{2}{4})", R"(\tfrac{1}{2})", true},
                         {R"(-\frac{1}{3})", R"(\frac{-1}{3})", true},
                         {R"(\frac{1}{-3})", "-1/3", true},
                         {"0.333333333333333333", "1/3", false},  // exact, not close
                         {R"(1\frac{1}{2})", "1.5", true},
                         {R"(-1\frac{1}{2})", "-3/2", true},
                         {"1/0", "1/0", true},  // as text
                         {"1/0", "2/0", false},
                         {"1,234", "1234", true},
                         {"1{,}234", "1234", true},
                         {"010", "10", true},
                         {"08", "8", true},
                         {".5", "0.5", true},
                         {"+3", "3", true},
                         {"\xE2\x88\x92"
                          "3",
                          "-3", true},
                         {R"(50\%)", "0.5", true},
                         {"50%", "50", true},
                         {"50%", "0.50%", false},
                         {"50%", "5", false},
                         {R"($12$)", "12", true},
                         {R"(\$12.50)", "12.5", true},
                         {R"(5\text{ cm})", "5", true},
                         {R"(90^\circ)", "90", true},
                         {R"(x=5)", "5", true},
                         {"ab = 5", "5", true},
                         {"x>=5", "5", false},
                         {"x>=5", "x<=5", false},
                         {"x!=5", "5", false},
                         {"-x=5", "5", false},
                         {R"(\text{Tuesday})", "tuesday", true},
                         {R"(\text{Tuesday})", R"(\text{Monday})", false},
                         {R"(\mathrm{B})", "B", true},
                         {R"(\left( 3, \frac{\pi}{2} \right))", R"((3,\frac\pi2))",
                          false},  // no braces for commands
                         {R"(\left( 3, \frac{1}{2} \right))", "(3,0.5)", true},
                         {"(1,2)", "[1,2]", false},
                         {"(1,2)", "(2,1)", false},
                         {"1, 2", "1,2", true},
                         {"1,2", "12", false},
                         {R"(2\sqrt3)", R"(2\sqrt{3})", true},
                         {"x^2+1", "x^2 + 1", true},
                         {"x^2+1", "x^2+2", false},
                         {"10254939386542155531", "10254939386542155532", false},
                         {"10254939386542155531", "10254939386542155531.0", true},
                         {"", "", false},
                         {"", "0", false},
                         {"0", "-0", true}}) {
    EXPECT_EQ(math_equal(c.a, c.b), c.equal) << c.a << " and " << c.b;
    EXPECT_EQ(math_equal(c.b, c.a), c.equal) << c.b << " and " << c.a;
  }
  const std::string long_number(2000, '7');
  EXPECT_TRUE(math_equal(long_number, long_number));
  EXPECT_FALSE(math_equal(long_number, long_number + "0"));
}

TEST(RuleReward, Verdicts) {
  struct Case {
    const char* rule;
    const char* response;
    const char* label;
    double reward;
  };
  for (const Case& c :
       std::vector<Case>{{"last-number", "12 + 7 = 19.", "19", 1},
                         {"last-number", "19 is not 20", "19", 0},
                         {"last-number", "it is 1,234", "1234", 1},
                         {"last-number", "it is 12.5", "5", 0},
                         {"last-number", "it is 12.0", "12", 1},
                         {"last-number", "-19", "19", 0},
                         {"last-number", "no idea", "19", 0},
                         {"last-number", "72", "#### 72", 1},
                         {"last-number", "no idea", "none", 0},
                         {"last-number", "72057594038135102", "72057594038135102", 1},
                         {"last-number", "72057594038135104", "72057594038135102", 0},
                         {"exact", " yes\n", "yes", 1},
                         {"exact", "Yes", "yes", 0},
                         {"math", R"(so \boxed{\frac{1}{2}}, done in 3 steps)", "0.5", 1},
                         {"math", R"(\boxed{3})", R"(the solution is \boxed{3})", 1},
                         {"math", "so the answer is 42.", "42", 1},
                         {"math", "nothing", "42", 0},
                         {"math", R"(\boxed{})", "", 0},
                         {"boxed_math", "so the answer is 42.", "42", 0},
                         {"boxed_math", R"(\boxed{42})", "42", 1},
                         {"boxed_exact", R"(the letter \boxed{ B } it is)", "B", 1},
                         {"boxed_exact", "B", "B", 0},
                         {"boxed_last-number", R"(\boxed{x = 7} 8)", "7", 1}}) {
    EXPECT_EQ(rule_reward(parse_reward_rule(c.rule), c.response, c.label), c.reward)
        << c.rule << ": " << c.response;
  }
}

TEST(RuleReward, UnknownRulesListTheKnownOnes) {
  for (const char* name : {"maths", "", "boxed_", "boxed_boxed_exact", "Exact"}) {
    try {
      parse_reward_rule(name);
      FAIL() << name;
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()),
                "--rm-type: unknown rule '" + std::string(name) +
                    "'; known are last-number, exact, math, each also with the prefix boxed_");
    }
  }
}

TEST(RuleReward, LabelsThatCanNeverWin) {
  const RewardRule number = parse_reward_rule("last-number"), exact = parse_reward_rule("exact");
  EXPECT_FALSE(label_fault(number, "19"));
  EXPECT_TRUE(label_fault(number, "nineteen"));
  EXPECT_TRUE(label_fault(exact, "  "));
  EXPECT_FALSE(label_fault(exact, "x"));
}

}  // namespace
}  // namespace tandem
