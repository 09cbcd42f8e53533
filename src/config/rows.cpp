// One row at a time: showing, setting and checking a value whose type is known only at run time.
#include "config/rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/json.h"
#include "base/text.h"

namespace tandem {
namespace {

// Alternatives take plain pointers: with const ones the generic lambda would fit better.
template <class... F>
struct Overload : F... {
  using F::operator()...;
};
template <class... F>
Overload(F...) -> Overload<F...>;

std::optional<bool> parse_bool(std::string_view text) {
  if (text == "true") return true;
  if (text == "false") return false;
  return std::nullopt;
}

// Puts a parsed value in place; false if there was none.
template <class T, class U>
bool put(T& target, const std::optional<U>& parsed) {
  if (parsed) target = *parsed;
  return parsed.has_value();
}

bool set_one(const FlagRow& row, const std::string& word) {
  return std::visit(
      Overload{
          [&](bool* value) { return put(*value, parse_bool(word)); },
          [&](std::optional<bool>* value) { return put(*value, parse_bool(word)); },
          [&](std::int64_t* value) { return put(*value, parse_int(word)); },
          [&](std::optional<std::int64_t>* value) { return put(*value, parse_int(word)); },
          [&](double* value) { return put(*value, parse_double(word)); },
          [&](std::optional<double>* value) { return put(*value, parse_double(word)); },
          [&](std::string* value) { return put(*value, std::optional<std::string>(word)); },
          [&](EnumRef value) {
            const auto found = std::ranges::find(value.spellings, word);
            if (found == value.spellings.end()) return false;
            value.set(value.value, static_cast<int>(found - value.spellings.begin()));
            return true;
          },
          [](std::vector<std::string>*) { return false; },
          [](std::vector<std::int64_t>*) { return false; },
      },
      row.value);
}

// The numbers in the value: none, one, or a list's.
std::vector<double> numbers_of(const FlagRow& row) {
  return std::visit(
      Overload{
          [](std::int64_t* value) -> std::vector<double> { return {static_cast<double>(*value)}; },
          [](std::optional<std::int64_t>* value) -> std::vector<double> {
            if (!*value) return {};
            return {static_cast<double>(**value)};
          },
          [](double* value) -> std::vector<double> { return {*value}; },
          [](std::optional<double>* value) -> std::vector<double> {
            if (!*value) return {};
            return {**value};
          },
          [](std::vector<std::int64_t>* value) -> std::vector<double> {
            return {value->begin(), value->end()};
          },
          [](const auto&) -> std::vector<double> { return {}; },
      },
      row.value);
}

std::string bounds_text(const RowOptions& options) {
  const auto plain = [](double bound) { return fmt::format("{}", bound); };
  const std::string low = (options.open ? "above " : "at least ") + plain(options.at_least);
  const bool has_low = options.at_least > -std::numeric_limits<double>::infinity();
  const bool has_high = options.at_most < std::numeric_limits<double>::infinity();
  const std::string high = "at most " + plain(options.at_most);
  return has_low && has_high ? low + " and " + high : has_low ? low : high;
}

std::string join(const std::vector<std::string_view>& parts) {
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::string joined_choices(const FlagRow& row) {
  if (const auto* value = std::get_if<EnumRef>(&row.value)) {
    return fmt::format("{}", fmt::join(value->spellings, "|"));
  }
  return std::string(row.options.choices);
}

bool is_object(const std::string& text) {
  const Json json = Json::parse(text, nullptr, false);
  return !json.is_discarded() && json.is_object();
}

}  // namespace

bool is_switch(const FlagRow& row) {
  return std::holds_alternative<bool*>(row.value) ||
         std::holds_alternative<std::optional<bool>*>(row.value);
}

bool is_list(const FlagRow& row) {
  return std::holds_alternative<std::vector<std::string>*>(row.value) ||
         std::holds_alternative<std::vector<std::int64_t>*>(row.value);
}

std::string show(const FlagRow& row) {
  return std::visit(
      Overload{
          [](bool* value) { return fmt::format("{}", *value); },
          [](std::int64_t* value) { return fmt::format("{}", *value); },
          [](double* value) { return fmt::format("{}", *value); },
          [](std::string* value) { return *value; },
          [](std::vector<std::string>* value) { return fmt::format("{}", fmt::join(*value, " ")); },
          [](std::vector<std::int64_t>* value) {
            return fmt::format("{}", fmt::join(*value, " "));
          },
          [](EnumRef value) {
            return std::string(value.spellings[static_cast<std::size_t>(value.get(value.value))]);
          },
          [](const auto* value) { return *value ? fmt::format("{}", **value) : std::string(); },
      },
      row.value);
}

std::string value_hint(const FlagRow& row) {
  const std::string choices = joined_choices(row);
  if (!choices.empty()) return choices;
  return std::visit(Overload{
                        [](bool*) { return ""; },
                        [](std::optional<bool>*) { return ""; },
                        [](std::int64_t*) { return "<int>"; },
                        [](std::optional<std::int64_t>*) { return "<int>"; },
                        [](double*) { return "<number>"; },
                        [](std::optional<double>*) { return "<number>"; },
                        [](std::vector<std::string>*) { return "<text>..."; },
                        [](std::vector<std::int64_t>*) { return "<int>..."; },
                        [](const auto&) { return "<text>"; },
                    },
                    row.value);
}

std::optional<std::string> set_from_words(const FlagRow& row, std::span<const std::string> words) {
  if (const auto* texts = std::get_if<std::vector<std::string>*>(&row.value)) {
    (*texts)->assign(words.begin(), words.end());
    return std::nullopt;
  }
  if (const auto* numbers = std::get_if<std::vector<std::int64_t>*>(&row.value)) {
    std::vector<std::int64_t> read;
    for (const std::string& word : words) {
      const auto number = parse_int(word);
      if (!number) return "integers";
      read.push_back(*number);
    }
    **numbers = std::move(read);
    return std::nullopt;
  }
  if (words.size() == 1 && set_one(row, words[0])) return std::nullopt;
  const std::string choices = joined_choices(row);
  if (!choices.empty()) return "one of " + join(alternatives(choices));
  if (is_switch(row)) return "true or false";
  const std::string hint = value_hint(row);
  return hint == "<int>" ? "one integer" : hint == "<number>" ? "one number" : "one value";
}

std::optional<std::string> row_fault(const FlagRow& row, const FlagRow& standard,
                                     const std::string& origin) {
  const RowOptions& options = row.options;
  const std::string found = show(row);
  for (const double number : numbers_of(row)) {
    if (!std::isfinite(number)) {
      return fmt::format("{}: found {}, wanted a finite number", origin, number);
    }
    const bool low = options.open ? number > options.at_least : number >= options.at_least;
    if (!low || !(number <= options.at_most)) {
      return fmt::format("{}: found {}, wanted {}", origin, number, bounds_text(options));
    }
  }
  if (found.empty() || found == show(standard)) return std::nullopt;
  const auto is_one_of = [&](std::string_view list) {
    return std::ranges::count(alternatives(list), std::string_view(found)) > 0;
  };
  if (!options.choices.empty() && !is_one_of(options.choices)) {
    return fmt::format("{}: found '{}', wanted one of {}", origin, found,
                       join(alternatives(options.choices)));
  }
  if (options.json_object && !is_object(found)) {
    return fmt::format("{}: found '{}', wanted a JSON object such as '{{\"key\": true}}'", origin,
                       one_line(found, 60));
  }
  if (options.kind == Kind::refused) {
    const std::string wanted = show(standard);
    return fmt::format("{}: {} is not built yet (only {}): {}", origin, one_line(found, 60),
                       wanted.empty() ? "leaving it out" : wanted, options.why);
  }
  if (!options.now.empty() && !is_one_of(options.now)) {
    return fmt::format("{}: {} is not built yet (only {}): {}", origin, found,
                       join(alternatives(options.now)), options.why);
  }
  return std::nullopt;
}

std::vector<std::string_view> alternatives(std::string_view list) {
  return list.empty() ? std::vector<std::string_view>{} : split(list, '|');
}

}  // namespace tandem
