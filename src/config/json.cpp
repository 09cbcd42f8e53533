// Rows to JSON and back. Types are strict, as everywhere: 1.5 is not an integer, "1" no number.
#include "config/json.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"

namespace tandem {
namespace {

OrderedJson value_to_json(const FlagRow& row) {
  if (std::holds_alternative<EnumRef>(row.value)) return show(row);
  return std::visit(
      [](const auto& value) -> OrderedJson {
        if constexpr (std::is_same_v<std::remove_cvref_t<decltype(value)>, EnumRef>) {
          return nullptr;
        } else if constexpr (requires { value->has_value(); }) {
          return *value ? OrderedJson(**value) : OrderedJson(nullptr);
        } else {
          return *value;
        }
      },
      row.value);
}

// Reads one value; throws Error with `where` in front if the type is wrong.
void value_from_json(const FlagRow& row, const OrderedJson& json, const std::string& where) {
  if (std::holds_alternative<EnumRef>(row.value)) {
    const std::vector<std::string> words{read_value<std::string>(json, where)};
    const auto wanted = set_from_words(row, words);
    TD_CHECK(!wanted, "{}: found '{}', wanted {}", where, words[0], *wanted);
    return;
  }
  std::visit(
      [&](const auto& value) {
        if constexpr (requires { value->has_value(); }) {
          using T = typename std::remove_cvref_t<decltype(*value)>::value_type;
          value->reset();
          if (!json.is_null()) *value = read_value<T>(json, where);
        } else if constexpr (!std::is_same_v<std::remove_cvref_t<decltype(value)>, EnumRef>) {
          *value = read_value<std::remove_cvref_t<decltype(*value)>>(json, where);
        }
      },
      row.value);
}

const FlagRow* find_row(const std::vector<FlagRow>& rows, std::string_view section,
                        std::string_view name) {
  const auto found = std::ranges::find_if(
      rows, [&](const FlagRow& row) { return row.section == section && row.name == name; });
  return found == rows.end() ? nullptr : &*found;
}

}  // namespace

OrderedJson rows_to_json(const std::vector<FlagRow>& rows) {
  OrderedJson json = OrderedJson::object();
  for (const FlagRow& row : rows) {
    OrderedJson& parent = row.section.empty() ? json : json[std::string(row.section)];
    parent[std::string(row.name)] = value_to_json(row);
  }
  return json;
}

void rows_from_json(const std::vector<FlagRow>& rows, const OrderedJson& json,
                    std::string_view source) {
  TD_CHECK(json.is_object(), "{}: found {}, wanted an object", source, json.type_name());
  for (const auto& [key, value] : json.items()) {
    const std::string& name = key;
    if (const FlagRow* row = find_row(rows, "", name)) {
      value_from_json(*row, value, fmt::format("{}: {}", source, name));
      continue;
    }
    const bool is_section =
        std::ranges::any_of(rows, [&](const FlagRow& row) { return row.section == name; });
    TD_CHECK(is_section && value.is_object(), "{}: unknown key '{}'; remove it", source, name);
    for (const auto& [inner, inner_value] : value.items()) {
      const std::string where = fmt::format("{}: {}.{}", source, name, inner);
      const FlagRow* row = find_row(rows, name, inner);
      TD_CHECK(row != nullptr, "{}: unknown key; remove it", where);
      value_from_json(*row, inner_value, where);
    }
  }
}

}  // namespace tandem
