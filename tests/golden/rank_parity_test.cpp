// The model against transformers (eager attention, f32): numbers made by tools/make_tiny_models.py.
// Log-probabilities within 1e-4 through the trainer's and the engine's path, loss within 1e-5, each
// parameter's gradient norm within 1e-4 relative, greedy continuations equal. And the two paths
// against each other: equal bit for bit. With TANDEM_TEST_DEVICE=cuda in the environment the same
// on a GPU, where in fast mode (the float32 parity) the two paths agree to rounding and in exact
// mode (the rest) bit for bit.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include "base/json.h"

#include "checkpoint/weights.h"
#include "golden/device.h"
#include "gpu/two_ranks.h"
#include "rank/worker.h"
#include "trainer/packed_batch.h"
#include "trainer/score.h"
#include "unit/rank_threads.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
const std::string kGolden = std::string(TANDEM_SOURCE_DIR) + "/tests/golden/";

using Ids = std::vector<TokenId>;

// The trainer's and the engine's log-probabilities of one sequence, on a GPU in fast mode.
void expect_same(const std::vector<float>& trainer, const std::vector<float>& engine,
                 float on_gpu) {
  if (tested_place() == Place::cpu) {
    EXPECT_EQ(trainer, engine);
    return;
  }
  ASSERT_EQ(trainer.size(), engine.size());
  for (std::size_t i = 0; i < trainer.size(); ++i)
    ASSERT_NEAR(trainer[i], engine[i], on_gpu) << "token " << i + 1;
}

Ids greedy(Weights& weights, const Ids& prompt, std::int64_t count) {
  EngineWorker worker(weights.folder, weights.arena, EngineConfig{}, 4096, {});
  worker.set_longest_sequence(static_cast<std::int64_t>(prompt.size()) + count);
  GenerateRequest request{
      .rid = "greedy", .prompt = prompt, .n = 1, .first_sample_id = 0, .params = {}};
  request.params.temperature = 0;
  request.params.max_new_tokens = count;
  request.params.ignore_eos = true;
  Ids out;
  worker.engine().add(request, [&](GenerateResult r) { out = r.samples.at(0).output_ids; });
  while (worker.engine().step()) {
  }
  return out;
}

void check_sequence(Weights& weights, const Json& expected) {
  const auto ids = expected.at("input_ids").get<Ids>();
  const auto want = expected.at("logprobs").get<std::vector<double>>();
  Scorer scorer(weights.folder.config(), weights.arena, expected.contains("gradient_norms"));
  const Score trainer = scorer.through_trainer(ids), engine = scorer.through_engine(ids);
  ASSERT_EQ(trainer.log_probs.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i)
    ASSERT_NEAR(trainer.log_probs[i], want[i], 1e-4) << "token " << i + 1;
  expect_same(trainer.log_probs, engine.log_probs, 1e-4f);
  if (expected.contains("loss")) {
    EXPECT_NEAR(trainer.loss, expected.at("loss").get<double>(), 1e-5);
  }
  if (!expected.contains("gradient_norms")) return;
  std::size_t seen = 0;
  for (const auto& [name, norm] : expected.at("gradient_norms").items()) {
    if (!trainer.gradient_norms.count(name)) continue;  // a tied head has no entry of its own
    ++seen;
    const double w = norm.get<double>();
    EXPECT_NEAR(trainer.gradient_norms.at(name), w, 1e-4 * w + 1e-9) << name;
  }
  EXPECT_EQ(seen, trainer.gradient_norms.size());
}

class TinyModel : public testing::TestWithParam<std::string> {};

TEST_P(TinyModel, AgreesWithTransformers) {
  const std::string folder = kGolden + "tiny/" + GetParam();
  const Json expected = read_json_file(folder + "/expected.json");
  Weights weights(folder, Element::f32, tested_place());
  for (const Json& sequence : expected.at("sequences")) check_sequence(weights, sequence);
  const Json& g = expected.at("greedy");
  EXPECT_EQ(greedy(weights, g.at("input_ids").get<Ids>(), 24), g.at("tokens").get<Ids>());
}

