// What each family makes of its config.json, in the older hub style and in that of transformers 5:
// features of ModelConfig and tensors of the files. The numbers that follow from them are proved
// against transformers in tests/golden.
#include <gtest/gtest.h>

#include <cmath>

#include "model/arena.h"
#include "model/parameters.h"

namespace tandem {
namespace {

::testing::AssertionResult holds(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "no '" << part << "' in: " << text;
}

Json sizes(const char* model_type, const char* patch = "{}") {
  Json json = Json::parse(R"({"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 512, "eos_token_id": 2})");
  json["model_type"] = model_type;
  json.merge_patch(Json::parse(patch));
  return json;
}

ModelConfig parse(const Json& json) { return parse_model_config(json, "config.json", nullptr, ""); }

std::string fault_of(const Json& json) {
  try {
    parse(json);
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

std::vector<std::int64_t> windows(const ModelConfig& config) {
  std::vector<std::int64_t> out;
  for (const LayerConfig& layer : config.layers) out.push_back(layer.window);
  return out;
}
std::vector<std::int64_t> ropes(const ModelConfig& config) {
  std::vector<std::int64_t> out;
  for (const LayerConfig& layer : config.layers) out.push_back(layer.rope);
  return out;
}

// The tensors of layer 1, without prefix.
std::vector<std::string> layer_tensors(const ModelConfig& config) {
  const std::string prefix = "model.layers.1.";
  std::vector<std::string> out;
  for (const ExpectedTensor& t : expected_tensors(config))
    if (t.name.starts_with(prefix)) out.push_back(t.name.substr(prefix.size()));
  return out;
}

using Windows = std::vector<std::int64_t>;
using Names = std::vector<std::string>;

TEST(Mistral, EveryLayerHasTheWindow) {
  EXPECT_EQ(windows(parse(sizes("mistral", R"({"sliding_window": 24})"))),
            (Windows{24, 24, 24, 24}));
  Json json = sizes("mistral");
  json["sliding_window"] = nullptr;
  EXPECT_FALSE(parse(json).has_sliding_window());
  json.erase("sliding_window");  // transformers' default
  EXPECT_EQ(parse(json).layers[3].window, 4096);
  json["layer_types"] = {"full_attention", "full_attention", "full_attention", "full_attention"};
  EXPECT_TRUE(holds(fault_of(json), "layer_types[0] is full_attention, but sliding_window"));
}

TEST(Phi3, FusedTensorsAndLongRope) {
  Json json = sizes("phi3", R"({"rms_norm_eps": 1e-5, "max_position_embeddings": 1024,
    "original_max_position_embeddings": 64, "partial_rotary_factor": 0.75,
    "rope_scaling": {"type": "su", "short_factor": [1, 1.5, 2], "long_factor": [2, 4, 8]}})");
  const ModelConfig config = parse(json);
  EXPECT_EQ(layer_tensors(config),
            (Names{"input_layernorm.weight", "self_attn.qkv_proj.weight", "self_attn.o_proj.weight",
                   "post_attention_layernorm.weight", "mlp.gate_up_proj.weight",
                   "mlp.down_proj.weight"}));
  for (const ExpectedTensor& t : expected_tensors(config)) {
    if (t.name.ends_with("qkv_proj.weight")) {
      EXPECT_EQ(t.shape, (Windows{(6 + 4) * 8, 48}));
    }
    if (t.name.ends_with("gate_up_proj.weight")) {
      EXPECT_EQ(t.shape, (Windows{160, 48}));
    }
  }
  const RopeConfig& rope = config.ropes[0];
  EXPECT_EQ(rope.type, RopeType::longrope);
  EXPECT_EQ(rope.rotary_dim, 6);
  // sqrt(1 + ln 16 / ln 64) = sqrt(1 + 4/6).
  EXPECT_NEAR(rope.attention_factor, std::sqrt(1 + 4.0 / 6.0), 1e-12);
  EXPECT_EQ(inv_freq(rope, 8, 64)[0], 1.0f);
  EXPECT_EQ(inv_freq(rope, 8, 65)[0], 0.5f);
  EXPECT_NEAR(inv_freq(rope, 8, 64)[1], std::pow(10000.0, -1.0 / 3) / 1.5, 1e-8);

  Json newer = json;
  newer.erase("rope_scaling");
  newer.erase("partial_rotary_factor");
  newer["rope_parameters"] = {
      {"rope_type", "longrope"},       {"rope_theta", 10000.0},
      {"partial_rotary_factor", 0.75}, {"original_max_position_embeddings", 64},
      {"short_factor", {1, 1.5, 2}},   {"long_factor", {2, 4, 8}}};
  EXPECT_EQ(parse(newer).ropes, config.ropes);
  newer["original_max_position_embeddings"] = 128;
  EXPECT_TRUE(holds(fault_of(newer), "original_max_position_embeddings is 128 and"));
  json["rope_scaling"]["long_factor"] = {1, 2};
  EXPECT_TRUE(holds(fault_of(json), "rope_scaling.long_factor has 2 numbers, wanted 3"));
  json["rope_scaling"]["long_factor"] = {1, 2, "3"};
  EXPECT_TRUE(holds(fault_of(json), "rope_scaling.long_factor is [1,2,\"3\"], wanted a list"));
  json["rope_scaling"] = {{"type", "linear"}, {"factor", 2}};
  EXPECT_TRUE(holds(fault_of(json), "longrope"));
}

TEST(SmolLm3, SomeLayersAreNotTurned) {
  const Json json = sizes("smollm3");
  EXPECT_EQ(ropes(parse(json)), (Windows{0, 0, 0, kNoRope}));
  EXPECT_TRUE(parse(json).tie_word_embeddings);
  EXPECT_EQ(parse(json).ropes[0].theta, 2e6);
  const Json listed = sizes("smollm3", R"({"no_rope_layers": [0, 1, 1, 0],
    "use_sliding_window": true, "sliding_window": 16})");
  EXPECT_EQ(ropes(parse(listed)), (Windows{kNoRope, 0, 0, kNoRope}));
  EXPECT_EQ(windows(parse(listed)), (Windows{16, 0, 0, 16}));
  EXPECT_TRUE(holds(fault_of(sizes("smollm3", R"({"no_rope_layers": [0, 1]})")), "no_rope_layers"));
  EXPECT_TRUE(holds(fault_of(sizes("smollm3", R"({"no_rope_layers": [0, 1, 2, 1]})")),
                    "no_rope_layers[2] is 2"));
}

TEST(Olmo2, NormsAfterAndOverWholeProjections) {
  const ModelConfig config = parse(sizes("olmo2"));
  EXPECT_EQ(layer_tensors(config),
            (Names{"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
                   "self_attn.q_norm.weight", "self_attn.k_norm.weight", "self_attn.o_proj.weight",
                   "post_attention_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
                   "mlp.down_proj.weight", "post_feedforward_layernorm.weight"}));
  for (const ExpectedTensor& t : expected_tensors(config)) {
    if (t.name.ends_with("q_norm.weight")) {
      EXPECT_EQ(t.shape, (Windows{48}));
    }
    if (t.name.ends_with("k_norm.weight")) {
      EXPECT_EQ(t.shape, (Windows{16}));
    }
  }
  EXPECT_EQ(config.pad_id, 1);
}

TEST(Glm4, HalfOfEachHeadInNeighbouringPairs) {
  Json json = sizes("glm4", R"({"num_nextn_predict_layers": 1})");
  const ModelConfig config = parse(json);
  EXPECT_EQ(config.ropes[0].rotary_dim, 4);
  EXPECT_TRUE(config.ropes[0].interleaved);
  EXPECT_TRUE(config.qkv_bias);
  EXPECT_FALSE(config.o_bias);
  EXPECT_EQ(
      layer_tensors(config),
      (Names{"input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight",
             "self_attn.v_proj.weight", "self_attn.q_proj.bias", "self_attn.k_proj.bias",
             "self_attn.v_proj.bias", "self_attn.o_proj.weight", "post_self_attn_layernorm.weight",
             "post_attention_layernorm.weight", "mlp.gate_up_proj.weight", "mlp.down_proj.weight",
             "post_mlp_layernorm.weight"}));
  EXPECT_TRUE(is_extra_layer(config, "model.layers.4.eh_proj.weight"));
  EXPECT_FALSE(is_extra_layer(config, "model.layers.3.mlp.down_proj.weight"));
  EXPECT_FALSE(is_extra_layer(config, "model.layers.5.eh_proj.weight"));
  EXPECT_FALSE(is_extra_layer(config, "model.layers.4"));
  json["partial_rotary_factor"] = 0.3;  // 2.4 elements
  EXPECT_EQ(parse(json).ropes[0].rotary_dim, 2);
  json["partial_rotary_factor"] = 0.4;  // 3.2
  EXPECT_TRUE(holds(fault_of(json), "partial_rotary_factor 0.4 of head_dim 8 is 3"));
}

TEST(Gemma3, LocalAndGlobalLayersInBothStyles) {
  const Json older = sizes("gemma3_text", R"({"sliding_window": 24, "sliding_window_pattern": 2,
    "rope_theta": 50000.0, "rope_local_base_freq": 3000.0, "query_pre_attn_scalar": 12,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0}})");
  const ModelConfig config = parse(older);
  EXPECT_EQ(windows(config), (Windows{24, 0, 24, 0}));
  EXPECT_EQ(ropes(config), (Windows{1, 0, 1, 0}));
  EXPECT_EQ(config.ropes[0].type, RopeType::linear);
  EXPECT_EQ(config.ropes[0].theta, 50000.0);
  EXPECT_EQ(config.ropes[1].type, RopeType::standard);
  EXPECT_EQ(config.ropes[1].theta, 3000.0);
  EXPECT_EQ(config.norm_offset, 1.0);
  EXPECT_EQ(config.query_pre_attn_scalar, 12.0);
  EXPECT_EQ(config.activation, Activation::gelu_tanh);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_EQ(config.pad_id, 0);
  EXPECT_EQ(layer_tensors(config).size(), 13u);

  Json newer = sizes("gemma3_text", R"({"sliding_window": 24, "layer_types":
    ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 12, "rope_parameters": {
      "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
      "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0}}})");
  EXPECT_EQ(parse(newer).ropes, config.ropes);
  EXPECT_EQ(windows(parse(newer)), windows(config));
  newer["rope_parameters"] = {{"rope_type", "default"}};
  EXPECT_TRUE(holds(fault_of(newer), "rope_parameters.rope_type"));
  Json capped = older;
  capped["final_logit_softcapping"] = 30.0;
  capped["use_bidirectional_attention"] = true;
  EXPECT_TRUE(holds(fault_of(capped), "final_logit_softcapping is 30"));
  EXPECT_TRUE(holds(fault_of(capped), "use_bidirectional_attention"));
}

