// An engine on a GPU over its life in a colocated run: graphs are captured, the KV cache's memory
// goes back for training, the weights change, and the same graphs run again over memory at the same
// addresses. What they compute is what a fresh engine computes.
#include <gtest/gtest.h>

#include <filesystem>

#include "gpu/gpu.h"
#include "gpu/random_model.h"
#include "rank/selftest.h"
#include "rank/worker.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

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
