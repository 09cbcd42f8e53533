// An engine on a GPU over its life in a colocated run: graphs are captured, the KV cache's memory
// goes back for training, the weights change, and the same graphs run again over memory at the same
// addresses. What they compute is what a fresh engine computes.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <random>

#include "base/file.h"
#include "base/json.h"
#include "base/safetensors.h"
#include "gpu/gpu.h"
#include "rank/selftest.h"
#include "rank/worker.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

// A model folder of random weights with heads of 64, which FlashInfer's kernels take.
class RandomModel {
 public:
  explicit RandomModel(std::int64_t head_dim = 64)
      : folder_(fs::temp_directory_path() / ("tandem-gpu-rank-" + std::to_string(getpid()))) {
    fs::create_directories(folder_);
    const Json config{{"architectures", {"LlamaForCausalLM"}},
                      {"model_type", "llama"},
                      {"vocab_size", kVocab},
                      {"hidden_size", kHidden},
                      {"intermediate_size", kInner},
                      {"num_hidden_layers", kLayers},
                      {"num_attention_heads", 4},
                      {"num_key_value_heads", 2},
                      {"head_dim", head_dim},
                      {"rms_norm_eps", 1e-5},
                      {"max_position_embeddings", 1024},
                      {"rope_theta", 10000.0},
                      {"tie_word_embeddings", true},
                      {"hidden_act", "silu"},
                      {"torch_dtype", "float32"},
                      {"eos_token_id", 2},
                      {"bos_token_id", 1}};
    write_file_atomic(path() + "/config.json", dump_json(config));
    add("model.embed_tokens.weight", {kVocab, kHidden});
    add("model.norm.weight", {kHidden});
    for (std::int64_t layer = 0; layer < kLayers; ++layer) {
      const std::string p = "model.layers." + std::to_string(layer) + ".";
      add(p + "input_layernorm.weight", {kHidden});
      add(p + "post_attention_layernorm.weight", {kHidden});
      add(p + "self_attn.q_proj.weight", {4 * head_dim, kHidden});
      add(p + "self_attn.k_proj.weight", {2 * head_dim, kHidden});
      add(p + "self_attn.v_proj.weight", {2 * head_dim, kHidden});
      add(p + "self_attn.o_proj.weight", {kHidden, 4 * head_dim});
      add(p + "mlp.gate_proj.weight", {kInner, kHidden});
      add(p + "mlp.up_proj.weight", {kInner, kHidden});
      add(p + "mlp.down_proj.weight", {kHidden, kInner});
    }
    std::vector<TensorView> tensors;
    for (std::size_t i = 0; i < names_.size(); ++i)
      tensors.push_back({names_[i].c_str(), Dtype::f32, shapes_[i], bytes_of(values_[i])});
    write_file_atomic(path() + "/model.safetensors", encode_safetensors(tensors, {}));
  }
  ~RandomModel() { fs::remove_all(folder_); }
  std::string path() const { return folder_; }

 private:
  static constexpr std::int64_t kVocab = 320, kHidden = 256, kInner = 512, kLayers = 2;
  void add(const std::string& name, std::vector<std::int64_t> shape) {
    std::int64_t count = 1;
    for (const std::int64_t n : shape) count *= n;
    std::normal_distribution<float> normal(0.0f, 0.08f);
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& v : values) v = normal(random_) + (shape.size() == 1 ? 1.0f : 0.0f);
    names_.push_back(name);
    shapes_.push_back(std::move(shape));
    values_.push_back(std::move(values));
  }
  fs::path folder_;
  std::mt19937_64 random_{7};
  std::vector<std::string> names_;
  std::vector<std::vector<std::int64_t>> shapes_;
  std::vector<std::vector<float>> values_;
};

std::vector<SampleResult> answer(EngineWorker& worker) {
  GenerateRequest request{.rid = "r", .prompt = {}, .n = 6, .first_sample_id = 0, .params = {}};
  for (TokenId id = 3; id < 60; ++id) request.prompt.push_back(id);
  request.params.max_new_tokens = 40;
  request.params.ignore_eos = true;
  request.params.seed = 99;
  std::vector<SampleResult> samples;
  worker.engine().add(request, [&](GenerateResult r) { samples = std::move(r.samples); });
  while (worker.engine().step()) {
  }
  return samples;
}

void expect_equal(const std::vector<SampleResult>& got, const std::vector<SampleResult>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].output_ids, want[i].output_ids) << "sample " << i;
    EXPECT_EQ(got[i].log_probs, want[i].log_probs) << "sample " << i;
  }
}

void scale_weights(Arena& arena, float by) {
  for (const ArenaEntry& e : arena.layout().entries) {
    std::vector<float> rows(
        static_cast<std::size_t>(e.rows * arena.layout().storages[e.storage].cols));
    arena.read_rows(e, 0, e.rows, rows.data());
    for (float& v : rows) v *= by;
    arena.write_rows(e, 0, e.rows, rows.data());
  }
  arena.set_version(arena.version() + 1);
}

class CudaEngine : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    TD_NEED_GPU();
    cuda_part().set_exact(GetParam());
  }
  void TearDown() override {
    if (num_gpus() > 0 && fs::exists(cuda_part_path())) cuda_part().set_exact(false);
  }
};

