// What a command line and a TOML file have in common: names with words, in order, each with the
// spelling that the user will recognise in an error.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace tandem {

struct Assignment {
  std::string name;                // with underscores
  std::string origin;              // "--lr", or "run.toml: optimizer.lr (line 3)"
  std::string section;             // table of the file it stood in; empty: none
  std::vector<std::string> words;  // none: a bare switch
};

// The flags of a command line, "--config" and "--help" included. Words before the first flag go
// to `faults`.
std::vector<Assignment> read_words(std::span<const std::string> words,
                                   std::vector<std::string>& faults);

// The keys of a TOML file; a file that cannot be read or parsed goes to `faults`.
std::vector<Assignment> read_toml(const std::string& path, std::vector<std::string>& faults);

}  // namespace tandem
