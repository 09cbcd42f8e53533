// Trainer = engine, bit for bit, over batch sizes, chunks, known prefixes, preemption, shared
// prompts and tensor parallelism (rank/selftest.h): 10^6 tokens on tiny models of every family in
// bf16 and f32, 2·10^4 on the demo model. scripts/soak.sh has 10^6 on that one too. With
// TANDEM_TEST_DEVICE=cuda in the environment the same on a GPU in exact mode, on fewer tokens.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <random>

#include "base/file.h"
#include "base/json.h"
#include "base/safetensors.h"
#include "golden/device.h"
#include "rank/selftest.h"
#include "rank/worker.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
const std::string kTiny = std::string(TANDEM_SOURCE_DIR) + "/tests/golden/tiny";

std::vector<std::string> tiny_models() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(kTiny)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<SelftestRow> check(const std::string& folder, Element element, std::int64_t tokens) {
  const ExactMode exact;
  if (tested_place() == Place::cuda) tokens = std::min<std::int64_t>(tokens, 8000);
  Weights weights(folder, element, tested_place());
  const auto rows = run_selftest(weights.folder, weights.arena, {.tokens = tokens});
  std::int64_t compared = 0;
  for (const SelftestRow& row : rows) {
    EXPECT_EQ(row.differ, 0) << folder << ": " << row.way << ": " << row.note;
    compared += row.tokens;
  }
  EXPECT_GE(compared, tokens) << folder;
  return rows;
}

const SelftestRow& row_of(const std::vector<SelftestRow>& rows, const std::string& way) {
  const auto found =
      std::ranges::find_if(rows, [&](const SelftestRow& r) { return r.way.find(way) != way.npos; });
  if (found != rows.end()) return *found;
  ADD_FAILURE() << "no way is called " << way;
  return rows.front();
}

class Exactness : public testing::TestWithParam<std::string> {};

