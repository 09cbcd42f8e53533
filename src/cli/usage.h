// Reads a command's flags: prints help, or throws UsageError with every fault of the line.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include "cli/commands.h"
#include "config/parse.h"

namespace tandem {

// Nothing if --help was asked for (and printed).
template <class C>
std::optional<Parsed> read_flags(const std::vector<std::string>& words, C& config,
                                 const char* usage) {
  try {
    Parsed parsed = read_command_line(words, config);
    if (!parsed.help) return parsed;
  } catch (const Error& e) {
    throw UsageError(e.what());
  }
  fmt::print("{}", help_text<C>(usage));
  return std::nullopt;
}

}  // namespace tandem