TEST_P(CudaEngine, GraphsOutliveReleaseRetakeAndUpdate) {
  const RandomModel model;
  Weights weights(model.path(), Element::bf16, Place::cuda);
  constexpr std::int64_t kTokens = 1 << 17;  // 134 MB of keys and values
  EngineWorker worker(weights.folder, weights.arena, EngineConfig{}, kTokens, {});
  const auto before = answer(worker);
  const std::int64_t graphs = worker.captured_graphs(), free_before = cuda_part().free_bytes();
  EXPECT_GT(graphs, 0);

  ASSERT_TRUE(worker.release_kv());
  EXPECT_TRUE(worker.kv_released());
  EXPECT_GE(cuda_part().free_bytes() - free_before, worker.kv_bytes());
  // Training has the memory meanwhile.
  const Memory training(Place::cuda, worker.kv_bytes(), "training");
  scale_weights(weights.arena, 1.25f);
  worker.engine().set_weight_version(1);
  worker.publish();

  const auto after = answer(worker);
  EXPECT_FALSE(worker.kv_released());
  EXPECT_EQ(worker.captured_graphs(), graphs) << "nothing was captured anew";
  EngineWorker fresh(weights.folder, weights.arena, EngineConfig{}, kTokens, {});
  expect_equal(after, answer(fresh));
  EXPECT_NE(after[0].log_probs, before[0].log_probs);
  EXPECT_EQ(after[0].versions, std::vector<std::int64_t>(40, 1));
}

// While samples hold keys and values nothing is given back.
TEST_P(CudaEngine, KvInUseStays) {
  const RandomModel model;
  Weights weights(model.path(), Element::bf16, Place::cuda);
  EngineWorker worker(weights.folder, weights.arena, EngineConfig{}, 4096, {});
  GenerateRequest request{
      .rid = "r", .prompt = {5, 6, 7}, .n = 1, .first_sample_id = 0, .params = {}};
  request.params.max_new_tokens = 20;
  request.params.ignore_eos = true;
  worker.engine().add(request, [](GenerateResult) {});
  EXPECT_TRUE(worker.engine().step());
  EXPECT_FALSE(worker.release_kv());
  worker.engine().pause(PauseMode::in_place);
  EXPECT_FALSE(worker.release_kv());
  worker.engine().resume();
  while (worker.engine().step()) {
  }
  EXPECT_TRUE(worker.release_kv());
}

// Ends by length leave fewer rows, so that smaller graphs are captured while a step is under way. A
// stop that only the token shows leaves a row that ran in vain: other rows have then other company,
// which changes bits in fast mode.
TEST_P(CudaEngine, StepsAheadDrawTheSame) {
  const RandomModel model;
  Weights weights(model.path(), Element::bf16, Place::cuda);
  const auto answers = [&](bool ahead, bool stops) {
    EngineWorker worker(weights.folder, weights.arena, EngineConfig{}, 1 << 14, {});
    std::vector<GenerateResult> results(24);
    for (int i = 0; i < 24; ++i) {
      GenerateRequest request{.rid = std::to_string(i),
                              .prompt = {3 + i, 5, 8},
                              .n = 1 + i % 2,
                              .first_sample_id = static_cast<std::uint64_t>(4 * i),
                              .params = {}};
      request.params.max_new_tokens = 5 + 4 * i;
      request.params.ignore_eos = !stops;
      for (TokenId id = 0; id < 10; ++id) request.params.stop_token_ids.push_back(17 * id);
      worker.engine().add(request, [&results, i](GenerateResult r) { results[i] = std::move(r); });
    }
    while (ahead ? worker.engine().run({}) : worker.engine().step()) {
    }
    return results;
  };
  for (const bool stops : {false, true}) {
    if (stops && !GetParam()) continue;
    const auto got = answers(true, stops), want = answers(false, stops);
    for (std::size_t i = 0; i < got.size(); ++i) {
      SCOPED_TRACE("request " + std::to_string(i) + (stops ? ", stops" : ""));
      expect_equal(got[i].samples, want[i].samples);
    }
  }
}

// Past several tiles (128) and chunks (512) of keys, for each head size that FlashInfer has.
TEST(CudaExactness, LongSequences) {
  TD_NEED_GPU();
  cuda_part().set_exact(true);
  for (const std::int64_t head_dim : {64, 128}) {
    const RandomModel model(head_dim);
    Weights weights(model.path(), Element::bf16, Place::cuda);
    const auto rows = run_selftest(weights.folder, weights.arena,
                                   {.tokens = 60000, .new_tokens = 450, .prompt_tokens = 110});
    for (const SelftestRow& row : rows)
      EXPECT_EQ(row.differ, 0) << "heads of " << head_dim << ": " << row.way << ": " << row.note;
  }
  cuda_part().set_exact(false);
}

INSTANTIATE_TEST_SUITE_P(Modes, CudaEngine, testing::Values(false, true),
                         [](const auto& p) { return p.param ? "exact" : "fast"; });

}  // namespace
}  // namespace tandem