TEST_P(Exactness, TrainerAndEngineComputeTheSameBits) {
  const auto share = static_cast<std::int64_t>(1'000'000 / (2 * tiny_models().size()) + 1);
  for (const Element element : {Element::f32, Element::bf16}) {
    const auto rows = check(kTiny + "/" + GetParam(), element, share);
    // The ways are what they are called.
    EXPECT_NE(row_of(rows, "a quarter of the KV").note.find("preemptions"), std::string::npos);
    EXPECT_NE(row_of(rows, "prefixes known").note.find("known prefixes"), std::string::npos);
    EXPECT_NE(row_of(rows, "second turn").note.find("rows from known"), std::string::npos);
    EXPECT_EQ(row_of(rows, "nothing known").note.find("known"), std::string::npos);
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, Exactness, testing::ValuesIn(tiny_models()),
                         [](const auto& p) { return p.param; });

// A model folder of random weights whose sizes two ranks can halve: GQA, an odd head size.
std::string make_folder() {
  const std::string folder =
      fs::temp_directory_path() / ("tandem-exactness-" + std::to_string(getpid()));
  fs::create_directories(folder);
  constexpr std::int64_t vocab = 96, hidden = 44, inner = 70, heads = 6, kv = 2, dim = 10;
  write_file_atomic(folder + "/config.json", dump_json(Json{{"architectures", {"LlamaForCausalLM"}},
                                                            {"model_type", "llama"},
                                                            {"vocab_size", vocab},
                                                            {"hidden_size", hidden},
                                                            {"intermediate_size", inner},
                                                            {"num_hidden_layers", 2},
                                                            {"num_attention_heads", heads},
                                                            {"num_key_value_heads", kv},
                                                            {"head_dim", dim},
                                                            {"rms_norm_eps", 1e-5},
                                                            {"max_position_embeddings", 512},
                                                            {"rope_theta", 10000.0},
                                                            {"tie_word_embeddings", false},
                                                            {"hidden_act", "silu"},
                                                            {"torch_dtype", "float32"},
                                                            {"eos_token_id", 2},
                                                            {"bos_token_id", 1}}));
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal(0.0f, 0.15f);
  std::vector<std::pair<std::string, std::vector<std::int64_t>>> shapes = {
      {"model.embed_tokens.weight", {vocab, hidden}},
      {"model.norm.weight", {hidden}},
      {"lm_head.weight", {vocab, hidden}}};
  for (int layer = 0; layer < 2; ++layer) {
    const std::string p = "model.layers." + std::to_string(layer) + ".";
    for (const auto& [name, shape] : std::vector<std::pair<std::string, std::vector<std::int64_t>>>{
             {"input_layernorm.weight", {hidden}},
             {"post_attention_layernorm.weight", {hidden}},
             {"self_attn.q_proj.weight", {heads * dim, hidden}},
             {"self_attn.k_proj.weight", {kv * dim, hidden}},
             {"self_attn.v_proj.weight", {kv * dim, hidden}},
             {"self_attn.o_proj.weight", {hidden, heads * dim}},
             {"mlp.gate_proj.weight", {inner, hidden}},
             {"mlp.up_proj.weight", {inner, hidden}},
             {"mlp.down_proj.weight", {hidden, inner}}}) {
      shapes.emplace_back(p + name, shape);
    }
  }
  std::vector<std::vector<float>> values;
  std::vector<TensorView> tensors;
  values.reserve(shapes.size());
  for (const auto& [name, shape] : shapes) {
    std::int64_t count = 1;
    for (const std::int64_t n : shape) count *= n;
    std::vector<float>& all = values.emplace_back(static_cast<std::size_t>(count));
    for (float& v : all) v = normal(random) + (shape.size() == 1 ? 1.0f : 0.0f);
    tensors.push_back({name.c_str(), Dtype::f32, shape, bytes_of(all)});
  }
  write_file_atomic(folder + "/model.safetensors", encode_safetensors(tensors, {}));
  return folder;
}

TEST(Exactness, TwoTensorParallelRanksToo) {
  // A process has one GPU: tests/gpu/rank_parallel_cuda_test.cpp is the same over two processes.
  if (tested_place() == Place::cuda) GTEST_SKIP() << "not run: a rank on a GPU is a process";
  const std::string folder = make_folder();
  for (const Element element : {Element::f32, Element::bf16}) {
    const auto rows = check(folder, element, 4000);
    EXPECT_GT(row_of(rows, "tensor parallel").tokens, 0);
  }
  fs::remove_all(folder);
}

// The comparison sees a difference: one norm wrong by 2^-20 on one side.
TEST(Exactness, SeesAnEngineThatIsWrongByLittle) {
  const ExactMode exact;
  Weights weights(kTiny + "/llama_odd", Element::f32, tested_place());
  const auto rows =
      run_selftest(weights.folder, weights.arena, {.tokens = 4000, .perturb_engine = true});
  EXPECT_GT(row_of(rows, "nothing known").differ, 0);
  EXPECT_EQ(row_of(rows, "trainer, one").differ, 0);
}

std::vector<SampleResult> answer(EngineWorker& worker, const GenerateRequest& request) {
  std::vector<SampleResult> samples;
  worker.engine().add(request, [&](GenerateResult r) { samples = std::move(r.samples); });
  while (worker.engine().step()) {
  }
  return samples;
}

GenerateRequest request_of(std::int64_t n, std::uint64_t first_sample_id) {
  GenerateRequest request{
      .rid = "r", .prompt = {}, .n = n, .first_sample_id = first_sample_id, .params = {}};
  for (TokenId id = 1; id < 40; ++id) request.prompt.push_back(id);
  request.params.max_new_tokens = 20;
  request.params.ignore_eos = true;
  request.params.seed = 1234;
  return request;
}

// C28 with real numbers: after new weights a prompt gives a fresh engine's bits, nothing cached.
TEST(Exactness, NewWeightsNeverMeetOldKv) {
  const ExactMode exact;
  Weights weights(kTiny + "/qwen3", Element::bf16, tested_place());
  EngineWorker worker(weights.folder, weights.arena, EngineConfig{}, 4096, {});
  const auto before = answer(worker, request_of(1, 0));
  EXPECT_EQ(before[0].cached_tokens, 0);
  EXPECT_EQ(answer(worker, request_of(1, 0))[0].cached_tokens, 32) << "two full blocks";

  for (const ArenaEntry& e : weights.arena.layout().entries) {
    std::vector<float> rows(
        static_cast<std::size_t>(e.rows * weights.arena.layout().storages[e.storage].cols));
    weights.arena.read_rows(e, 0, e.rows, rows.data());
    for (float& v : rows) v *= 1.25f;
    weights.arena.write_rows(e, 0, e.rows, rows.data());
  }
  weights.arena.set_version(weights.arena.version() + 1);
  worker.engine().set_weight_version(1);
  worker.publish();
  const auto after = answer(worker, request_of(1, 0));
  EngineWorker fresh(weights.folder, weights.arena, EngineConfig{}, 4096, {});
  const auto wanted = answer(fresh, request_of(1, 0));
  EXPECT_EQ(after[0].output_ids, wanted[0].output_ids);
  EXPECT_EQ(after[0].log_probs, wanted[0].log_probs);
  EXPECT_NE(after[0].log_probs, before[0].log_probs);
  EXPECT_EQ(after[0].cached_tokens, 0);
  EXPECT_EQ(after[0].versions, std::vector<std::int64_t>(20, 1));
}

// C38: 8 samples of one prompt differ from each other, and come back on a second run, from one
// engine or from two.
TEST(Exactness, SamplesAreThoseOfTheirIdsOnAnyEngine) {
  const ExactMode exact;
  Weights weights(kTiny + "/llama_odd", Element::f32, tested_place());
  EngineWorker one(weights.folder, weights.arena, EngineConfig{}, 4096, {});
  EngineWorker two(weights.folder, weights.arena, EngineConfig{}, 4096, {});
  const auto all = answer(one, request_of(8, 16));
  const auto again = answer(one, request_of(8, 16));
  auto split = answer(two, request_of(3, 16));
  const auto rest = answer(one, request_of(5, 19));
  split.insert(split.end(), rest.begin(), rest.end());
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(all[i].output_ids, again[i].output_ids);
    EXPECT_EQ(all[i].output_ids, split[i].output_ids);
    EXPECT_EQ(all[i].log_probs, split[i].log_probs);
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(all[i].output_ids, all[j].output_ids);
  }
}

class DemoModel : public testing::TestWithParam<Element> {};

TEST_P(DemoModel, TrainerAndEngineComputeTheSameBits) {
  check(std::string(TANDEM_SOURCE_DIR) + "/models/SmolLM2-135M-Instruct", GetParam(), 10'000);
}

INSTANTIATE_TEST_SUITE_P(Golden, DemoModel, testing::Values(Element::f32, Element::bf16),
                         [](const auto& p) { return p.param == Element::f32 ? "f32" : "bf16"; });

}  // namespace
}  // namespace tandem
