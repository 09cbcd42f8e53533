// The commands of `tandem`, one file each. A command gets its words and returns its exit code.
#pragma once

#include <string>
#include <vector>

#include "base/check.h"

namespace tandem {

// A faulty command line: exit code 2.
struct UsageError : Error {
  using Error::Error;
};

int command_train(const std::vector<std::string>& words);
int command_generate(const std::vector<std::string>& words);
int command_score(const std::vector<std::string>& words);
int command_selftest(const std::vector<std::string>& words);
int command_serve(const std::vector<std::string>& words);
int command_inspect(const std::vector<std::string>& words);
int command_flags(const std::vector<std::string>& words);
int command_rank(const std::vector<std::string>& words);  // started by `tandem train`

}  // namespace tandem
