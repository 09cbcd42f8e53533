// config.json → ModelConfig, and the list of tensors a family has.
//
// Adding a family whose layer is the one of model/ is a row of kFamilies; a new kind of layer also
// adds its tensors to expected_tensors().
#include "model/hf_config.h"

#include <algorithm>
#include <array>
#include <limits>

#include "base/file.h"

namespace tandem {
namespace {

enum class Bias { never, always, by_key };  // by_key: attention_bias of the config

struct Family {
  std::string_view model_type;
  std::string_view architecture;
  Bias qkv_bias;
  Bias o_bias;
  bool mlp_bias_key;  // the config may ask for biases in the MLP
  bool qk_norm;
  std::int64_t default_head_dim;  // where config.json has none; 0: hidden_size / heads
  bool window_needs_switch;       // sliding_window counts only with use_sliding_window
};

constexpr std::array<Family, 3> kFamilies = {{
    {"llama", "LlamaForCausalLM", Bias::by_key, Bias::by_key, true, false, 0, false},
    {"qwen2", "Qwen2ForCausalLM", Bias::always, Bias::never, false, false, 0, true},
    {"qwen3", "Qwen3ForCausalLM", Bias::by_key, Bias::by_key, false, true, 128, true},
}};

std::string joined(const std::vector<std::string>& items) {
  return fmt::format("{}", fmt::join(items, ", "));
}

// Typed reading of config.json: keys may stand at the top or in text_config; faults are collected.
class ConfigReader {
 public:
  ConfigReader(const Json& config, std::string_view where) : top_(config), where_(where) {
    if (const auto it = config.find("text_config"); it != config.end() && it->is_object())
      inner_ = &*it;
  }

  std::vector<std::string> faults;

  template <typename... Args>
  void fault(fmt::format_string<Args...> text, Args&&... args) {
    faults.push_back(fmt::format("{}: {}", where_, fmt::format(text, std::forward<Args>(args)...)));
  }

  // Null if absent (or JSON null) in both places. text_config wins only where it stands alone.
  const Json* find(const std::string& key) {
    const Json* outer = find_in(top_, key);
    const Json* inner = inner_ ? find_in(*inner_, key) : nullptr;
    if (outer && inner && *outer != *inner && key != "model_type" && key != "architectures") {
      fault("{} is {} at the top and {} in text_config; make them equal", key, outer->dump(),
            inner->dump());
    }
    if (key == "architectures") return outer ? outer : inner;
    return inner ? inner : outer;
  }

  std::int64_t integer(const std::string& key, std::int64_t minimum,
                       std::optional<std::int64_t> otherwise = {}) {
    const Json* value = find(key);
    if (!value) {
      if (!otherwise) fault("{} is missing; add it", key);
      return otherwise.value_or(minimum);
    }
    constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
    const bool fits = value->is_number_integer() &&
                      value->get<double>() >= static_cast<double>(minimum) &&
                      value->get<double>() <= static_cast<double>(kMost);
    if (!fits) {
      fault("{} is {}, wanted an integer from {} to {}", key, value->dump(), minimum, kMost);
      return minimum;
    }
    return value->get<std::int64_t>();
  }

  double number(const Json& object, const std::string& key, double otherwise) {
    const Json* value = find_in(object, key);
    if (!value) return otherwise;
    if (!value->is_number() || !(value->get<double>() >= 0)) {
      fault("{} is {}, wanted a number, 0 or more", key, value->dump());
      return otherwise;
    }
    return value->get<double>();
  }

  double number(const std::string& key, double otherwise) {
    const Json* value = find(key);
    return value ? number(Json{{key, *value}}, key, otherwise) : otherwise;
  }

  bool boolean(const std::string& key, bool otherwise) {
    const Json* value = find(key);
    if (!value) return otherwise;
    if (!value->is_boolean()) {
      fault("{} is {}, wanted true or false", key, value->dump());
      return otherwise;
    }
    return value->get<bool>();
  }

  std::string text(const Json& object, const std::string& key) {
    const Json* value = find_in(object, key);
    if (!value) return {};
    if (!value->is_string()) {
      fault("{} is {}, wanted a text", key, value->dump());
      return {};
    }
    return value->get<std::string>();
  }

