// Text, JSON, hash and the generator: values that are known from elsewhere.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "base/hash.h"
#include "base/json.h"
#include "base/philox.h"
#include "base/text.h"

namespace tandem {
namespace {

std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "(no error)";
}

// Known answers of Random123 (kat_vectors, philox4x32 with 10 rounds).
TEST(Philox, GivesTheKnownAnswers) {
  using Words = Philox4x32::Counter;
  EXPECT_EQ(Philox4x32::words({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32::words({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(
      Philox4x32::words({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
      (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
  EXPECT_EQ(Philox4x32::words(0x85a308d3243f6a88, 0x0370734413198a2e, 0x299f31d0a4093822),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, UniformNumbersStayBelowOne) {
  EXPECT_EQ(uniform_float(0), 0.0f);
  EXPECT_LT(uniform_float(~0u), 1.0f);
  EXPECT_EQ(uniform_float(0x80000000u), 0.5f);
  EXPECT_EQ(uniform_double(0, 0), 0.0);
  EXPECT_LT(uniform_double(~0u, ~0u), 1.0);
  EXPECT_EQ(uniform_double(0, 0x40000000u), 0.25);
}

TEST(Hash, IsSplitmix64) {
  // First outputs of the reference program with seed 1234567.
  EXPECT_EQ(splitmix64(1234567), 6457827717110365317ull);
  EXPECT_EQ(splitmix64(1234567 + 0x9E3779B97F4A7C15ull), 3203168211198807973ull);
  EXPECT_NE(checksum_term(1, 2), checksum_term(2, 1));
  EXPECT_NE(checksum_term(1, 2, 0), checksum_term(1, 2, 1));
}

TEST(Text, SplitsTrimsAndParsesStrictly) {
  EXPECT_EQ(split("a,,b", ','), (std::vector<std::string_view>{"a", "", "b"}));
  EXPECT_EQ(split("", ','), (std::vector<std::string_view>{""}));
  EXPECT_EQ(trim(" \t a b\n"), "a b");
  EXPECT_EQ(trim(" \n"), "");
  EXPECT_EQ(parse_int("-12"), -12);
  for (const char* bad : {"", " 1", "1 ", "1x", "0x1", "+1", "1.0", "99999999999999999999"}) {
    EXPECT_EQ(parse_int(bad), std::nullopt) << bad;
  }
  EXPECT_EQ(parse_double("2.5e-1"), 0.25);
  EXPECT_EQ(parse_double("2.5s"), std::nullopt);
}

TEST(Text, CutsLinesAndCharactersWhole) {
  EXPECT_EQ(last_lines("a\nb\nc\n", 2), "b\nc\n");
  EXPECT_EQ(last_lines("a\nb\nc", 2), "b\nc");
  EXPECT_EQ(last_lines("a\n\n", 1), "\n");
  EXPECT_EQ(last_lines("\nb", 5), "\nb");
  EXPECT_EQ(last_lines("", 3), "");
  EXPECT_EQ(one_line("a\nb\tc", 80), "a b c");
  EXPECT_EQ(one_line("aé", 2), "a…");  // é is two bytes and would be cut in half
  EXPECT_EQ(one_line("aé", 3), "aé");
}

TEST(Text, GivesATerminalNothingToObey) {
  EXPECT_EQ(printable("plain\tand\nlines é € 😀"), "plain\tand\nlines é € 😀");
  const std::pair<std::string_view, const char*> cases[] = {
      {"\x1b[31mred", "\\x1b[31mred"},
      {std::string_view("a\0b\x7f", 4), "a\\x00b\\x7f"},
      {"\xff\xfe", "\\xff\\xfe"},
      {"\xc2\x9b"
       "2J",
       "\\xc2\\x9b2J"},                                  // CSI in one character
      {"\xc0\xaf", "\\xc0\\xaf"},                      // overlong '/'
      {"\xe0\x80\x80", "\\xe0\\x80\\x80"},            // overlong in three
      {"\xed\xa0\x80", "\\xed\\xa0\\x80"},            // a surrogate
      {"\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80"},  // above U+10FFFF
      {"a\xe2\x82", "a\\xe2\\x82"},                    // cut off
  };
  for (const auto& [text, shown] : cases) EXPECT_EQ(printable(text), shown);
  EXPECT_EQ(one_line("a\x1b[1m\xff", 80), "a [1m\\xff");
}

TEST(Text, ShowsQuantities) {
  EXPECT_EQ(human_bytes(512), "512 B");
  EXPECT_EQ(human_bytes(1536), "1.5 KiB");
  EXPECT_EQ(human_bytes(3.5 * (1 << 30)), "3.5 GiB");
  EXPECT_EQ(human_seconds(0.0031), "3 ms");
  EXPECT_EQ(human_seconds(2.5), "2.5 s");
  EXPECT_EQ(human_seconds(59.99), "1 min 00 s");
  EXPECT_EQ(human_seconds(7500), "2 h 05 min");
  EXPECT_EQ(human_count(12345), "12.3k");
}

TEST(JsonText, ErrorsNameSourceAndPosition) {
  const std::string text = error_of([] { parse_json("{\n  \"a\": 1,\n  oops\n}", "config.json"); });
  EXPECT_NE(text.find("config.json: not valid JSON at line 3, column 3"), std::string::npos)
      << text;
  EXPECT_NE(error_of([] { parse_json("", "x"); }).find("line 1, column 1"), std::string::npos);
  EXPECT_NE(error_of([] { parse_json("{} {}", "x"); }).find("not valid"), std::string::npos);
  EXPECT_EQ(error_of([] { parse_json("[1e999]", "x"); }),
            "x: not valid JSON: number overflow parsing '1e999'");
}

TEST(JsonText, ReadsNoValueAsAnotherType) {
  const Json json = parse_json(
      R"({"i": 5, "big": 5000000000, "neg": -1, "f": 1.5, "b": true, "s": "5", "v": [1, 2], "z": null})",
      "t");
  EXPECT_EQ(require<int>(json, "i", "t"), 5);
  EXPECT_EQ(require<std::int64_t>(json, "big", "t"), 5000000000);
  EXPECT_EQ(require<double>(json, "i", "t"), 5.0);
  EXPECT_EQ(require<std::vector<int>>(json, "v", "t"), (std::vector<int>{1, 2}));
  EXPECT_EQ(optional_key<int>(json, "absent", "t", 7), 7);
  EXPECT_EQ(optional_key<int>(json, "z", "t", 7), 7);
  EXPECT_EQ(require<std::uint32_t>(Json{{"n", 5}}, "n", "t"), 5u);  // built, not parsed
  for (const char* key : {"big", "f", "b", "s", "z"}) {
    EXPECT_NE(error_of([&] { require<int>(json, key, "t"); }), "(no error)") << key;
  }
  EXPECT_NE(error_of([&] { require<unsigned>(json, "neg", "t"); }), "(no error)");
  EXPECT_NE(error_of([&] { require<std::string>(json, "i", "t"); }), "(no error)");
  EXPECT_NE(error_of([&] { require<double>(json, "s", "t"); }), "(no error)");
  EXPECT_NE(error_of([&] { require<bool>(json, "i", "t"); }), "(no error)");
  EXPECT_EQ(error_of([&] { require<int>(json, "none", "model.json"); }),
            "model.json: key 'none' is missing");
  EXPECT_NE(error_of([&] { require<int>(json, "f", "m.json"); }).find("m.json: f: found 1.5"),
            std::string::npos);
}

TEST(JsonText, KeepsOrderAndSurvivesBadBytes) {
  OrderedJson row;
  row["z"] = 1;
  row["a"] = std::nan("");
  row["t"] = "\xFF";
  EXPECT_EQ(dump_json(row), "{\"z\":1,\"a\":null,\"t\":\"\xEF\xBF\xBD\"}");
}

}  // namespace
}  // namespace tandem
