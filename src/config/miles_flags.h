// Flags of Miles, of the Megatron and FSDP parsers behind it and of its prefixed families that have
// no member in config.h: each is known by name and either changes nothing here or is refused.
//
// A refused flag is parsed all the same, so that every fault of a command appears at once, and its
// Miles default is accepted quietly. When such a flag is built it moves to a member and a row.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "config/rows.h"

namespace tandem {

enum class Takes { nothing, one, optional_one, some };

struct MilesFlag {
  std::string_view area;
  std::string_view name;      // with underscores
  Takes takes;                // nothing: a switch
  std::string_view standard;  // the value that is accepted although the flag is refused
  Kind kind;
  std::string_view why;
};

// A family: any name that begins so and is not listed by itself.
struct MilesPrefix {
  std::string_view prefix;
  Kind kind;
  std::string_view why;
};

const std::vector<MilesFlag>& miles_flags();
const std::vector<MilesPrefix>& miles_prefixes();

// Whether two spellings are one value: the same text, or the same number ("1" and "1.0").
bool same_value(std::string_view a, std::string_view b);

}  // namespace tandem
