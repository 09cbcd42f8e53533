// Errors that are the user's to mend (a flag, a file, a model folder, a request) and the check that
// raises them. The text begins with the flag, key or path, says what was found, what was wanted and
// what to do. Our own mistakes are `assert`; expected outcomes are values (std::optional, try_x).
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>

namespace tandem {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace tandem

// TD_CHECK(condition, fmt-string, args...): throws Error with the formatted text.
#define TD_CHECK(condition, ...)                                       \
  do {                                                                 \
    if (!(condition)) throw ::tandem::Error(fmt::format(__VA_ARGS__)); \
  } while (0)
