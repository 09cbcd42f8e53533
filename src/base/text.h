// The few string operations that the standard library lacks: splitting, trimming, strict number
// parsing (the whole text or nothing) and quantities for people.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

// Parts between separators, empty ones kept: "a,,b" -> {"a", "", "b"}; "" -> {""}. The views point
// into `text`.
std::vector<std::string_view> split(std::string_view text, char separator);

// Without leading and trailing ASCII white space.
std::string_view trim(std::string_view text);

// The whole text as a number in range, or nothing: no white space, no sign '+', no trailing
// letters.
std::optional<std::int64_t> parse_int(std::string_view text);
std::optional<double> parse_double(std::string_view text);

// The last `count` lines of `text` (a final newline ends the last line, it does not start another).
std::string_view last_lines(std::string_view text, std::size_t count);

// What a terminal may be given: control characters but newline and tab, and bytes that are not UTF-8,
// as \xNN. Messages quote names and values that a user, a file or a peer chose.
std::string printable(std::string_view text);

// At most `max_bytes` bytes of it, cut at a UTF-8 border, with "…" where something was cut; control
// characters and newlines are shown as a space, the rest as printable does. For one-line display of
// samples and bodies.
std::string one_line(std::string_view text, std::size_t max_bytes);

// "512 B", "1.5 KiB", "12.0 MiB", "3.2 GiB".
std::string human_bytes(double bytes);

// "3 ms", "2.5 s", "3 min 20 s", "2 h 05 min".
std::string human_seconds(double seconds);

// "950", "12.3k", "1.20M": counts in a narrow column.
std::string human_count(double count);

}  // namespace tandem