// In bf16 the two paths agree bit for bit too, and stay as near to the f32 numbers as
// weights of 8 bits let them.
TEST_P(TinyModel, InBf16TrainerAndEngineAgree) {
  const std::string folder = kGolden + "tiny/" + GetParam();
  const Json expected = read_json_file(folder + "/expected.json");
  const ExactMode exact;
  Weights weights(folder, Element::bf16, tested_place());
  Scorer scorer(weights.folder.config(), weights.arena, false);
  for (const Json& sequence : expected.at("sequences")) {
    const auto ids = sequence.at("input_ids").get<Ids>();
    const auto want = sequence.at("logprobs").get<std::vector<double>>();
    const Score trainer = scorer.through_trainer(ids);
    EXPECT_EQ(trainer.log_probs, scorer.through_engine(ids).log_probs);
    double sum = 0;
    for (std::size_t i = 0; i < want.size(); ++i) sum += std::abs(trainer.log_probs[i] - want[i]);
    EXPECT_LT(sum / static_cast<double>(want.size()), 0.1);
  }
}

// Three answers to one prompt as one packed forward, the prompt's rows shared or not:
// log-probability of every answer token, and the gradient of their sum.
struct Packed {
  std::vector<float> log_probs, gradient;
};
Packed run_packed(Weights& weights, bool share_prompt) {
  const ModelConfig& config = weights.folder.config();
  std::vector<Sample> samples(3);
  std::vector<const Sample*> pointers;
  for (std::size_t s = 0; s < samples.size(); ++s) {
    const std::size_t answer = 50 + 3 * s;
    for (std::size_t i = 0; i < 37 + answer; ++i)
      samples[s].tokens.push_back(
          static_cast<TokenId>((i < 37 ? i * 7 + 3 : i * (11 + s) + s) % config.vocab_size));
    samples[s].response_length = static_cast<std::int64_t>(answer);
    samples[s].loss_mask.assign(answer, 1);
    pointers.push_back(&samples[s]);
  }
  PackedBatch packed(pointers, share_prompt);
  Model model(config, weights.arena, nullptr, nullptr);
  KvPool pool(model.attention_shape(), model.element(), 1, packed.num_blocks(), model.place());
  packed.context.pool = &pool;
  FlatBuffer gradient(weights.arena.layout().flat_elements, model.place());
  model.set_grads(gradient.data());
  const auto hidden = model.forward(packed.tokens, packed.positions, packed.context);
  std::vector<std::int64_t> rows;
  std::vector<TokenId> ids;
  for (const LossToken& t : packed.loss) {
    rows.push_back(t.row);
    ids.push_back(t.id);
  }
  const auto picked = hidden.index_select(0, at::tensor(rows).to(hidden.device()));
  const auto log_probs = head_log_probs(picked, ids, model.head(), 1.0f, false).log_probs;
  log_probs.sum().backward();
  model.finish_grads();
  const auto host = log_probs.detach().cpu();
  const float* p = host.data_ptr<float>();
  Packed out{{p, p + host.numel()}, std::vector<float>(static_cast<std::size_t>(gradient.size()))};
  gradient.read(0, out.gradient);
  return out;
}

// A shared prompt's border lies inside a KV block and inside every window: the same bits forward,
// and the same gradient but for the order of additions.
TEST_P(TinyModel, SharedPromptsChangeNoBit) {
  const ExactMode exact;
  Weights weights(kGolden + "tiny/" + GetParam(), Element::f32, tested_place());
  const Packed alone = run_packed(weights, false), shared = run_packed(weights, true);
  EXPECT_EQ(alone.log_probs, shared.log_probs);
  double square = 0, difference = 0;
  for (std::size_t i = 0; i < alone.gradient.size(); ++i) {
    square += std::pow(double{alone.gradient[i]}, 2);
    difference += std::pow(double{alone.gradient[i]} - shared.gradient[i], 2);
  }
  EXPECT_GT(square, 1.0);
  EXPECT_LT(std::sqrt(difference / square), 1e-5);
}

std::vector<std::string> tiny_models() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(kGolden + "tiny"))
    names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