TEST(Family, UnknownOnesAreRefusedWithTheListOfKnownOnes) {
  EXPECT_TRUE(
      holds(fault_of(sizes("gpt_neox")),
            "known: llama, qwen2, qwen3, mistral, phi3, smollm3, olmo2, glm4, gemma3_text"));
}

// Two ranks cut a fused tensor inside each of its parts; one rank holds it as one entry.
TEST(Arena, FusedTensorsOfTheFilesAreCutByTheirParts) {
  const ModelConfig config = parse(sizes("phi3"));
  const auto rows_of = [&](const ArenaLayout& layout, const std::string& name) {
    std::vector<std::pair<std::int64_t, std::int64_t>> rows;  // global row, count
    for (const ArenaEntry& e : layout.entries)
      if (e.hf_name == "model.layers.1." + name) rows.emplace_back(e.global_row, e.rows);
    return rows;
  };
  using Rows = std::vector<std::pair<std::int64_t, std::int64_t>>;
  const ArenaLayout one = make_arena_layout(config, Element::f32);
  EXPECT_EQ(rows_of(one, "self_attn.qkv_proj.weight"), (Rows{{0, 80}}));
  const ArenaLayout second = make_arena_layout(config, Element::f32, 1, 2);
  EXPECT_EQ(rows_of(second, "self_attn.qkv_proj.weight"), (Rows{{24, 24}, {56, 8}, {72, 8}}));
  EXPECT_EQ(rows_of(second, "mlp.gate_up_proj.weight"), (Rows{{40, 40}, {120, 40}}));
}

}  // namespace
}  // namespace tandem
