// One object (rope_scaling or rope_parameters) at a time; read_rope compares what they say.
#include "model/rope_reader.h"

#include <array>
#include <cmath>
#include <utility>

#include "model/hf_config.h"

namespace tandem {
namespace {

constexpr std::array<std::pair<std::string_view, RopeType>, 6> kTypes = {{
    {"default", RopeType::standard},
    {"linear", RopeType::linear},
    {"llama3", RopeType::llama3},
    {"yarn", RopeType::yarn},
    {"longrope", RopeType::longrope},
    {"su", RopeType::longrope},  // its first name
}};

RopeType read_type(ConfigReader& reader, const ConfigObject& object) {
  const std::string& key = object.path;
  const std::string older = reader.text(object, "type"), newer = reader.text(object, "rope_type");
  if (!older.empty() && !newer.empty() && older != newer) {
    reader.fault("{}.type is '{}' and {}.rope_type is '{}'; make them equal", key, older, key,
                 newer);
  }
  const std::string name = !newer.empty() ? newer : !older.empty() ? older : "default";
  for (const auto& [known, type] : kTypes) {
    if (name == known) return type;
  }
  reader.fault("{}.rope_type '{}' is not known; known: default, linear, llama3, yarn, longrope",
               key, name);
  return RopeType::standard;
}

// The length that the model was first trained for; the key may stand in the object or at the top.
std::int64_t read_original(ConfigReader& reader, const ConfigObject& object,
                           const ModelConfig& config, const RopeRules& rules) {
  const std::string name = "original_max_position_embeddings";
  const auto inside = static_cast<std::int64_t>(reader.number(object, name, 0.0));
  const std::int64_t outside = reader.integer(name, 1, 0);
  if (inside > 0 && outside > 0 && inside != outside) {
    reader.fault("{} is {} and {}.{} is {}; make them equal", name, outside, object.path, name,
                 inside);
  }
  if (inside > 0 || outside > 0) return inside > 0 ? inside : outside;
  return rules.original_max_positions > 0 ? rules.original_max_positions
                                          : config.max_position_embeddings;
}

void read_llama3(ConfigReader& reader, const ConfigObject& object, RopeConfig& rope) {
  const std::string& key = object.path;
  if (!ConfigReader::find_in(object.json, "original_max_position_embeddings") &&
      !reader.find("original_max_position_embeddings")) {
    reader.fault("{}.original_max_position_embeddings is missing; rope_type 'llama3' needs it",
                 key);
  }
  rope.low_freq_factor = reader.number(object, "low_freq_factor", 1.0);
  rope.high_freq_factor = reader.number(object, "high_freq_factor", 4.0);
  if (rope.low_freq_factor <= 0 || rope.high_freq_factor <= rope.low_freq_factor) {
    reader.fault("{}.high_freq_factor {} must exceed {}.low_freq_factor {}, both above 0", key,
                 rope.high_freq_factor, key, rope.low_freq_factor);
  }
}

void read_yarn(ConfigReader& reader, const ConfigObject& object, RopeConfig& rope) {
  rope.beta_fast = reader.number(object, "beta_fast", 32.0);
  rope.beta_slow = reader.number(object, "beta_slow", 1.0);
  if (const Json* truncate = ConfigReader::find_in(object.json, "truncate")) {
    rope.truncate = *truncate != false;
  }
  const double mscale = reader.number(object, "mscale", 0.0);
  const double mscale_all = reader.number(object, "mscale_all_dim", 0.0);
  double computed = yarn_attention_factor(rope.factor, 1.0);
  if (mscale != 0 && mscale_all != 0) {
    computed =
        yarn_attention_factor(rope.factor, mscale) / yarn_attention_factor(rope.factor, mscale_all);
  }
  rope.attention_factor = reader.number(object, "attention_factor", computed);
}

void read_longrope(ConfigReader& reader, const ConfigObject& object, const ModelConfig& config,
                   RopeConfig& rope) {
  const auto pairs =
      static_cast<std::size_t>((rope.rotary_dim ? rope.rotary_dim : config.head_dim) / 2);
  for (auto [name, list] : {std::pair{"short_factor", &rope.short_factors},
                            std::pair{"long_factor", &rope.long_factors}}) {
    *list = reader.numbers(object, name);
    if (list->size() == pairs) continue;
    reader.fault("{}.{} has {} numbers, wanted {}: one for each pair that is turned", object.path,
                 name, list->size(), pairs);
    list->assign(pairs, 1.0);
  }
  const double stretch = static_cast<double>(config.max_position_embeddings) /
                         static_cast<double>(rope.original_max_positions);
  rope.factor = reader.number(object, "factor", stretch);
  rope.attention_factor =
      reader.number(object, "attention_factor",
                    longrope_attention_factor(rope.factor, rope.original_max_positions));
}

// How many elements of a head are turned; 0: all.
std::int64_t read_rotary_dim(ConfigReader& reader, const ConfigObject* object,
                             const ModelConfig& config, const RopeRules& rules) {
  const std::string prefix = object ? object->path + "." : "";
  double part = reader.number("partial_rotary_factor", rules.partial_factor);
  if (object) part = reader.number(*object, "partial_rotary_factor", part);
  if (part == 1.0) return 0;
  const auto dim = static_cast<std::int64_t>(static_cast<double>(config.head_dim) * part);
  if (!rules.partial) {
    reader.fault("{}partial_rotary_factor is {}; this family turns whole heads", prefix, part);
  } else if (part > 1.0 || dim < 2 || dim % 2 != 0) {
    reader.fault("{}partial_rotary_factor {} of head_dim {} is {}, wanted an even number up to {}",
                 prefix, part, config.head_dim, dim, config.head_dim);
    return 0;
  }
  return dim;
}

RopeConfig read_object(ConfigReader& reader, const ConfigObject& object, const ModelConfig& config,
                       const RopeRules& rules, double outer_theta) {
  const auto& [json, key] = object;
  RopeConfig rope;
  rope.theta = outer_theta;
  if (!json.is_object()) {
    reader.fault("{} is {}, wanted an object", key, json.dump());
    return rope;
  }
  for (const auto& [name, value] : json.items()) {
    if (!value.is_object()) continue;
    reader.fault("{}.{} is an object: rotary settings by layer type are not known to this family",
                 key, name);
    return rope;
  }
  rope.type = read_type(reader, object);
  rope.theta = reader.number(object, "rope_theta", outer_theta);
  rope.rotary_dim = read_rotary_dim(reader, &object, config, rules);
  if (rope.type == RopeType::standard) return rope;
  if (rope.type != RopeType::longrope) {
    if (!ConfigReader::find_in(json, "factor"))
      reader.fault("{}.factor is missing; this rope_type needs it, 1 or more", key);
    rope.factor = reader.number(object, "factor", 1.0);
    if (rope.factor < 1.0) reader.fault("{}.factor is {}, wanted 1 or more", key, rope.factor);
  }
  if (rope.type == RopeType::linear) return rope;

  rope.original_max_positions = read_original(reader, object, config, rules);
  if (rope.type == RopeType::llama3) read_llama3(reader, object, rope);
  if (rope.type == RopeType::yarn) read_yarn(reader, object, rope);
  if (rope.type == RopeType::longrope) read_longrope(reader, object, config, rope);
  return rope;
}

}  // namespace

RopeConfig read_rope(ConfigReader& reader, const ModelConfig& config, const RopeRules& rules) {
  const Json* scaling = rules.scaled ? reader.find("rope_scaling") : nullptr;
  const Json* parameters = reader.find("rope_parameters");
  std::string key = "rope_parameters";
  if (parameters && parameters->is_object() && !rules.layer_type.empty()) {
    for (const auto& [name, value] : parameters->items()) {
      if (value.is_object() || value.is_null()) continue;
      reader.fault("rope_parameters.{} is {}, wanted one object for each layer type", name,
                   value.dump());
      return {};
    }
    key += "." + rules.layer_type;
    parameters = ConfigReader::find_in(*parameters, rules.layer_type);
  }
  const double theta = reader.number(rules.theta_key, rules.theta);
  RopeConfig older;
  older.theta = theta;
  if (scaling) {
    older = read_object(reader, {*scaling, "rope_scaling"}, config, rules, theta);
  } else {
    older.rotary_dim = read_rotary_dim(reader, nullptr, config, rules);
  }
  if (!parameters) return older;
  const RopeConfig newer = read_object(reader, {*parameters, key}, config, rules, theta);
  if (scaling && newer != older) {
    reader.fault("rope_scaling is {} and {} is {}; make them equal or remove one", scaling->dump(),
                 key, parameters->dump());
  }
  if (reader.find(rules.theta_key) && newer.theta != theta) {
    reader.fault("{} is {} and {}.rope_theta is {}; make them equal", rules.theta_key, theta, key,
                 newer.theta);
  }
  return newer;
}

}  // namespace tandem
