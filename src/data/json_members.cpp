// See json_members.h.
#include "data/json_members.h"

#include <cassert>

#include "base/json.h"
#include "base/text.h"

namespace tandem {
namespace {

// Reads a document for its faults alone: keeps nothing, and takes the library's complaint as a
// value where its parse() would throw.
struct FaultReader : nlohmann::json_sax<Json> {
  std::string fault;

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(std::int64_t) override { return true; }
  bool number_unsigned(std::uint64_t) override { return true; }
  bool number_float(double, const std::string&) override { return true; }
  bool string(std::string&) override { return true; }
  bool binary(Json::binary_t&) override { return true; }
  bool start_object(std::size_t) override { return true; }
  bool key(std::string&) override { return true; }
  bool end_object() override { return true; }
  bool start_array(std::size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(std::size_t, const std::string&, const Json::exception& error) override {
    const std::string_view text = error.what();
    const std::size_t tag = text.find("] ");  // "[json.exception.parse_error.101] "
    fault = text.substr(tag == text.npos ? 0 : tag + 2);
    return false;
  }
};

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

// Walks a valid document; every function starts at a value or separator and ends after it.
class Cutter {
 public:
  explicit Cutter(std::string_view text) : text_(text) {}

  char peek() {
    while (at_ < text_.size() && is_space(text_[at_])) ++at_;
    assert(at_ < text_.size());
    return text_[at_];
  }
  void skip(char expected) {
    [[maybe_unused]] const char found = peek();
    assert(found == expected);
    static_cast<void>(expected);
    ++at_;
  }
  // True if a separator was taken, false if `close` was.
  bool take_comma_or(char close) {
    const bool comma = peek() != close;
    ++at_;
    return comma;
  }

  std::string_view value() {
    const char first = peek();
    const std::size_t begin = at_;
    if (first == '"') {
      skip_string();
    } else if (first == '{' || first == '[') {
      skip_nested();
    } else {
      while (at_ < text_.size() && !is_space(text_[at_]) && text_[at_] != ',' &&
             text_[at_] != '}' && text_[at_] != ']') {
        ++at_;
      }
    }
    return text_.substr(begin, at_ - begin);
  }

 private:
  void skip_string() {
    for (++at_; text_[at_] != '"'; ++at_) {
      if (text_[at_] == '\\') ++at_;
    }
    ++at_;
  }
  void skip_nested() {
    std::size_t depth = 0;
    do {
      const char c = text_[at_];
      if (c == '"') {
        skip_string();
        continue;
      }
      if (c == '{' || c == '[') ++depth;
      if (c == '}' || c == ']') --depth;
      ++at_;
    } while (depth > 0);
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace

std::string json_fault(std::string_view text) {
  FaultReader reader;
  Json::sax_parse(text.begin(), text.end(), &reader);
  return reader.fault;
}

JsonKind json_kind(std::string_view value) {
  switch (trim(value).front()) {
    case 'n':
      return JsonKind::null;
    case 't':
    case 'f':
      return JsonKind::boolean;
    case '"':
      return JsonKind::string;
    case '[':
      return JsonKind::array;
    case '{':
      return JsonKind::object;
    default:
      return JsonKind::number;
  }
}

std::string_view json_kind_name(JsonKind kind) {
  switch (kind) {
    case JsonKind::null:
      return "null";
    case JsonKind::boolean:
      return "true or false";
    case JsonKind::number:
      return "a number";
    case JsonKind::string:
      return "a string";
    case JsonKind::array:
      return "an array";
    case JsonKind::object:
      return "an object";
  }
  return "";
}

std::string json_string_text(std::string_view value) {
  return read_value<std::string>(parse_json(value, "JSON string"), "JSON string");
}

std::vector<JsonMember> json_members(std::string_view object) {
  std::vector<JsonMember> members;
  Cutter cutter(object);
  cutter.skip('{');
  if (cutter.peek() == '}') return members;
  do {
    std::string key = json_string_text(cutter.value());
    cutter.skip(':');
    members.push_back({std::move(key), cutter.value()});
  } while (cutter.take_comma_or('}'));
  return members;
}

std::vector<std::string_view> json_elements(std::string_view array) {
  std::vector<std::string_view> elements;
  Cutter cutter(array);
  cutter.skip('[');
  if (cutter.peek() == ']') return elements;
  do {
    elements.push_back(cutter.value());
  } while (cutter.take_comma_or(']'));
  return elements;
}

std::string_view find_member(const std::vector<JsonMember>& members, std::string_view key) {
  for (auto member = members.rbegin(); member != members.rend(); ++member) {
    if (member->key == key) return member->value;
  }
  return {};
}

}  // namespace tandem
