// An engine of two ranks: exact, it gives the bits of an engine of one, with captured steps and
// without; row-parallel, the same to rounding and itself again. Each rank runs the whole scheduler;
// the gathered logits give both the same tokens. On one GPU, which NCCL does not let two ranks
// share, they gather through host memory and capture nothing.
#include <gtest/gtest.h>

#include <cstdio>

#include "checkpoint/weights.h"
#include "engine/runner.h"
#include "gpu/random_model.h"
#include "gpu/two_ranks.h"
#include "rank/worker.h"

namespace tandem {
namespace {

std::vector<SampleResult> answers(Engine& engine) {
  std::vector<SampleResult> samples;
  for (int i = 0; i < 5; ++i) {
    GenerateRequest request{.rid = std::to_string(i),
                            .prompt = {},
                            .n = 2,
                            .first_sample_id = static_cast<std::uint64_t>(2 * i),
                            .params = {}};
    for (TokenId id = 3; id < 20 + 7 * i; ++id) request.prompt.push_back(id);
    request.params.max_new_tokens = 30;
    request.params.ignore_eos = true;
    request.params.seed = 99;
    engine.add(request, [&](GenerateResult r) {
      samples.insert(samples.end(), r.samples.begin(), r.samples.end());
    });
  }
  while (engine.step()) {
  }
  return samples;
}

struct Parts {
  Parts(int rank, Store& store) : group(Group::gloo(store, "engine", rank, 2)) {
    if (ranks_apart())
      link = std::make_unique<Link>(store, "engine", std::vector{0, 1}, rank, LinkUse::in_stream,
                                    kTwoRanksSeconds);
    else
      std::puts("captured steps over two ranks: not run: 1 GPU");
  }
  Group group;
  std::unique_ptr<Link> link;
};

std::vector<SampleResult> through_two(const RandomModel& model, Element element, ShardRule rule,
                                      Parts& parts, bool graphs) {
  const HfFolder folder = HfFolder::open(model.path());
  Arena arena(
      make_arena_layout(folder.config(), element, parts.group.rank(), 2, Place::cuda, rule));
  load_arena(folder, arena);
  Model part(folder.config(), arena, &parts.group, nullptr, parts.link.get());
  KvPool pool(part.attention_shape(), element, folder.config().num_layers, 256, Place::cuda);
  Runner runner(part, pool, graphs);
  Mailbox mailbox;
  Engine engine(
      {.num_blocks = 256,
       .max_running = 64,
       .max_prefill_tokens = 64,
       .context_length = folder.config().max_position_embeddings,
       .vocab_size = folder.config().vocab_size,
       .eos_token_ids = {},
       .vocabulary = {}},
      [&](const StepPlan& plan, std::span<SampledToken> sampled) { runner.run(plan, sampled); },
      mailbox);
  auto found = answers(engine);
  EXPECT_EQ(runner.captured_graphs() > 0, graphs && parts.link);
  return found;
}

class TwoRanks : public testing::TestWithParam<Element> {
 protected:
  void TearDown() override {
    if (num_gpus() > 0 && std::filesystem::exists(cuda_part_path())) cuda_part().set_exact(false);
  }
};

TEST_P(TwoRanks, ExactlyWhatOneComputes) {
  TD_NEED_GPU();
  on_two_ranks([](int rank, Store& store) {
    cuda_part().set_exact(true);
    const RandomModel model;
    Weights weights(model.path(), GetParam(), Place::cuda);
    EngineWorker one(weights.folder, weights.arena, EngineConfig{}, 4096, {});
    const auto want = answers(one.engine());
    Parts parts(rank, store);
    for (const bool graphs : {false, true}) {
      const auto got = through_two(model, GetParam(), ShardRule::exact, parts, graphs);
      ASSERT_EQ(got.size(), want.size());
      for (std::size_t i = 0; i < want.size(); ++i) {
        EXPECT_EQ(got[i].output_ids, want[i].output_ids) << "sample " << i;
        EXPECT_EQ(got[i].log_probs, want[i].log_probs) << "sample " << i;
      }
    }
    parts.group.barrier();
  });
}

TEST_P(TwoRanks, RowParallelToRoundingAndItselfAgain) {
  TD_NEED_GPU();
  on_two_ranks([](int rank, Store& store) {
    const RandomModel model;
    Weights weights(model.path(), GetParam(), Place::cuda);
    EngineWorker one(weights.folder, weights.arena, EngineConfig{}, 4096, {});
    const auto want = answers(one.engine());
    Parts parts(rank, store);
    const auto run = [&](bool graphs) {
      return through_two(model, GetParam(), ShardRule::row_parallel, parts, graphs);
    };
    const auto got = run(true), again = run(true), eager = run(false);
    const float bound = GetParam() == Element::f32 ? 1e-4f : 0.1f;
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < want.size(); ++i) {
      EXPECT_EQ(got[i].log_probs, again[i].log_probs) << "sample " << i;
      // Up to the first token that rounding drew differently.
      for (const auto& other : {want[i], eager[i]})
        for (std::size_t t = 0; t < other.log_probs.size(); ++t) {
          if (got[i].output_ids[t] != other.output_ids[t]) break;
          EXPECT_NEAR(got[i].log_probs[t], other.log_probs[t], bound) << i << ", token " << t;
        }
    }
    parts.group.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Types, TwoRanks, testing::Values(Element::f32, Element::bf16),
                         [](const auto& p) { return p.param == Element::f32 ? "f32" : "bf16"; });

}  // namespace
}  // namespace tandem