// Log-probabilities of a sequence from one of an engine's ranks, all its rows in one call.
std::vector<float> parallel_log_probs(const HfFolder& folder, const Ids& ids, Group& group,
                                      Element element, ShardRule rule, Link* link = nullptr) {
  const ModelConfig& config = folder.config();
  const Place place = tested_place();
  Arena part(make_arena_layout(config, element, group.rank(), group.size(), place, rule));
  load_arena(folder, part);
  Model model(config, part, &group, nullptr, link);
  const auto rows = static_cast<std::int64_t>(ids.size());
  const std::int64_t blocks = (rows + kBlockTokens - 1) / kBlockTokens;
  KvPool pool(model.attention_shape(), element, config.num_layers, blocks, place);
  std::vector<std::int32_t> block_ids, positions;
  std::vector<std::int64_t> all;
  AttentionContext context{.pool = &pool, .segments = {}, .writes = {}, .plan = {}};
  for (std::int64_t b = 0; b < blocks; ++b) block_ids.push_back(static_cast<std::int32_t>(b));
  for (std::int64_t r = 0; r < rows; ++r) {
    positions.push_back(static_cast<std::int32_t>(r));
    context.writes.push_back({r, r});
    all.push_back(r);
  }
  context.segments.push_back({.row_begin = 0,
                              .num_rows = rows,
                              .position_begin = 0,
                              .blocks = block_ids.data(),
                              .num_blocks = blocks});
  const c10::InferenceMode no_gradients;
  const at::Tensor z = model.logits(model.forward(ids, positions, context), all);
  const at::Tensor log_probs = at::log_softmax(z.cpu().to(at::kDouble), 1);
  std::vector<float> out;
  for (std::int64_t r = 0; r + 1 < rows; ++r)
    out.push_back(log_probs[r][ids[static_cast<std::size_t>(r) + 1]].item<float>());
  return out;
}

// On GPUs, where a rank is a process: two of them.
void expect_agreement_over_gpus(const std::string& path, const Json& expected) {
  on_two_ranks([&](int rank, Store& store) {
    const HfFolder folder = HfFolder::open(path);
    Group group = Group::gloo(store, "tp", rank, 2);
    std::unique_ptr<Link> link;  // else through host memory
    if (ranks_apart())
      link = std::make_unique<Link>(store, "tp", std::vector{0, 1}, rank, LinkUse::in_stream,
                                    kTwoRanksSeconds);
    for (const bool exact : {true, false}) {
      cuda_part().set_exact(exact);
      for (const Json& sequence : expected.at("sequences")) {
        const auto want = sequence.at("logprobs").get<std::vector<double>>();
        const auto got =
            parallel_log_probs(folder, sequence.at("input_ids").get<Ids>(), group, Element::f32,
                               exact ? ShardRule::exact : ShardRule::row_parallel, link.get());
        ASSERT_EQ(got.size(), want.size());
        for (std::size_t i = 0; i < want.size(); ++i)
          ASSERT_NEAR(got[i], want[i], 1e-4) << "exact " << exact << ", token " << i + 1;
      }
    }
    cuda_part().set_exact(false);
    group.barrier();
  });
}

// Engines of two ranks with a key/value head each, and of four that share two;
// exact and row-parallel.
TEST(TensorParallel, AgreesWithTransformers) {
  const std::string path = kGolden + "tiny/llama_parallel";
  const Json expected = read_json_file(path + "/expected.json");
  if (tested_place() != Place::cpu) return expect_agreement_over_gpus(path, expected);
  const HfFolder folder = HfFolder::open(path);
  for (const ShardRule rule : {ShardRule::exact, ShardRule::row_parallel})
    for (const int size : {2, 4})
      for (const Json& sequence : expected.at("sequences")) {
        const auto ids = sequence.at("input_ids").get<Ids>();
        const auto want = sequence.at("logprobs").get<std::vector<double>>();
        std::vector<std::vector<float>> got(static_cast<std::size_t>(size));
        on_rank_threads(size, [&](int r, const Store& store) {
          Group group = Group::gloo(store, "tp", r, size);
          got[r] = parallel_log_probs(folder, ids, group, Element::f32, rule);
        });
        for (const auto& rank : got) {
          ASSERT_EQ(rank.size(), want.size());
          for (std::size_t i = 0; i < want.size(); ++i)
            ASSERT_NEAR(rank[i], want[i], 1e-4) << size << " ranks, token " << i + 1;
        }
      }
}

INSTANTIATE_TEST_SUITE_P(Golden, TinyModel, testing::ValuesIn(tiny_models()),
                         [](const auto& p) { return p.param; });

TEST(SmolLm2, AgreesWithTransformers) {
  const std::string folder = std::string(TANDEM_SOURCE_DIR) + "/models/SmolLM2-135M-Instruct";
  ASSERT_TRUE(fs::exists(folder + "/config.json")) << folder << ": run scripts/setup.sh --all";
  const Json expected = read_json_file(kGolden + "smollm2_expected.json");
  Weights weights(folder, Element::f32, tested_place());
  for (const Json& sequence : expected.at("sequences")) {
    check_sequence(weights, sequence);
    EXPECT_EQ(greedy(weights, sequence.at("input_ids").get<Ids>(), 24),
              sequence.at("greedy").at("tokens").get<Ids>());
  }
}

}  // namespace
}  // namespace tandem
