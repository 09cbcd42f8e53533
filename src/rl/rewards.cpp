// See rewards.h. The comparison of mathematical answers is in math_answer.cpp.
#include "rl/rewards.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>

#include "base/check.h"
#include "base/text.h"

namespace tandem {
namespace {

constexpr std::array<std::pair<std::string_view, RewardKind>, 3> kRules = {
    {{"last-number", RewardKind::last_number},
     {"exact", RewardKind::exact},
     {"math", RewardKind::math}}};
constexpr std::string_view kBoxedPrefix = "boxed_";
constexpr std::string_view kUnicodeMinus = "\xE2\x88\x92";

bool is_digit(char c) { return c >= '0' && c <= '9'; }

std::size_t digits_from(std::string_view text, std::size_t at) {
  std::size_t count = 0;
  while (at + count < text.size() && is_digit(text[at + count])) ++count;
  return count;
}

// Reads the number whose first digit is at `at`; returns its canonical text and moves `at` past it.
std::string read_number(std::string_view text, std::size_t& at) {
  const std::size_t run = digits_from(text, at);
  std::string whole(text.substr(at, run));
  at += run;
  if (run <= 3) {
    while (at < text.size() && text[at] == ',' && digits_from(text, at + 1) == 3) {
      whole += text.substr(at + 1, 3);
      at += 4;
    }
  }
  whole.erase(0, std::min(whole.find_first_not_of('0'), whole.size() - 1));
  if (at >= text.size() || text[at] != '.') return whole;
  const std::size_t places = digits_from(text, at + 1);
  if (places == 0) return whole;
  std::string fraction(text.substr(at + 1, places));
  at += 1 + places;
  fraction.erase(fraction.find_last_not_of('0') + 1);
  return fraction.empty() ? whole : whole + "." + fraction;
}

// Whether a minus sign ends right before `at` and is a sign, not a subtraction or a hyphen.
bool has_sign(std::string_view text, std::size_t at) {
  std::size_t sign_bytes = 0;
  const std::string_view before = text.substr(0, at);
  if (before.ends_with('-')) sign_bytes = 1;
  if (before.ends_with(kUnicodeMinus)) sign_bytes = kUnicodeMinus.size();
  if (sign_bytes == 0) return false;
  if (at == sign_bytes) return true;
  const char previous = text[at - sign_bytes - 1];
  return !std::isalnum(static_cast<unsigned char>(previous)) && previous != ')' && previous != ']';
}

}  // namespace

RewardRule parse_reward_rule(std::string_view name) {
  RewardRule rule;
  std::string_view bare = name;
  if (bare.starts_with(kBoxedPrefix)) {
    rule.boxed = true;
    bare.remove_prefix(kBoxedPrefix.size());
  }
  std::string known;
  for (const auto& [rule_name, kind] : kRules) {
    if (rule_name == bare) {
      rule.kind = kind;
      return rule;
    }
    known += fmt::format("{}{}", known.empty() ? "" : ", ", rule_name);
  }
  throw Error(
      fmt::format("--rm-type: unknown rule '{}'; known are {}, each also with the prefix {}", name,
                  known, kBoxedPrefix));
}

std::optional<std::string> last_number(std::string_view text) {
  std::optional<std::string> found;
  for (std::size_t at = 0; at < text.size();) {
    if (!is_digit(text[at])) {
      ++at;
      continue;
    }
    const bool negative = has_sign(text, at);
    std::string number = read_number(text, at);
    found = negative && number != "0" ? "-" + number : number;
  }
  return found;
}

std::optional<std::string_view> last_boxed(std::string_view text) {
  for (std::size_t from = text.size(); from > 0;) {
    const std::size_t boxed = text.rfind("\\boxed", from - 1);
    const std::size_t framed = text.rfind("\\fbox", from - 1);
    if (boxed == text.npos && framed == text.npos) return std::nullopt;
    const bool is_boxed = framed == text.npos || (boxed != text.npos && boxed > framed);
    from = is_boxed ? boxed : framed;
    std::string_view rest = text.substr(from + (is_boxed ? 6 : 5));
    if (rest.starts_with(' ')) {
      rest = trim(rest);
      const std::size_t end = rest.find_first_of(" \t\n$");
      if (!rest.empty() && rest.front() != '{') return rest.substr(0, end);
    }
    if (!rest.starts_with('{')) continue;
    std::size_t depth = 0;
    for (std::size_t i = 0; i < rest.size(); ++i) {
      if (rest[i] == '\\') {
        ++i;  // "\{" is a brace of the answer
        continue;
      }
      if (rest[i] == '{') ++depth;
      if (rest[i] == '}' && --depth == 0) return rest.substr(1, i - 1);
    }
  }
  return std::nullopt;
}

double rule_reward(const RewardRule& rule, std::string_view response, std::string_view label) {
  if (rule.boxed) {
    const std::optional<std::string_view> box = last_boxed(response);
    if (!box) return 0.0;
    response = *box;
  }
  switch (rule.kind) {
    case RewardKind::last_number: {
      const std::optional<std::string> wanted = last_number(label);
      return wanted && last_number(response) == wanted ? 1.0 : 0.0;
    }
    case RewardKind::exact:
      return trim(response) == trim(label) ? 1.0 : 0.0;
    case RewardKind::math: {
      const std::string_view wanted = last_boxed(label).value_or(label);
      if (trim(wanted).empty()) return 0.0;
      if (rule.boxed) return math_equal(response, wanted) ? 1.0 : 0.0;
      if (const auto box = last_boxed(response)) return math_equal(*box, wanted) ? 1.0 : 0.0;
      const std::optional<std::string> number = last_number(response);
      return number && math_equal(*number, wanted) ? 1.0 : 0.0;
    }
  }
  return 0.0;
}

std::optional<std::string> label_fault(const RewardRule& rule, std::string_view label) {
  if (trim(label).empty()) return "the label is empty; set --label-key to the key of the answers";
  if (rule.kind == RewardKind::last_number && !last_number(label)) {
    return fmt::format(
        "the label '{}' holds no number, which --rm-type last-number compares; use "
        "exact or math, or another --label-key",
        one_line(label, 60));
  }
  return std::nullopt;
}

}  // namespace tandem
