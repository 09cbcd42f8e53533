// Rule rewards: --rm-type names a rule that reads a response and a label and gives 1 or 0.
//
//   last-number  the last number of the response equals the label's last number
//   exact        the texts are equal, white space at both ends aside
//   math         the last complete \boxed{…} (else the last number) equals the label as a value or,
//                if either is not a number, as normalised LaTeX
//   boxed_RULE   RULE applied to the content of the last \boxed{…}; 0 where there is none
//
// Numbers are compared exactly (any number of digits, no floating point). The functions are pure
// and depend on nothing but the two texts.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace tandem {

enum class RewardKind { last_number, exact, math };

struct RewardRule {
  RewardKind kind = RewardKind::exact;
  bool boxed = false;  // only the last box of the response is looked at
};

// The rule named `name`; an unknown name is an Error that lists the known ones.
RewardRule parse_reward_rule(std::string_view name);

// 1.0 or 0.0.
double rule_reward(const RewardRule& rule, std::string_view response, std::string_view label);

// Why no response could ever earn a reward with this label, or nothing: to be asked for every
// prompt before a run starts, since a useless label would train on zeros without a word.
std::optional<std::string> label_fault(const RewardRule& rule, std::string_view label);

// The last number in a text in canonical digits ("-1234.5"), or nothing. A number is: an optional
// minus (- or U+2212) that does not follow a letter, digit, ')' or ']'; digits, plain or in groups
// of three after commas ("1,234"; "100,200" without a space is one number, "1,2" two); an optional
// fraction after a point that digits follow ("12.50" is 12.5, "12." is 12). "12.5" is therefore not
// the integer 5. Exponents are not read.
std::optional<std::string> last_number(std::string_view text);

// The content of the last \boxed{…} or \fbox{…} whose braces close ("\boxed 7" gives "7").
std::optional<std::string_view> last_boxed(std::string_view text);

// Whether two answers are equal as the rule `math` sees it: integers, decimals, fractions (a/b,
// \frac{a}{b}, mixed numbers "1\frac{1}{2}"), percent ("50%" equals 0.5 and also a bare 50), lists
// and tuples element by element, everything else as normalised text without regard to case.
bool math_equal(std::string_view a, std::string_view b);

}  // namespace tandem
