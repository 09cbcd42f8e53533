// From words and a TOML file to a config, and from a config to help text.
//
// A command line is flags only: --name value, --name=value, --name for a switch and --no-name for
// its opposite; the words after a flag up to the next "--" are its values, and the last of two
// equal flags wins. --config FILE gives keys in TOML, flat or in the section's table, with dashes
// or underscores; flags win over the file. Every fault of the whole line is collected. The parser
// is our own and not CLI11's, which stops at the first fault, cannot take families of flags by
// prefix or suggest a spelling, and would need each row declared to it again.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config/rows.h"
#include "config/validate.h"

namespace tandem {

struct Parsed {
  bool help = false;                // --help was given
  std::vector<std::string> faults;  // each begins with the flag or "<file>: <key>"
  std::vector<std::string> notes;   // flags that were accepted and change nothing, and why
};

// rows: bound to the config that is filled; standard: the same rows of an untouched one.
// miles: whether flags of Miles without a row are known too.
Parsed parse_rows(std::span<const std::string> words, const std::vector<FlagRow>& rows,
                  const std::vector<FlagRow>& standard, bool miles);

// Faults of parsing alone: unknown names, unreadable values, bounds, choices, refused flags.
template <class C>
Parsed parse(std::span<const std::string> words, C& config) {
  C standard;
  return parse_rows(words, rows_of(config), rows_of(standard), std::is_same_v<C, Config>);
}

// Adds faults to parsed.faults, but not about a flag that already has one.
void add_faults(Parsed& parsed, const std::vector<std::string>& faults);

// One fault alone, or how many there are and each on a line of its own.
std::string faults_text(const std::vector<std::string>& faults);
// Throws Error with that text if there are any.
void throw_faults(const std::vector<std::string>& faults);

// Parse, then validate and look for the files; all faults are in the result. With --help nothing is
// checked.
template <class C>
Parsed check_command_line(std::span<const std::string> words, C& config) {
  Parsed parsed = parse(words, config);
  if (parsed.help) return parsed;
  add_faults(parsed, validate(config));
  add_faults(parsed, missing_files(config));
  return parsed;
}

// What a command's main does: the same, throwing one Error that lists every fault.
template <class C>
Parsed read_command_line(std::span<const std::string> words, C& config) {
  Parsed parsed = check_command_line(words, config);
  throw_faults(parsed.faults);
  return parsed;
}

// Help grouped by section: honoured flags with values, defaults and meaning. `usage` goes first.
std::string help_rows(std::string_view usage, const std::vector<FlagRow>& standard, bool miles);
template <class C>
std::string help_text(std::string_view usage) {
  C standard;
  return help_rows(usage, rows_of(standard), std::is_same_v<C, Config>);
}

}  // namespace tandem
