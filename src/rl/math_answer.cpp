// math_equal, see rewards.h: answers as exact rational numbers where both are numbers, as
// normalised LaTeX elsewhere. Numbers of more than kMaxDigits digits are compared as text, so that
// no response can make the comparison slow.
#include <algorithm>
#include <array>
#include <boost/multiprecision/cpp_int.hpp>
#include <cctype>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"
#include "rl/rewards.h"

namespace tandem {
namespace {

using boost::multiprecision::cpp_int;
constexpr std::size_t kMaxDigits = 1000;
constexpr int kMaxDepth = 8;  // of nested lists and tuples

struct Rational {
  cpp_int numerator, denominator = 1;  // denominator > 0
};

bool operator==(const Rational& a, const Rational& b) {
  return a.numerator * b.denominator == b.numerator * a.denominator;
}

struct Answer {
  Rational value;
  bool percent = false;  // written with a sign; value is already divided by 100
};

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != text.npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
}

// The place after the group that opens at `open` ('{'), or npos.
std::size_t group_end(std::string_view text, std::size_t open) {
  std::size_t depth = 0;
  for (std::size_t i = open; i < text.size(); ++i) {
    if (text[i] == '{') ++depth;
    if (text[i] == '}' && --depth == 0) return i + 1;
  }
  return text.npos;
}

// Replaces "\command{content}" by the content, or by nothing.
void unwrap(std::string& text, std::string_view command, bool keep_content) {
  for (std::size_t at = 0; (at = text.find(command, at)) != text.npos;) {
    const std::size_t open = at + command.size();
    const std::size_t end =
        open < text.size() && text[open] == '{' ? group_end(text, open) : text.npos;
    if (end == text.npos) {
      at = open;
      continue;
    }
    const std::string content = keep_content ? text.substr(open + 1, end - open - 2) : "";
    text.replace(at, end - at, content);
  }
}

// \frac12, \frac1{2}, \sqrt3 get their braces: `arguments` of them after each command.
void brace_arguments(std::string& text, std::string_view command, int arguments) {
  for (std::size_t at = 0; (at = text.find(command, at)) != text.npos;) {
    at += command.size();
    std::size_t place = at;
    for (int i = 0; i < arguments && place < text.size(); ++i) {
      if (text[place] == '{') {
        const std::size_t end = group_end(text, place);
        if (end == text.npos) return;
        place = end;
      } else if (std::isalnum(static_cast<unsigned char>(text[place]))) {
        text.replace(place, 1, std::string{'{', text[place], '}'});
        place += 3;
      } else {
        break;
      }
    }
  }
}

std::string normalise(std::string_view raw) {
  std::string text(trim(raw));
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 24> kReplacements = {{
      {"\\dfrac", "\\frac"}, {"\\tfrac", "\\frac"},
      {"\\cfrac", "\\frac"}, {"\\left", ""},
      {"\\right", ""},       {"\\displaystyle", ""},
      {"\\!", ""},           {"\\,", ""},
      {"\\;", ""},           {"\\:", ""},
      {"\\ ", ""},           {"~", ""},
      {"\\$", ""},           {"$", ""},
      {"\\(", ""},           {"\\)", ""},
      {"\\%", "%"},          {"^{\\circ}", ""},
      {"^\\circ", ""},       {"{,}", ","},
      {"\xE2\x88\x92", "-"}, {"\xC2\xB0", ""},
      {"\\cdot", "*"},       {"\\times", "*"},
  }};
  for (const auto& [from, to] : kReplacements) replace_all(text, from, to);
  for (const std::string_view command : {"\\text", "\\textbf", "\\mathrm", "\\mathbf", "\\mbox"}) {
    std::string without = text;  // text beside a value is a unit, text alone is the answer
    unwrap(without, command, false);
    if (trim(without).empty())
      unwrap(text, command, true);
    else
      text = without;
  }
  std::erase_if(text, [](char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; });
  while (text.ends_with('.')) text.pop_back();
  // "x=5" answers 5; "x>=5" and "-x=5" do not.
  const std::size_t equals = text.find('=');
  const auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
  if (equals != text.npos && equals >= 1 && equals <= 2 &&
      std::all_of(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(equals), is_letter) &&
      text.find('=', equals + 1) == text.npos) {
    text.erase(0, equals + 1);
  }
  brace_arguments(text, "\\frac", 2);
  brace_arguments(text, "\\sqrt", 1);
  for (char& c : text) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return text;
}

// The whole text as an unsigned decimal, thousands in groups of three or plain.
std::optional<Rational> parse_decimal(std::string_view text) {
  if (text.empty() || text.size() > kMaxDigits) return std::nullopt;
  const std::size_t point = std::min(text.find('.'), text.size());
  const std::vector<std::string_view> groups = split(text.substr(0, point), ',');
  std::string digits;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (i > 0 && (groups[i].size() != 3 || groups[0].size() > 3 || groups[0].empty())) {
      return std::nullopt;
    }
    digits += groups[i];
  }
  const std::string_view fraction = text.substr(std::min(point + 1, text.size()));
  if (digits.empty() && fraction.empty()) return std::nullopt;
  digits += fraction;
  if (digits.find_first_not_of("0123456789") != digits.npos) return std::nullopt;
  const std::size_t first = std::min(digits.find_first_not_of('0'), digits.size() - 1);
  return Rational{cpp_int(digits.substr(first)),  // a leading 0 would mean octal
                  boost::multiprecision::pow(cpp_int(10), static_cast<unsigned>(fraction.size()))};
}

