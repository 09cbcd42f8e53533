// Typed reading of a config.json: keys may stand at the top or in text_config, every fault is
// collected and begins with the file and the key, and null counts as absent. What a family reads of
// its own (family_<name>.cpp) goes through here too, so that a folder's faults come all at once.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/json.h"

namespace tandem {

// An object inside the config and where it stands, for instance "rope_scaling"; faults begin so.
struct ConfigObject {
  const Json& json;
  std::string path;
};

class ConfigReader {
 public:
  ConfigReader(const Json& config, std::string_view where);

  template <typename... Args>
  void fault(fmt::format_string<Args...> text, Args&&... args) {
    fault_in(where_, text, std::forward<Args>(args)...);
  }
  // Of another file than the reader's.
  template <typename... Args>
  void fault_in(std::string_view where, fmt::format_string<Args...> text, Args&&... args) {
    faults_.push_back(fmt::format("{}: {}", where, fmt::format(text, std::forward<Args>(args)...)));
  }
  // One Error of all faults, each told once, if there are any.
  void throw_faults() const;

  // Null if absent (or JSON null) in both places; a fault if the two places differ.
  const Json* find(const std::string& key);
  // True where the key stands, even as null: some families mean another thing by null than by
  // absence.
  bool names(const std::string& key) const;

  // Of the whole config. An absent key gives `otherwise`; without one it is a fault.
  std::int64_t integer(const std::string& key, std::int64_t minimum,
                       std::optional<std::int64_t> otherwise = {});
  double number(const std::string& key, double otherwise);  // 0 or more
  bool boolean(const std::string& key, bool otherwise);
  std::string text(const std::string& key);  // absent: empty

  // Of an object inside the config.
  static const Json* find_in(const Json& object, const std::string& key);
  double number(const ConfigObject& object, const std::string& key, double otherwise);
  std::string text(const ConfigObject& object, const std::string& key);
  // A list of positive numbers; absent: empty.
  std::vector<double> numbers(const ConfigObject& object, const std::string& key);

  // One id or a list of ids; absent: empty. `from` is the file that `value` comes from.
  std::vector<std::int32_t> ids(const Json* value, std::string_view key, std::string_view from);

 private:
  // The value of each type, or a fault about `name`.
  double number_of(const Json& value, const std::string& name, double otherwise);
  std::string text_of(const Json& value, const std::string& name);

  const Json& top_;
  const Json* inner_ = nullptr;
  std::string where_;
  std::vector<std::string> faults_;
};

}  // namespace tandem
