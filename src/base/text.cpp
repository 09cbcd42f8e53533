// See text.h.
#include "base/text.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

namespace tandem {

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

std::string one_line(std::string_view text, std::size_t max_bytes) {
  bool cut = false;
  if (text.size() > max_bytes) {
    std::size_t end = max_bytes;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
    text = text.substr(0, end);
    cut = true;
  }
  std::string line(text);
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = ' ';
  }
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
