// Rows: the table of flags with types erased, bound to one config object.
//
// rows_of(config) gives one FlagRow for each member of the command's sections. Parsing, JSON, help,
// checks and docs are ordinary functions over rows; only flags.cpp sees the typed tables. A row
// points into its config and is valid as long as it is.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "config/config.h"

namespace tandem {

// What Tandem does with a flag: follows it; accepts it, since it cannot change a result here; or
// refuses every value but the one it acts by, since results or placement would silently differ.
enum class Kind { honoured, no_effect, refused };

// All of a row beside its value. Lists are separated by '|'. No row sets a default: members do.
struct RowOptions {
  double at_least = -std::numeric_limits<double>::infinity();
  double at_most = std::numeric_limits<double>::infinity();
  bool open = false;              // at_least itself is not allowed
  std::string_view choices = {};  // of a string; those of an enum are its names
  std::string_view now = {};      // of an honoured row: the values built so far
  std::string_view alias = {};    // further spellings, used by Miles
  std::string_view inverse = {};  // of a bool: the Miles flag that turns it off
  std::string_view miles = {};    // Miles's default, where ours differs
  bool json_object = false;       // a string that holds a JSON object
  Kind kind = Kind::honoured;
  std::string_view why = {};  // no_effect: why; refused or not in `now`: what to do instead
};

// An enum member with its type erased.
struct EnumRef {
  void* value;
  int (*get)(const void*);
  void (*set)(void*, int);
  std::span<const std::string_view> spellings;
};

using ValueRef = std::variant<bool*, std::int64_t*, double*, std::string*, std::optional<bool>*,
                              std::optional<std::int64_t>*, std::optional<double>*,
                              std::vector<std::string>*, std::vector<std::int64_t>*, EnumRef>;

struct FlagRow {
  std::string_view section;  // empty for a member of the command itself
  std::string_view title;    // of the section
  std::string_view name;
  std::string_view help;
  RowOptions options;
  ValueRef value;
};

// Each command's rows, in the order of its table (flags.cpp).
std::vector<FlagRow> rows_of(Config& config);
std::vector<FlagRow> rows_of(GenerateConfig& config);
std::vector<FlagRow> rows_of(ScoreConfig& config);
std::vector<FlagRow> rows_of(SelftestConfig& config);
std::vector<FlagRow> rows_of(ServeConfig& config);

bool is_switch(const FlagRow& row);  // bool or optional bool: no value on the command line
bool is_list(const FlagRow& row);    // several values

// "4", "0.5", "true", "a b", "auto"; an optional without a value and an empty list are "".
std::string show(const FlagRow& row);

// For people: "<int>", "<number>", "<text>", "<text>...", "auto|cpu|cuda", "" for a switch.
std::string value_hint(const FlagRow& row);

// Sets the value from words of a command line. Returns what was wanted if they cannot be read.
std::optional<std::string> set_from_words(const FlagRow& row, std::span<const std::string> words);

// Faults of bounds, choices and kind of the present value against the default row. `origin` is
// how the user named the row: "--lr" or "run.toml: lr".
std::optional<std::string> row_fault(const FlagRow& row, const FlagRow& standard,
                                     const std::string& origin);

// ["a", "b"] of "a|b".
std::vector<std::string_view> alternatives(std::string_view list);

}  // namespace tandem
