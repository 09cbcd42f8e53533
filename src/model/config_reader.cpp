// Each reader gives a value that later code can live with when it has noted a fault.
#include "model/config_reader.h"

#include <algorithm>
#include <limits>

namespace tandem {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();

}  // namespace

ConfigReader::ConfigReader(const Json& config, std::string_view where)
    : top_(config), where_(where) {
  if (const auto it = config.find("text_config"); it != config.end() && it->is_object())
    inner_ = &*it;
}

void ConfigReader::throw_faults() const {
  // A key that is read twice would tell its conflict twice.
  std::vector<std::string> once;
  for (const std::string& f : faults_)
    if (std::find(once.begin(), once.end(), f) == once.end()) once.push_back(f);
  TD_CHECK(once.empty(), "{}", fmt::join(once, "\n"));
}

const Json* ConfigReader::find_in(const Json& object, const std::string& key) {
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

const Json* ConfigReader::find(const std::string& key) {
  const Json* outer = find_in(top_, key);
  const Json* inner = inner_ ? find_in(*inner_, key) : nullptr;
  if (outer && inner && *outer != *inner && key != "model_type" && key != "architectures") {
    fault("{} is {} at the top and {} in text_config; make them equal", key, outer->dump(),
          inner->dump());
  }
  if (key == "architectures") return outer ? outer : inner;
  return inner ? inner : outer;
}

bool ConfigReader::names(const std::string& key) const {
  return top_.contains(key) || (inner_ && inner_->contains(key));
}

std::int64_t ConfigReader::integer(const std::string& key, std::int64_t minimum,
                                   std::optional<std::int64_t> otherwise) {
  const Json* value = find(key);
  if (!value) {
    if (!otherwise) fault("{} is missing; add it", key);
    return otherwise.value_or(minimum);
  }
  const bool fits = value->is_number_integer() &&
                    value->get<double>() >= static_cast<double>(minimum) &&
                    value->get<double>() <= static_cast<double>(kMost);
  if (!fits) {
    fault("{} is {}, wanted an integer from {} to {}", key, value->dump(), minimum, kMost);
    return minimum;
  }
  return value->get<std::int64_t>();
}

double ConfigReader::number_of(const Json& value, const std::string& name, double otherwise) {
  if (!value.is_number() || !(value.get<double>() >= 0)) {
    fault("{} is {}, wanted a number, 0 or more", name, value.dump());
    return otherwise;
  }
  return value.get<double>();
}

double ConfigReader::number(const ConfigObject& object, const std::string& key, double otherwise) {
  const Json* value = find_in(object.json, key);
  return value ? number_of(*value, object.path + "." + key, otherwise) : otherwise;
}

double ConfigReader::number(const std::string& key, double otherwise) {
  const Json* value = find(key);
  return value ? number_of(*value, key, otherwise) : otherwise;
}

bool ConfigReader::boolean(const std::string& key, bool otherwise) {
  const Json* value = find(key);
  if (!value) return otherwise;
  if (!value->is_boolean()) {
    fault("{} is {}, wanted true or false", key, value->dump());
    return otherwise;
  }
  return value->get<bool>();
}

std::string ConfigReader::text_of(const Json& value, const std::string& name) {
  if (value.is_string()) return value.get<std::string>();
  fault("{} is {}, wanted a text", name, value.dump());
  return {};
}

std::string ConfigReader::text(const ConfigObject& object, const std::string& key) {
  const Json* value = find_in(object.json, key);
  return value ? text_of(*value, object.path + "." + key) : std::string();
}

std::string ConfigReader::text(const std::string& key) {
  const Json* value = find(key);
  return value ? text_of(*value, key) : std::string();
}

std::vector<double> ConfigReader::numbers(const ConfigObject& object, const std::string& key) {
  std::vector<double> out;
  const Json* value = find_in(object.json, key);
  if (!value) return out;
  const Json list = value->is_array() ? *value : Json::array();
  for (const Json& item : list)
    if (item.is_number() && item.get<double>() > 0) out.push_back(item.get<double>());
  if (!value->is_array() || out.size() != list.size()) {
    fault("{}.{} is {}, wanted a list of numbers above 0", object.path, key, value->dump());
    out.clear();
  }
  return out;
}

std::vector<std::int32_t> ConfigReader::ids(const Json* value, std::string_view key,
                                            std::string_view from) {
  std::vector<std::int32_t> out;
  if (!value || value->is_null()) return out;
  const Json list = value->is_array() ? *value : Json::array({*value});
  for (const Json& item : list) {
    if (item == -1) continue;  // older configs say "none" so
    if (item.is_number_integer() && item >= 0 && item <= kMost) {
      out.push_back(item.get<std::int32_t>());
    } else {
      faults_.push_back(
          fmt::format("{}: {} is {}, wanted an id or a list of ids", from, key, value->dump()));
      break;
    }
  }
  return out;
}

}  // namespace tandem
