// A JSON object taken apart without converting its values: keys decoded, values as the very bytes
// of the line. Prompt files need this: labels such as 10254939386542155531 must keep their digits,
// and messages and tools their order of keys (a template prints it), which no parsed form
// preserves.
//
// Invariant: every slice is valid JSON by itself, because the whole line was checked by the JSON
// library first; the cutting itself only matches quotes and brackets.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tandem {

// What is wrong with `text` as a JSON document, or "" if it is one. Strict: no NaN, no comments,
// UTF-8 only.
std::string json_fault(std::string_view text);

enum class JsonKind { null, boolean, number, string, array, object };

// Kind of a valid JSON value, from its first byte.
JsonKind json_kind(std::string_view value);
std::string_view json_kind_name(JsonKind kind);  // "a number", "an array", …

// The text of a valid JSON string with its escapes resolved.
std::string json_string_text(std::string_view value);

struct JsonMember {
  std::string key;
  std::string_view value;  // points into the line
};

// Members of a valid JSON object in their order; a key given twice stands twice.
std::vector<JsonMember> json_members(std::string_view object);

// Elements of a valid JSON array.
std::vector<std::string_view> json_elements(std::string_view array);

// The last member of that name (as Python's json does), or an empty view.
std::string_view find_member(const std::vector<JsonMember>& members, std::string_view key);

}  // namespace tandem
