// config.json in both styles gives the same ModelConfig; what is unknown or contradictory is
// refused by name; rotary frequencies have the worked values of case C50.
#include <gtest/gtest.h>

#include <cmath>

#include "model/parameters.h"

namespace tandem {
namespace {

::testing::AssertionResult holds(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "no '" << part << "' in: " << text;
}

Json llama() {
  return Json::parse(R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "torch_dtype": "bfloat16", "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": true})");
}

ModelConfig parse(const Json& json) {
  return parse_model_config(json, "m/config.json", nullptr, "");
}

std::vector<std::int64_t> windows(const ModelConfig& config) {
  std::vector<std::int64_t> out;
  for (const LayerConfig& layer : config.layers) out.push_back(layer.window);
  return out;
}

std::string fault_of(const Json& json) {
  try {
    parse(json);
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

TEST(ModelConfig, ReadsTheOlderStyle) {
  const ModelConfig config = parse(llama());
  EXPECT_EQ(config.family, "llama");
  EXPECT_EQ(config.num_layers, 2);
  EXPECT_EQ(config.head_dim, 8);
  EXPECT_EQ(config.num_kv_heads, 2);
  EXPECT_EQ(config.dtype, "bfloat16");
  EXPECT_EQ(config.ropes[0].theta, 100000.0);
  EXPECT_EQ(config.ropes[0].type, RopeType::standard);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_FALSE(config.qkv_bias);
  EXPECT_FALSE(config.has_sliding_window());
  EXPECT_EQ(config.eos_ids, (std::vector<std::int32_t>{2}));
  EXPECT_EQ(config.bos_id, 1);
  EXPECT_FALSE(config.pad_id.has_value());
}

TEST(ModelConfig, TheNewerStyleGivesTheSame) {
  Json older = llama(), newer = llama();
  const Json scaling = {{"factor", 8.0},
                        {"low_freq_factor", 1.0},
                        {"high_freq_factor", 4.0},
                        {"original_max_position_embeddings", 8192}};
  older["rope_scaling"] = scaling;
  older["rope_scaling"]["type"] = "llama3";
  newer["rope_parameters"] = scaling;
  newer["rope_parameters"]["rope_type"] = "llama3";
  newer["rope_parameters"]["rope_theta"] = newer["rope_theta"];
  newer.erase("rope_theta");
  newer["dtype"] = newer["torch_dtype"];
  newer.erase("torch_dtype");
  EXPECT_EQ(parse(older).ropes, parse(newer).ropes);
  EXPECT_EQ(parse(older).dtype, parse(newer).dtype);
  EXPECT_EQ(parse(newer).ropes[0].type, RopeType::llama3);
}

TEST(ModelConfig, FamiliesDifferInBiasesNormsAndHeads) {
  Json qwen2 = llama(), qwen3 = llama();
  qwen2["model_type"] = "qwen2";
  qwen2["architectures"] = {"Qwen2ForCausalLM"};
  qwen3["model_type"] = "qwen3";
  qwen3["architectures"] = {"Qwen3ForCausalLM"};
  EXPECT_TRUE(parse(qwen2).qkv_bias);
  EXPECT_FALSE(parse(qwen2).o_bias);
  EXPECT_FALSE(parse(qwen3).qkv_bias);
  EXPECT_EQ(parse(qwen3).qk_norm, QkNorm::head);
  EXPECT_EQ(parse(qwen3).head_dim, 128);  // transformers' default of this family
  qwen3["head_dim"] = 16;
  EXPECT_EQ(parse(qwen3).q_rows(), 96);
  Json biased = llama();
  biased["attention_bias"] = true;
  EXPECT_TRUE(parse(biased).qkv_bias);
  EXPECT_TRUE(parse(biased).o_bias);
}

TEST(ModelConfig, SlidingWindowsOfQwen) {
  Json json = llama();
  json["model_type"] = "qwen2";
  json["architectures"] = {"Qwen2ForCausalLM"};
  json["sliding_window"] = 64;
  json["max_window_layers"] = 1;
  json["use_sliding_window"] = false;
  EXPECT_FALSE(parse(json).has_sliding_window());
  json["use_sliding_window"] = true;
  EXPECT_EQ(windows(parse(json)), (std::vector<std::int64_t>{0, 64}));
  json["layer_types"] = {"sliding_attention", "full_attention"};
  EXPECT_EQ(windows(parse(json)), (std::vector<std::int64_t>{64, 0}));
  json["layer_types"] = {"sliding_attention", "mamba"};
  EXPECT_TRUE(holds(fault_of(json), "mamba"));
}

// C49 (d): tie only in the inner text config is honoured.
TEST(ModelConfig, NestedTextConfig) {
  Json inner = llama();
  Json outer = {
      {"architectures", inner["architectures"]}, {"model_type", "wrapper"}, {"text_config", inner}};
  EXPECT_TRUE(parse(outer).tie_word_embeddings);
  EXPECT_EQ(parse(outer).family, "llama");
  outer["tie_word_embeddings"] = false;
  const std::string fault = fault_of(outer);
  EXPECT_TRUE(holds(fault, "tie_word_embeddings is false at the top and true in text_config"));
}

// C30: the list of generation_config.json decides.
TEST(ModelConfig, EosListOfGenerationConfigComesFirst) {
  Json json = llama();
  json["vocab_size"] = 32064;
  json["eos_token_id"] = 32000;
  const Json generation = {{"eos_token_id", {32007, 32001, 32000}}, {"pad_token_id", 32000}};
  const ModelConfig config = parse_model_config(json, "c", &generation, "g");
  EXPECT_EQ(config.eos_ids, (std::vector<std::int32_t>{32007, 32001, 32000}));
  EXPECT_FALSE(config.pad_id.has_value());  // the padding row is the model's own affair
  const Json without = {{"temperature", 0.6}};
  EXPECT_EQ(parse_model_config(json, "c", &without, "g").eos_ids,
            (std::vector<std::int32_t>{32000}));
  // A fault names the file that it stands in.
  const Json wrong = {{"eos_token_id", 32064}};
  try {
    parse_model_config(json, "c", &wrong, "g");
    FAIL() << "accepted";
  } catch (const Error& e) {
    EXPECT_TRUE(holds(e.what(), "g: eos_token_id 32064 is outside [0, vocab_size 32064)"))
        << e.what();
  }
}

struct BadConfig {
  const char* name;
  const char* patch;  // merged into llama()
  std::vector<std::string> wanted;
};

class BadModelConfig : public ::testing::TestWithParam<BadConfig> {};

TEST_P(BadModelConfig, IsRefusedByName) {
  Json json = llama();
  json.merge_patch(Json::parse(GetParam().patch));
  const std::string fault = fault_of(json);
  EXPECT_TRUE(holds(fault, "m/config.json: "));
  for (const std::string& part : GetParam().wanted) EXPECT_TRUE(holds(fault, part));
}

INSTANTIATE_TEST_SUITE_P(
    Cases, BadModelConfig,
    ::testing::Values(
        BadConfig{"family", R"({"model_type": "mamba"})", {"'mamba'", "llama, qwen2, qwen3"}},
        BadConfig{"architecture",
                  R"({"architectures": ["LlamaForSequenceClassification"]})",
                  {"LlamaForSequenceClassification", "LlamaForCausalLM"}},
        BadConfig{"activation", R"({"hidden_act": "relu2"})", {"relu2", "silu"}},
        BadConfig{"rope_type",
                  R"({"rope_scaling": {"rope_type": "dynamic", "factor": 2}})",
                  {"dynamic", "default, linear, llama3, yarn, longrope"}},
        BadConfig{"rope_types",
                  R"({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2}})",
                  {"'linear'", "'yarn'"}},
        BadConfig{"rope_both",
                  R"({"rope_scaling": {"type": "linear", "factor": 2},
                      "rope_parameters": {"rope_type": "linear", "factor": 4}})",
                  {"rope_scaling", "rope_parameters"}},
        BadConfig{"theta",
                  R"({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}})",
                  {"rope_theta is 100000", "rope_parameters.rope_theta is 7"}},
        BadConfig{"no_factor", R"({"rope_scaling": {"type": "linear"}})", {"rope_scaling.factor"}},
        BadConfig{"factor_of_text",
                  R"({"rope_scaling": {"type": "linear", "factor": "2.0"}})",
                  {"rope_scaling.factor is \"2.0\", wanted a number"}},
        BadConfig{"rope_type_of_number",
                  R"({"rope_parameters": {"rope_type": 3}})",
                  {"rope_parameters.rope_type is 3, wanted a text"}},
        BadConfig{"no_original",
                  R"({"rope_scaling": {"type": "llama3", "factor": 8}})",
                  {"original_max_position_embeddings"}},
        BadConfig{"dtypes", R"({"dtype": "float32"})", {"'float32'", "'bfloat16'"}},
        BadConfig{"missing", R"({"hidden_size": null})", {"hidden_size is missing"}},
        BadConfig{"not_integer", R"({"hidden_size": 48.5})", {"hidden_size is 48.5"}},
        BadConfig{"groups", R"({"num_key_value_heads": 4})", {"6", "4", "num_key_value_heads"}},
        BadConfig{"no_head_dim", R"({"num_attention_heads": 10})", {"48", "10", "head_dim"}},
        BadConfig{"odd_head", R"({"head_dim": 7})", {"head_dim 7"}},
        BadConfig{"quantised", R"({"quantization_config": {"quant_method": "fp8"}})", {"fp8"}},
        BadConfig{"eos", R"({"eos_token_id": 4000})", {"4000", "96"}},
        BadConfig{"two_faults",
                  R"({"hidden_act": "relu", "model_type": "llama", "head_dim": 7})",
                  {"relu", "head_dim 7"}}),
    [](const auto& test) { return std::string(test.param.name); });

std::vector<double> ratios(const RopeConfig& rope, std::int64_t head_dim) {
  RopeConfig plain;
  plain.theta = rope.theta;
  const std::vector<float> scaled = inv_freq(rope, head_dim), unscaled = inv_freq(plain, head_dim);
  std::vector<double> out;
  for (std::size_t i = 0; i < scaled.size(); ++i)
    out.push_back(double{scaled[i]} / double{unscaled[i]});
  return out;
}

TEST(Rope, StandardFrequencies) {
  const std::vector<float> freqs = inv_freq(RopeConfig{}, 8);
  ASSERT_EQ(freqs.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_NEAR(freqs[i], std::pow(10.0, -static_cast<double>(i)), 1e-7);
  }
}

TEST(Rope, C50Llama3) {
  RopeConfig rope;
  rope.type = RopeType::llama3;
  rope.theta = 5e5;
  rope.original_max_positions = 8192;
  rope.factor = 8;
  std::vector<double> r = ratios(rope, 64);
  EXPECT_EQ(r[14], 1.0);
  EXPECT_NEAR(r[16], 0.371122, 1e-6);
  for (std::size_t i = 18; i < 32; ++i) EXPECT_NEAR(r[i], 0.125, 1e-7);
  rope.factor = 32;
  r = ratios(rope, 64);
  EXPECT_NEAR(r[16], 0.303743, 1e-6);
  for (std::size_t i = 18; i < 32; ++i) EXPECT_NEAR(r[i], 0.03125, 1e-7);
}

TEST(Rope, C50Yarn) {
  Json json = llama();
  json["rope_theta"] = 1e6;
  json["rope_scaling"] = {
      {"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 32768}};
  const RopeConfig rope = parse(json).ropes[0];
  EXPECT_NEAR(rope.attention_factor, 1.138629, 1e-6);
  const std::vector<double> r = ratios(rope, 128);
  for (std::size_t i = 0; i <= 23; ++i) EXPECT_NEAR(r[i], 1.0, 1e-7);
  EXPECT_NEAR(r[31], 0.647059, 1e-6);
  for (std::size_t i = 40; i < 64; ++i) EXPECT_NEAR(r[i], 0.25, 1e-7);
}

TEST(Rope, LinearDividesByItsFactor) {
  RopeConfig rope;
  rope.type = RopeType::linear;
  rope.factor = 4;
  for (double ratio : ratios(rope, 32)) EXPECT_NEAR(ratio, 0.25, 1e-7);
}

TEST(ExpectedTensors, CoverTheFamily) {
  Json json = llama();
  const auto count = [&] { return expected_tensors(parse(json)).size(); };
  EXPECT_EQ(count(), 2u * 9u + 3u);
  EXPECT_EQ(expected_tensors(parse(json)).back().copy_of, "model.embed_tokens.weight");
  json["tie_word_embeddings"] = false;
  EXPECT_EQ(expected_tensors(parse(json)).back().copy_of, "");
  json["attention_bias"] = true;
  EXPECT_EQ(count(), 2u * 13u + 3u);
  json["mlp_bias"] = true;
  EXPECT_EQ(count(), 2u * 16u + 3u);
  json["model_type"] = "qwen3";
  json["architectures"] = {"Qwen3ForCausalLM"};
  EXPECT_EQ(count(), 2u * 15u + 3u);
  for (const ExpectedTensor& tensor : expected_tensors(parse(json))) {
    if (tensor.name == "model.layers.1.self_attn.o_proj.weight") {
      EXPECT_EQ(tensor.shape, (std::vector<std::int64_t>{48, 6 * 128}));
    }
  }
  EXPECT_TRUE(is_recomputable_buffer("model.layers.0.self_attn.rotary_emb.inv_freq"));
  EXPECT_TRUE(is_recomputable_buffer("model.rotary_emb_local.inv_freq"));
  EXPECT_FALSE(is_recomputable_buffer("model.norm.weight"));
}

}  // namespace
}  // namespace tandem