  std::string text(const std::string& key) {
    const Json* value = find(key);
    return value ? text(Json{{key, *value}}, key) : std::string();
  }

  // One id or a list of ids; absent: empty.
  std::vector<std::int32_t> ids(const Json* value, std::string_view key, std::string_view from) {
    std::vector<std::int32_t> out;
    if (!value || value->is_null()) return out;
    const Json list = value->is_array() ? *value : Json::array({*value});
    for (const Json& item : list) {
      if (item == -1) continue;  // older configs say "none" so
      if (item.is_number_integer() && item >= 0 &&
          item <= std::numeric_limits<std::int32_t>::max()) {
        out.push_back(item.get<std::int32_t>());
      } else {
        faults.push_back(
            fmt::format("{}: {} is {}, wanted an id or a list of ids", from, key, value->dump()));
        break;
      }
    }
    return out;
  }

  static const Json* find_in(const Json& object, const std::string& key) {
    const auto it = object.find(key);
    return it == object.end() || it->is_null() ? nullptr : &*it;
  }

 private:
  const Json& top_;
  const Json* inner_ = nullptr;
  std::string where_;
};

const Family* read_family(ConfigReader& reader, ModelConfig& config) {
  config.family = reader.text("model_type");
  if (const Json* list = reader.find("architectures")) {
    if (list->is_array() && list->size() == 1 && list->front().is_string()) {
      config.architecture = list->front().get<std::string>();
    } else {
      reader.fault("architectures is {}, wanted a list of one name", list->dump());
      return nullptr;
    }
  }
  const auto by_type = std::find_if(kFamilies.begin(), kFamilies.end(), [&](const Family& family) {
    return config.family == family.model_type;
  });
  const auto by_name = std::find_if(kFamilies.begin(), kFamilies.end(), [&](const Family& family) {
    return config.architecture == family.architecture;
  });
  if (config.family.empty() && by_name != kFamilies.end()) {
    config.family = by_name->model_type;
    return &*by_name;
  }
  if (by_type == kFamilies.end()) {
    reader.fault("model_type '{}' is not known; known: {}", config.family, known_families());
    return nullptr;
  }
  if (config.architecture.empty()) config.architecture = by_type->architecture;
  if (config.architecture != by_type->architecture) {
    reader.fault("architectures names '{}', model_type '{}' means '{}'; known families: {}",
                 config.architecture, config.family, by_type->architecture, known_families());
    return nullptr;
  }
  return &*by_type;
}

void read_sizes(ConfigReader& reader, const Family& family, ModelConfig& config) {
  config.vocab_size = reader.integer("vocab_size", 1);
  config.hidden_size = reader.integer("hidden_size", 1);
  config.intermediate_size = reader.integer("intermediate_size", 1);
  config.num_layers = reader.integer("num_hidden_layers", 1);
  config.num_heads = reader.integer("num_attention_heads", 1);
  config.num_kv_heads = reader.integer("num_key_value_heads", 1, config.num_heads);
  config.max_position_embeddings = reader.integer("max_position_embeddings", 1);
  const bool divides = config.hidden_size % config.num_heads == 0;
  config.head_dim = reader.integer(
      "head_dim", 1,
      family.default_head_dim ? family.default_head_dim : config.hidden_size / config.num_heads);
  if (!reader.find("head_dim") && family.default_head_dim == 0 && !divides) {
    reader.fault(
        "hidden_size {} is not a multiple of num_attention_heads {} and there is no head_dim",
        config.hidden_size, config.num_heads);
  }
  if (config.head_dim % 2 != 0) {
    reader.fault("head_dim {} is odd; rotary embeddings turn pairs", config.head_dim);
  }
  if (config.num_heads % config.num_kv_heads != 0) {
    reader.fault("num_attention_heads {} is not a multiple of num_key_value_heads {}",
                 config.num_heads, config.num_kv_heads);
  }
}

void read_layer_switches(ConfigReader& reader, const Family& family, ModelConfig& config) {
  const auto bias = [&](Bias rule) {
    return rule == Bias::always ||
           (rule == Bias::by_key && reader.boolean("attention_bias", false));
  };
  config.qkv_bias = bias(family.qkv_bias);
  config.o_bias = bias(family.o_bias);
  config.mlp_bias = family.mlp_bias_key && reader.boolean("mlp_bias", false);
  config.qk_norm = family.qk_norm;
  config.rms_norm_eps = reader.number("rms_norm_eps", 1e-6);
  config.tie_word_embeddings = reader.boolean("tie_word_embeddings", false);
  const std::string activation = reader.text("hidden_act");
  if (!activation.empty() && activation != "silu" && activation != "swish") {
    reader.fault("hidden_act '{}' is not known; known: silu, swish", activation);
  }
  if (const Json* quantization = reader.find("quantization_config")) {
    reader.fault(
        "quantization_config is {}; quantised weights cannot be trained, use the folder with "
        "bf16 or f32 weights",
        quantization->dump());
  }
}

// layer_types (transformers 5) or use_sliding_window / max_window_layers (older).
void read_windows(ConfigReader& reader, const Family& family, ModelConfig& config) {
  const auto layers = static_cast<std::size_t>(config.num_layers);
  config.sliding_windows.assign(layers, 0);
  const std::int64_t window = reader.integer("sliding_window", 0, 0);
  const bool switched_on =
      !family.window_needs_switch || reader.boolean("use_sliding_window", false);
  if (const Json* types = reader.find("layer_types")) {
    if (!types->is_array() || types->size() != layers) {
      reader.fault("layer_types has {} items, num_hidden_layers is {}", types->size(), layers);
      return;
    }
    for (std::size_t i = 0; i < layers; ++i) {
      const Json& type = (*types)[i];
      if (type == "sliding_attention") {
        config.sliding_windows[i] = switched_on ? window : 0;
      } else if (type != "full_attention") {
        reader.fault("layer_types[{}] is {}; known: full_attention, sliding_attention", i,
                     type.dump());
      }
    }
    return;
  }
  if (!switched_on || window == 0) return;
  const auto first = static_cast<std::size_t>(
      family.window_needs_switch ? reader.integer("max_window_layers", 0, 0) : 0);
  for (std::size_t i = first; i < layers; ++i) config.sliding_windows[i] = window;
}

RopeType read_rope_type(ConfigReader& reader, const Json& object, const std::string& key) {
  constexpr std::array<std::pair<std::string_view, RopeType>, 4> kTypes = {{
      {"default", RopeType::standard},
      {"linear", RopeType::linear},
      {"llama3", RopeType::llama3},
      {"yarn", RopeType::yarn},
  }};
  const std::string older = reader.text(object, "type"), newer = reader.text(object, "rope_type");
  if (!older.empty() && !newer.empty() && older != newer) {
    reader.fault("{}.type is '{}' and {}.rope_type is '{}'; make them equal", key, older, key,
                 newer);
  }
  const std::string name = !newer.empty() ? newer : !older.empty() ? older : "default";
  for (const auto& [known, type] : kTypes) {
    if (name == known) return type;
  }
  reader.fault("{}.rope_type '{}' is not known; known: default, linear, llama3, yarn", key, name);
  return RopeType::standard;
}

void read_llama3(ConfigReader& reader, const Json& object, const std::string& key,
                 RopeConfig& rope) {
  rope.low_freq_factor = reader.number(object, "low_freq_factor", 1.0);
  rope.high_freq_factor = reader.number(object, "high_freq_factor", 4.0);
  if (rope.low_freq_factor <= 0 || rope.high_freq_factor <= rope.low_freq_factor) {
    reader.fault("{}.high_freq_factor {} must exceed {}.low_freq_factor {}, both above 0", key,
                 rope.high_freq_factor, key, rope.low_freq_factor);
  }
}

void read_yarn(ConfigReader& reader, const Json& object, RopeConfig& rope) {
  rope.beta_fast = reader.number(object, "beta_fast", 32.0);
  rope.beta_slow = reader.number(object, "beta_slow", 1.0);
  if (const Json* truncate = ConfigReader::find_in(object, "truncate")) {
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

// One of rope_scaling / rope_parameters; theta comes from the object or, in the older style, the
// top.
RopeConfig read_rope_object(ConfigReader& reader, const Json& object, const std::string& key,
                            const ModelConfig& config, double outer_theta) {
  RopeConfig rope;
  rope.theta = outer_theta;
  if (!object.is_object()) {
    reader.fault("{} is {}, wanted an object", key, object.dump());
    return rope;
  }
  for (const auto& [name, value] : object.items()) {
    if (!value.is_object()) continue;
    reader.fault("{}.{} is an object: rotary settings by layer type are not known to this family",
                 key, name);
    return rope;
  }
  rope.type = read_rope_type(reader, object, key);
  rope.theta = reader.number(object, "rope_theta", outer_theta);
  const double partial = reader.number(object, "partial_rotary_factor", 1.0);
  if (partial != 1.0) {
    reader.fault("{}.partial_rotary_factor is {}; this family turns whole heads", key, partial);
  }
  if (rope.type == RopeType::standard) return rope;

  rope.factor = reader.number(object, "factor", 0.0);
  if (rope.factor < 1.0) reader.fault("{}.factor is {}, wanted 1 or more", key, rope.factor);
  if (rope.type == RopeType::linear) return rope;

  const double original = reader.number(object, "original_max_position_embeddings", 0.0);
  if (original == 0.0 && rope.type == RopeType::llama3) {
    reader.fault("{}.original_max_position_embeddings is missing; rope_type 'llama3' needs it",
                 key);
  }
  rope.original_max_positions =
      original > 0 ? static_cast<std::int64_t>(original) : config.max_position_embeddings;
  if (rope.type == RopeType::llama3) read_llama3(reader, object, key, rope);
  if (rope.type == RopeType::yarn) read_yarn(reader, object, rope);
  return rope;
}

void read_rope(ConfigReader& reader, ModelConfig& config) {
  const Json* scaling = reader.find("rope_scaling");
  const Json* parameters = reader.find("rope_parameters");
  const double theta = reader.number("rope_theta", 10000.0);
  config.rope.theta = theta;
  if (scaling) config.rope = read_rope_object(reader, *scaling, "rope_scaling", config, theta);
  if (!parameters) return;
  const RopeConfig newer = read_rope_object(reader, *parameters, "rope_parameters", config, theta);
  if (scaling && newer != config.rope) {
    reader.fault("rope_scaling is {} and rope_parameters is {}; make them equal or remove one",
                 scaling->dump(), parameters->dump());
  }
  if (reader.find("rope_theta") && newer.theta != theta) {
    reader.fault("rope_theta is {} and rope_parameters.rope_theta is {}; make them equal", theta,
                 newer.theta);
  }
  config.rope = newer;
}

void read_dtype(ConfigReader& reader, ModelConfig& config) {
  const std::string newer = reader.text("dtype"), older = reader.text("torch_dtype");
  if (!newer.empty() && !older.empty() && newer != older) {
    reader.fault("dtype is '{}' and torch_dtype is '{}'; make them equal", newer, older);
  }
  config.dtype = newer.empty() ? older : newer;
}

void read_special_ids(ConfigReader& reader, std::string_view where, const Json* generation,
                      std::string_view generation_where, ModelConfig& config) {
  const auto pick = [&](const std::string& key) {
    const Json* value = generation ? ConfigReader::find_in(*generation, key) : nullptr;
    if (value) return reader.ids(value, key, generation_where);
    return reader.ids(reader.find(key), key, where);
  };
  config.eos_ids = pick("eos_token_id");
  if (const auto bos = pick("bos_token_id"); !bos.empty()) config.bos_id = bos.front();
  // The model's own: its embedding row gets no gradient. Generation's may be another.
  if (const auto pad = reader.ids(reader.find("pad_token_id"), "pad_token_id", where); !pad.empty())
    config.pad_id = pad.front();
  for (std::int32_t id : config.eos_ids) {
    if (id >= config.vocab_size)
      reader.fault("eos_token_id {} is outside vocab_size {}", id, config.vocab_size);
  }
}

}  // namespace

bool ModelConfig::has_sliding_window() const {
  return std::any_of(sliding_windows.begin(), sliding_windows.end(),
                     [](std::int64_t w) { return w > 0; });
}

std::string known_families() {
  std::vector<std::string> names;
  for (const Family& family : kFamilies) names.emplace_back(family.model_type);
  return joined(names);
}

ModelConfig parse_model_config(const Json& json, std::string_view where, const Json* generation,
                               std::string_view generation_where) {
  TD_CHECK(json.is_object(), "{}: not a JSON object", where);
  TD_CHECK(!generation || generation->is_object(), "{}: not a JSON object", generation_where);
  ConfigReader reader(json, where);
  ModelConfig config;
  if (const Family* family = read_family(reader, config)) {
    read_sizes(reader, *family, config);
    read_layer_switches(reader, *family, config);
    read_windows(reader, *family, config);
    read_rope(reader, config);
    read_dtype(reader, config);
    read_special_ids(reader, where, generation, generation_where, config);
  }
  // A key that is read twice would tell its conflict twice.
  std::vector<std::string> faults;
  for (const std::string& fault : reader.faults) {
    if (std::find(faults.begin(), faults.end(), fault) == faults.end()) faults.push_back(fault);
  }
  TD_CHECK(faults.empty(), "{}", fmt::join(faults, "\n"));
  return config;
}

ModelConfig read_model_config(const std::string& folder) {
  const std::string path = folder + "/config.json";
  const std::string generation_path = folder + "/generation_config.json";
  TD_CHECK(file_exists(path), "{}: not found; a Hugging Face model folder holds a config.json",
           path);
  const Json config = read_json_file(path);
  if (!file_exists(generation_path))
    return parse_model_config(config, path, nullptr, generation_path);
  const Json generation = read_json_file(generation_path);
  return parse_model_config(config, path, &generation, generation_path);
}

std::vector<ExpectedTensor> expected_tensors(const ModelConfig& c) {
  std::vector<ExpectedTensor> out;
  const auto add = [&](std::string name, std::vector<std::int64_t> shape) {
    out.push_back({std::move(name), std::move(shape), {}});
  };
  const auto linear = [&](const std::string& name, std::int64_t rows, std::int64_t columns,
                          bool bias) {
    add(name + ".weight", {rows, columns});
    if (bias) add(name + ".bias", {rows});
  };
  add("model.embed_tokens.weight", {c.vocab_size, c.hidden_size});
  for (std::int64_t i = 0; i < c.num_layers; ++i) {
    const std::string layer = fmt::format("model.layers.{}.", i);
    add(layer + "input_layernorm.weight", {c.hidden_size});
    linear(layer + "self_attn.q_proj", c.q_rows(), c.hidden_size, c.qkv_bias);
    linear(layer + "self_attn.k_proj", c.kv_rows(), c.hidden_size, c.qkv_bias);
    linear(layer + "self_attn.v_proj", c.kv_rows(), c.hidden_size, c.qkv_bias);
    if (c.qk_norm) {
      add(layer + "self_attn.q_norm.weight", {c.head_dim});
      add(layer + "self_attn.k_norm.weight", {c.head_dim});
    }
    linear(layer + "self_attn.o_proj", c.hidden_size, c.q_rows(), c.o_bias);
    add(layer + "post_attention_layernorm.weight", {c.hidden_size});
    linear(layer + "mlp.gate_proj", c.intermediate_size, c.hidden_size, c.mlp_bias);
    linear(layer + "mlp.up_proj", c.intermediate_size, c.hidden_size, c.mlp_bias);
    linear(layer + "mlp.down_proj", c.hidden_size, c.intermediate_size, c.mlp_bias);
  }
  add("model.norm.weight", {c.hidden_size});
  add("lm_head.weight", {c.vocab_size, c.hidden_size});
  if (c.tie_word_embeddings) out.back().copy_of = "model.embed_tokens.weight";
  return out;
}

bool is_recomputable_buffer(std::string_view name) { return name.ends_with("rotary_emb.inv_freq"); }

}  // namespace tandem
