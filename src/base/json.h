// JSON: the library's types under two names, and the one place where its exceptions become ours.
//
// `Json` sorts keys and finds them fast; `OrderedJson` keeps the order of insertion (metrics rows,
// resolved configs) and searches linearly: not for objects with thousands of keys. Values are read
// by `require` and `optional_key`, which never convert silently: a number is not a string, 1.5 is
// not an integer, -1 is not unsigned, and a number that does not fit is an error.
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/check.h"

namespace tandem {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

// Parses a whole text. Error: "<source>: not valid JSON at line 3, column 7: …".
Json parse_json(std::string_view text, std::string_view source);
OrderedJson parse_ordered_json(std::string_view text, std::string_view source);

// parse_json of a file's content; the path is the source.
Json read_json_file(const std::string& path);

// One line of JSON. Bytes that are not UTF-8 become U+FFFD, non-finite numbers null.
std::string dump_json(const Json& json);
std::string dump_json(const OrderedJson& json);
std::string dump_json_pretty(const OrderedJson& json);  // two spaces, final newline

namespace detail {
template <class T>
struct is_vector : std::false_type {};
template <class T>
struct is_vector<std::vector<T>> : std::true_type {};

template <class J>
[[noreturn]] void wrong_type(const J& json, std::string_view where, std::string_view wanted) {
  std::string found = json.dump(-1, ' ', false, J::error_handler_t::replace);
  if (found.size() > 60) found = found.substr(0, 57) + "...";
  throw Error(fmt::format("{}: found {} ({}), wanted {}", where, found, json.type_name(), wanted));
}
}  // namespace detail

// The value as T: bool, an integer or floating type, std::string, a Json type, or a vector of
// these. `where` says in errors what is read.
template <class T, class J>
T read_value(const J& json, std::string_view where) {
  if constexpr (std::is_same_v<T, J>) {
    return json;
  } else if constexpr (std::is_same_v<T, bool>) {
    if (!json.is_boolean()) detail::wrong_type(json, where, "true or false");
    return json.template get<bool>();
  } else if constexpr (std::is_integral_v<T>) {
    using Limits = std::numeric_limits<T>;
    const bool fits =
        json.is_number_unsigned()
            ? std::in_range<T>(json.template get<std::uint64_t>())
            : json.is_number_integer() && std::in_range<T>(json.template get<std::int64_t>());
    if (!fits) {
      detail::wrong_type(json, where,
                         fmt::format("an integer from {} to {}", Limits::min(), Limits::max()));
    }
    return json.template get<T>();
  } else if constexpr (std::is_floating_point_v<T>) {
    if (!json.is_number()) detail::wrong_type(json, where, "a number");
    return json.template get<T>();
  } else if constexpr (detail::is_vector<T>::value) {
    if (!json.is_array()) detail::wrong_type(json, where, "an array");
    T values;
    values.reserve(json.size());
    for (const auto& item : json) {
      values.push_back(read_value<typename T::value_type>(item, where));
    }
    return values;
  } else {
    static_assert(std::is_same_v<T, std::string>, "read_value: unsupported type");
    if (!json.is_string()) detail::wrong_type(json, where, "a string");
    return json.template get<std::string>();
  }
}

// json[key] as T. Errors: "<where>: key 'k' is missing", "<where>: k: found …, wanted …".
template <class T, class J>
T require(const J& json, const std::string& key, std::string_view where) {
  if (!json.is_object()) detail::wrong_type(json, where, "an object");
  const auto found = json.find(key);
  TD_CHECK(found != json.end(), "{}: key '{}' is missing", where, key);
  return read_value<T>(*found, fmt::format("{}: {}", where, key));
}

// The same, with `otherwise` where the key is absent or null.
template <class T, class J>
T optional_key(const J& json, const std::string& key, std::string_view where, T otherwise) {
  if (!json.is_object()) detail::wrong_type(json, where, "an object");
  const auto found = json.find(key);
  if (found == json.end() || found->is_null()) return otherwise;
  return read_value<T>(*found, fmt::format("{}: {}", where, key));
}

}  // namespace tandem
