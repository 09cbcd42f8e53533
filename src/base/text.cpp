// See text.h.
#include "base/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

namespace tandem {
namespace {

// Bytes of the well-formed UTF-8 character that `text` begins with; 0 if it begins with none (Unicode
// 15.0, table 3-7).
std::size_t utf8_character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  const std::size_t size = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
  if (size == 0 || text.size() < size) return 0;
  const unsigned char least = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned char most = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  if (byte(1) < least || byte(1) > most) return 0;
  for (std::size_t i = 2; i < size; ++i)
    if ((byte(i) & 0xC0) != 0x80) return 0;
  return size;
}

bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7F; }

}  // namespace

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0;;) {
    const std::size_t end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

std::string_view trim(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n\v\f";
  const std::size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

namespace {
template <class T>
std::optional<T> parse_number(std::string_view text) {
  T value{};
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  if (result.ec != std::errc() || result.ptr != end) return std::nullopt;
  return value;
}
}  // namespace

std::optional<std::int64_t> parse_int(std::string_view text) {
  return parse_number<std::int64_t>(text);
}

std::optional<double> parse_double(std::string_view text) { return parse_number<double>(text); }

std::string_view last_lines(std::string_view text, std::size_t count) {
  if (count == 0 || text.empty()) return {};
  std::size_t begin = text.size();
  if (text.back() == '\n') --begin;
  for (std::size_t line = 0; line < count; ++line) {
    if (begin == 0) return text;
    begin = text.rfind('\n', begin - 1);
    if (begin == std::string_view::npos) return text;
  }
  return text.substr(begin + 1);
}

std::string printable(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const char c = text.front();
    const std::size_t size = utf8_character(text);
    const bool c1 = size == 2 && c == '\xC2' && static_cast<unsigned char>(text[1]) < 0xA0;
    if (size > 0 && !c1 && (!is_control(c) || c == '\n' || c == '\t')) {
      out += text.substr(0, size);
      text.remove_prefix(size);
      continue;
    }
    for (std::size_t i = 0; i < std::max<std::size_t>(size, 1); ++i)
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[i]));
    text.remove_prefix(std::max<std::size_t>(size, 1));
  }
  return out;
}

std::string one_line(std::string_view text, std::size_t max_bytes) {
  bool cut = false;
  if (text.size() > max_bytes) {
    std::size_t end = max_bytes;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
    text = text.substr(0, end);
    cut = true;
  }
  std::string line(text);
  std::ranges::replace_if(line, is_control, ' ');
  line = printable(line);
  if (cut) line += "…";
  return line;
}

std::string human_bytes(double bytes) {
  if (bytes < 1024) return fmt::format("{:.0f} B", bytes);
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  double value = bytes / 1024;
  while (value >= 1024 && unit < 3) {
    value /= 1024;
    ++unit;
  }
  return fmt::format("{:.1f} {}", value, kUnits[unit]);
}

std::string human_seconds(double seconds) {
  if (seconds < 0.9995) return fmt::format("{:.0f} ms", seconds * 1e3);
  if (seconds < 59.95) return fmt::format("{:.1f} s", seconds);
  const auto whole = static_cast<long long>(std::llround(seconds));
  if (whole < 3600) return fmt::format("{} min {:02} s", whole / 60, whole % 60);
  return fmt::format("{} h {:02} min", whole / 3600, whole % 3600 / 60);
}

std::string human_count(double count) {
  if (std::fabs(count) < 1000) return fmt::format("{:.0f}", count);
  if (std::fabs(count) < 1e6) return fmt::format("{:.1f}k", count / 1e3);
  return fmt::format("{:.2f}M", count / 1e6);
}

}  // namespace tandem
