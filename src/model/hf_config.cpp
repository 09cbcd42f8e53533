// config.json → ModelConfig: what all families read alike, and the table of families.
#include "model/hf_config.h"

#include <algorithm>
#include <array>

#include "base/file.h"
#include "model/family.h"

namespace tandem {
namespace {

constexpr std::array<const Family*, 9> kFamilies = {&kLlama,   &kQwen2, &kQwen3, &kMistral, &kPhi3,
                                                    &kSmolLm3, &kOlmo2, &kGlm4,  &kGemma3};

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
  const auto by_type = std::find_if(kFamilies.begin(), kFamilies.end(), [&](const Family* family) {
    return config.family == family->model_type;
  });
  const auto by_name = std::find_if(kFamilies.begin(), kFamilies.end(), [&](const Family* family) {
    return config.architecture == family->architecture;
  });
  if (config.family.empty() && by_name != kFamilies.end()) {
    config.family = (*by_name)->model_type;
    return *by_name;
  }
  if (by_type == kFamilies.end()) {
    reader.fault("model_type '{}' is not known; known: {}", config.family, known_families());
    return nullptr;
  }
  if (config.architecture.empty()) config.architecture = (*by_type)->architecture;
  if (config.architecture != (*by_type)->architecture) {
    reader.fault("architectures names '{}', model_type '{}' means '{}'; known families: {}",
                 config.architecture, config.family, (*by_type)->architecture, known_families());
    return nullptr;
  }
  return *by_type;
}

void read_sizes(ConfigReader& reader, const FamilyDefaults& defaults, ModelConfig& config) {
  config.vocab_size = reader.integer("vocab_size", 1);
  config.hidden_size = reader.integer("hidden_size", 1);
  config.intermediate_size = reader.integer("intermediate_size", 1);
  config.num_layers = reader.integer("num_hidden_layers", 1);
  config.num_heads = reader.integer("num_attention_heads", 1);
  const bool all_heads = defaults.num_kv_heads == 0 || reader.names("num_key_value_heads");
  config.num_kv_heads = reader.integer("num_key_value_heads", 1,
                                       all_heads ? config.num_heads : defaults.num_kv_heads);
  config.max_position_embeddings = reader.integer("max_position_embeddings", 1);
  const bool divides = config.hidden_size % config.num_heads == 0;
  config.head_dim = reader.integer(
      "head_dim", 1, defaults.head_dim ? defaults.head_dim : config.hidden_size / config.num_heads);
  if (!reader.find("head_dim") && defaults.head_dim == 0 && !divides) {
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
  config.rms_norm_eps = reader.number("rms_norm_eps", defaults.rms_norm_eps);
  config.tie_word_embeddings = reader.boolean("tie_word_embeddings", defaults.tie_word_embeddings);
  config.layers.resize(static_cast<std::size_t>(config.num_layers));
  if (const Json* quantization = reader.find("quantization_config")) {
    reader.fault(
        "quantization_config is {}; quantised weights cannot be trained, use the folder with "
        "bf16 or f32 weights",
        quantization->dump());
  }
}

// What layer_types says must be what the family made of the other keys.
void check_layer_types(ConfigReader& reader, const ModelConfig& config) {
  const auto sliding = sliding_layers(reader, config);
  if (!sliding) return;
  for (std::size_t i = 0; i < config.layers.size(); ++i) {
    const std::int64_t window = config.layers[i].window;
    if ((*sliding)[i] == (window > 0)) continue;
    reader.fault("layer_types[{}] is {}, but sliding_window and its switches give this layer {}", i,
                 (*sliding)[i] ? "sliding_attention" : "full_attention",
                 window > 0 ? fmt::format("a window of {}", window) : "none");
    return;
  }
}

void read_dtype(ConfigReader& reader, ModelConfig& config) {
  const std::string newer = reader.text("dtype"), older = reader.text("torch_dtype");
  if (!newer.empty() && !older.empty() && newer != older) {
    reader.fault("dtype is '{}' and torch_dtype is '{}'; make them equal", newer, older);
  }
  config.dtype = newer.empty() ? older : newer;
}

void read_special_ids(ConfigReader& reader, std::string_view where, const Json* generation,
                      std::string_view generation_where, const FamilyDefaults& defaults,
                      ModelConfig& config) {
  const auto pick = [&](const std::string& key) {
    const Json* value = generation ? ConfigReader::find_in(*generation, key) : nullptr;
    if (value) return reader.ids(value, key, generation_where);
    return reader.ids(reader.find(key), key, where);
  };
  config.eos_ids = pick("eos_token_id");
  const bool generations = generation && ConfigReader::find_in(*generation, "eos_token_id");
  if (const auto bos = pick("bos_token_id"); !bos.empty()) config.bos_id = bos.front();
  // The model's own: its embedding row gets no gradient. Generation's may be another.
  if (const auto pad = reader.ids(reader.find("pad_token_id"), "pad_token_id", where); !pad.empty())
    config.pad_id = pad.front();
  else if (defaults.pad_id < config.vocab_size && !reader.names("pad_token_id"))
    config.pad_id = defaults.pad_id;
  for (std::int32_t id : config.eos_ids) {
    if (id >= config.vocab_size)
      reader.fault_in(generations ? generation_where : where,
                      "eos_token_id {} is outside [0, vocab_size {})", id, config.vocab_size);
  }
}

}  // namespace

bool ModelConfig::has_sliding_window() const {
  return std::any_of(layers.begin(), layers.end(),
                     [](const LayerConfig& l) { return l.window > 0; });
}

bool ModelConfig::has_longrope() const {
  return std::any_of(ropes.begin(), ropes.end(),
                     [](const RopeConfig& r) { return r.type == RopeType::longrope; });
}

std::string known_families() {
  std::vector<std::string_view> names;
  for (const Family* family : kFamilies) names.push_back(family->model_type);
  return fmt::format("{}", fmt::join(names, ", "));
}

void read_attention_bias(ConfigReader& reader, ModelConfig& config, bool otherwise,
                         bool on_output) {
  config.qkv_bias = reader.boolean("attention_bias", otherwise);
  config.o_bias = on_output && config.qkv_bias;
}

Activation read_activation(ConfigReader& reader, const std::string& key, Activation otherwise) {
  const std::string name = reader.text(key);
  if (name.empty()) return otherwise;
  if (name == "silu" || name == "swish") return Activation::silu;
  if (name == "gelu_pytorch_tanh") return Activation::gelu_tanh;
  reader.fault("{} '{}' is not known; known: silu, swish, gelu_pytorch_tanh", key, name);
  return otherwise;
}

std::optional<std::vector<bool>> sliding_layers(ConfigReader& reader, const ModelConfig& config) {
  const Json* types = reader.find("layer_types");
  if (!types) return std::nullopt;
  if (!types->is_array() || types->size() != config.layers.size()) {
    reader.fault("layer_types has {} items, num_hidden_layers is {}", types->size(),
                 config.layers.size());
    return std::nullopt;
  }
  std::vector<bool> sliding;
  for (const Json& type : *types) {
    if (type != "sliding_attention" && type != "full_attention") {
      reader.fault("layer_types[{}] is {}; known: full_attention, sliding_attention",
                   sliding.size(), type.dump());
      return std::nullopt;
    }
    sliding.push_back(type == "sliding_attention");
  }
  return sliding;
}

ModelConfig parse_model_config(const Json& json, std::string_view where, const Json* generation,
                               std::string_view generation_where) {
  TD_CHECK(json.is_object(), "{}: not a JSON object", where);
  TD_CHECK(!generation || generation->is_object(), "{}: not a JSON object", generation_where);
  ConfigReader reader(json, where);
  ModelConfig config;
  if (const Family* family = read_family(reader, config)) {
    read_sizes(reader, family->defaults, config);
    family->read(reader, config);
    check_layer_types(reader, config);
    read_dtype(reader, config);
    read_special_ids(reader, where, generation, generation_where, family->defaults, config);
  }
  reader.throw_faults();
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

}  // namespace tandem
