// See json.h. The catches here are the translating wrapper of nlohmann-json.
#include "base/json.h"

#include <algorithm>

#include "base/file.h"

namespace tandem {
namespace {

template <class J>
J parse(std::string_view text, std::string_view source) {
  // "number overflow parsing '1e999'" of "[json.exception.out_of_range.406] number …".
  const auto reason_of = [](const nlohmann::json::exception& error) {
    const std::string_view what = error.what();
    const std::size_t colon = what.find(": "), bracket = what.find("] ");
    if (error.id < 200 && colon != what.npos) return std::string(what.substr(colon + 2));
    return std::string(bracket != what.npos ? what.substr(bracket + 2) : what);
  };
  try {
    return J::parse(text.begin(), text.end());
  } catch (const nlohmann::json::parse_error& error) {
    const std::size_t at = std::min(error.byte == 0 ? 0 : error.byte - 1, text.size());
    const std::string_view before = text.substr(0, at);
    const auto line = 1 + std::count(before.begin(), before.end(), '\n');
    const std::size_t line_start = before.rfind('\n');
    const std::size_t column = line_start == before.npos ? at + 1 : at - line_start;
    throw Error(fmt::format("{}: not valid JSON at line {}, column {}: {}", source, line, column,
                            reason_of(error)));
  } catch (const nlohmann::json::out_of_range& error) {  // a number that no double holds
    throw Error(fmt::format("{}: not valid JSON: {}", source, reason_of(error)));
  }
}

}  // namespace

Json parse_json(std::string_view text, std::string_view source) {
  return parse<Json>(text, source);
}

OrderedJson parse_ordered_json(std::string_view text, std::string_view source) {
  return parse<OrderedJson>(text, source);
}

Json read_json_file(const std::string& path) { return parse_json(read_file(path), path); }

std::string dump_json(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string dump_json(const OrderedJson& json) {
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

std::string dump_json_pretty(const OrderedJson& json) {
  return json.dump(2, ' ', false, OrderedJson::error_handler_t::replace) + "\n";
}

}  // namespace tandem