bool strip_minus(std::string_view& text) {
  const bool minus = text.starts_with('-');
  if (minus || text.starts_with('+')) text.remove_prefix(1);
  return minus;
}

std::optional<Rational> parse_signed_decimal(std::string_view text) {
  const bool minus = strip_minus(text);
  std::optional<Rational> value = parse_decimal(text);
  if (value && minus) value->numerator = -value->numerator;
  return value;
}

std::optional<Rational> divide(const std::optional<Rational>& a, const std::optional<Rational>& b) {
  if (!a || !b || b->numerator == 0) return std::nullopt;
  Rational result{a->numerator * b->denominator, a->denominator * b->numerator};
  if (result.denominator < 0) {
    result.numerator = -result.numerator;
    result.denominator = -result.denominator;
  }
  return result;
}

// Unsigned: decimal, a/b, \frac{a}{b}, or a whole number followed by \frac{a}{b}.
std::optional<Rational> parse_magnitude(std::string_view text) {
  const std::size_t frac = text.find("\\frac{");
  if (frac != text.npos) {
    const std::size_t open = frac + 5;
    const std::size_t middle = group_end(text, open);
    if (middle == text.npos || middle >= text.size() || text[middle] != '{') return std::nullopt;
    if (group_end(text, middle) != text.size()) return std::nullopt;
    std::optional<Rational> value =
        divide(parse_signed_decimal(text.substr(open + 1, middle - open - 2)),
               parse_signed_decimal(text.substr(middle + 1, text.size() - middle - 2)));
    if (!value || frac == 0) return value;
    const std::optional<Rational> whole = parse_decimal(text.substr(0, frac));
    if (!whole || whole->denominator != 1) return std::nullopt;
    value->numerator += whole->numerator * value->denominator;
    return value;
  }
  const std::size_t slash = text.find('/');
  if (slash == text.npos) return parse_decimal(text);
  return divide(parse_decimal(text.substr(0, slash)), parse_signed_decimal(text.substr(slash + 1)));
}

std::optional<Answer> parse_answer(std::string_view text) {
  Answer answer;
  if (text.ends_with('%')) {
    answer.percent = true;
    text.remove_suffix(1);
  }
  const bool minus = strip_minus(text);
  std::optional<Rational> value = parse_magnitude(text);
  if (!value) return std::nullopt;
  if (minus) value->numerator = -value->numerator;
  if (answer.percent) value->denominator *= 100;
  answer.value = std::move(*value);
  return answer;
}

bool equal_values(const Answer& a, const Answer& b) {
  if (a.value == b.value) return true;
  if (a.percent == b.percent) return false;
  Rational bare = a.percent ? a.value : b.value;  // "50%" against "50": the sign was left out
  bare.numerator *= 100;
  return bare == (a.percent ? b.value : a.value);
}

// Parts between commas that no bracket encloses.
std::vector<std::string_view> top_level_parts(std::string_view text) {
  std::vector<std::string_view> parts;
  int depth = 0;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '(' || text[i] == '[' || text[i] == '{') ++depth;
    if (text[i] == ')' || text[i] == ']' || text[i] == '}') --depth;
    if (text[i] != ',' || depth != 0) continue;
    parts.push_back(text.substr(begin, i - begin));
    begin = i + 1;
  }
  parts.push_back(text.substr(begin));
  return parts;
}

bool equal_parts(std::string_view a, std::string_view b, int depth) {
  if (a == b) return true;
  if (depth == kMaxDepth || a.empty() || b.empty()) return false;
  const std::optional<Answer> value_a = parse_answer(a), value_b = parse_answer(b);
  if (value_a && value_b) return equal_values(*value_a, *value_b);
  if (value_a || value_b) return false;
  const auto bracketed = [](std::string_view text) {
    return text.size() >= 2 && (text.front() == '(' || text.front() == '[') &&
           (text.back() == ')' || text.back() == ']');
  };
  if (bracketed(a) && bracketed(b)) {
    if (a.front() != b.front() || a.back() != b.back()) return false;
    a = a.substr(1, a.size() - 2);
    b = b.substr(1, b.size() - 2);
  }
  const auto parts_a = top_level_parts(a), parts_b = top_level_parts(b);
  if (parts_a.size() != parts_b.size() || parts_a.size() < 2) return false;
  return std::equal(parts_a.begin(), parts_a.end(), parts_b.begin(),
                    [depth](auto x, auto y) { return equal_parts(x, y, depth + 1); });
}

}  // namespace

bool math_equal(std::string_view a, std::string_view b) {
  const std::string left = normalise(a), right = normalise(b);
  if (left.empty() || right.empty()) return false;
  return equal_parts(left, right, 0);
}

}  // namespace tandem
