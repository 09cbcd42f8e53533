// The trainer on a tiny model: sharing, layouts and ranks change no bit (or only the last ones
// where that is promised), denominators are those of Miles, and a bad gradient changes nothing.
#include "trainer/fsdp.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <random>

#include "base/check.h"
#include "checkpoint/checkpoints.h"
#include "checkpoint/weights.h"
#include "unit/rank_threads.h"

namespace tandem {
namespace {

const std::string kFolder = std::string(TANDEM_SOURCE_DIR) + "/tests/golden/tiny/llama_odd";

// `groups` prompts × `n` samples with lengths 1 to 9, random tokens and advantages.
TrainBatch random_batch(std::int64_t groups, std::int64_t n, unsigned seed) {
  std::mt19937 random(seed);
  auto token = [&] { return static_cast<TokenId>(3 + random() % 90); };
  TrainBatch batch;
  for (std::int64_t g = 0; g < groups; ++g) {
    std::vector<TokenId> prompt(5 + random() % 30);
    for (TokenId& t : prompt) t = token();
    for (std::int64_t i = 0; i < n; ++i) {
      Sample s;
      s.id = static_cast<std::uint64_t>(g * n + i);
      s.prompt_id = static_cast<std::uint64_t>(g);
      s.tokens = prompt;
      s.response_length = 1 + static_cast<std::int64_t>(random() % 9);
      for (std::int64_t t = 0; t < s.response_length; ++t) {
        s.tokens.push_back(token());
        s.log_probs.push_back(-2.0f);
        s.loss_mask.push_back(random() % 5 != 0);
        s.weight_versions.push_back(1);
      }
      s.loss_mask[0] = 1;
      batch.samples.push_back(s);
      batch.advantages.push_back(static_cast<float>(static_cast<int>(random() % 200) - 100) /
                                 50.0f);
    }
  }
  return batch;
}

struct Outcome {
  StepMetrics metrics;
  std::vector<float> weights;  // flat, after the step
  std::vector<std::vector<float>> log_probs;
};

TrainerSetup setup_of(bool share, std::int64_t cap = 4096) {
  TrainerSetup setup;
  setup.train.share_prompt = share;
  setup.train.max_tokens_per_gpu = cap;
  setup.train.num_steps_per_rollout = 1;
  setup.optimizer.lr = 1e-2;
  return setup;
}

Outcome run(const TrainerSetup& setup, const TrainBatch& batch, Group& group,
            Element element = Element::f32, int steps = 2) {
  const HfFolder folder = HfFolder::open(kFolder);
  Arena arena(make_arena_layout(folder.config(), element));
  load_arena(folder, arena);
  FsdpTrainer trainer(setup, {folder, arena}, std::nullopt, group);
  Outcome out;
  out.log_probs = trainer.log_probs(batch);
  for (int s = 0; s < steps; ++s) out.metrics = trainer.train(batch, steps).steps.at(0);
  out.weights.resize(static_cast<std::size_t>(arena.layout().flat_elements));
  arena.read_flat(out.weights.data());
  return out;
}

Outcome run_alone(const TrainerSetup& setup, const TrainBatch& batch,
                  Element element = Element::f32, int steps = 2) {
  Group one = Group::alone("trainer");
  return run(setup, batch, one, element, steps);
}

void expect_same(const Outcome& a, const Outcome& b) {
  EXPECT_EQ(a.log_probs, b.log_probs);
  EXPECT_EQ(a.metrics.means, b.metrics.means);
  EXPECT_EQ(a.metrics.grad_norm, b.metrics.grad_norm);
  EXPECT_EQ(a.metrics.rollout_abs_diff_max, b.metrics.rollout_abs_diff_max);
  ASSERT_EQ(a.weights.size(), b.weights.size());
  EXPECT_EQ(0, std::memcmp(a.weights.data(), b.weights.data(), a.weights.size() * 4));
}

TEST(Fsdp, ASharedPromptChangesNoLogProbabilityAndHardlyAGradient) {
  const auto batch = random_batch(4, 4, 1);
  for (Element e : {Element::f32, Element::bf16}) {
    const Outcome shared = run_alone(setup_of(true), batch, e, 1);
    const Outcome alone = run_alone(setup_of(false), batch, e, 1);
    EXPECT_EQ(shared.log_probs, alone.log_probs);
    EXPECT_LT(shared.metrics.forward_tokens, alone.metrics.forward_tokens);
    if (e == Element::f32) {
      EXPECT_NEAR(shared.metrics.grad_norm, alone.metrics.grad_norm,
                  1e-5 * alone.metrics.grad_norm);
    }
  }
}

TEST(Fsdp, LogProbabilitiesDoNotDependOnTheMicroBatches) {
  const auto batch = random_batch(4, 4, 2);
  const Outcome large = run_alone(setup_of(true), batch, Element::f32, 1);
  const Outcome small = run_alone(setup_of(true, 20), batch, Element::f32, 1);
  EXPECT_GT(small.metrics.micro_batches, large.metrics.micro_batches);
  EXPECT_EQ(large.log_probs, small.log_probs);
  EXPECT_NEAR(large.metrics.mean("train/loss"), small.metrics.mean("train/loss"), 1e-7);
  EXPECT_NEAR(large.metrics.grad_norm, small.metrics.grad_norm, 1e-5 * large.metrics.grad_norm);
}

// Runs `body(group)` on that many ranks over Gloo, as threads.
template <class Body>
void on_ranks(int size, Body&& body) {
  on_rank_threads(size, [&](int r, const Store& store) {
    Group group = size == 1 ? Group::alone("trainer") : Group::gloo(store, "trainer", r, size);
    body(group);
  });
}

// Any number of ranks over Gloo, as threads, those among them that own no whole subtree of the
// leaves, and more of them than prompts: loss, gradient norm and weights after two steps are those
// of one.
TEST(Fsdp, AnyNumberOfRanksEqualsOneBitForBit) {
  for (const std::int64_t prompts : {8, 2}) {
    const auto batch = random_batch(prompts, 3, 3);
    for (Element e : {Element::f32, Element::bf16}) {
      const Outcome one = run_alone(setup_of(true), batch, e);
      for (const int ranks : {2, 3, 5}) {
        std::vector<Outcome> several(static_cast<std::size_t>(ranks));
        on_ranks(ranks, [&](Group& group) {
          several[group.rank()] = run(setup_of(true), batch, group, e);
        });
        for (const Outcome& rank : several) expect_same(one, rank);
      }
    }
  }
}

// --fsdp-reshard-after-forward: ranks that keep a shard of the compute weights, of the actor's and
// the reference's, have the bits of one rank that holds all of both: log-probabilities, loss,
// gradient norm, and the weights after two steps, with a reference that moves between them. Small
// micro-batches, so that ranks have different numbers of them, some with a gradient of 0.
TEST(Fsdp, ShardedWeightsChangeNoBit) {
  auto batch = random_batch(5, 3, 14);
  for (const std::size_t i : {0, 1, 2}) batch.advantages[i] = 0.0f;  // a group of equal rewards
  std::fill(batch.samples[7].loss_mask.begin(), batch.samples[7].loss_mask.end(), std::uint8_t{0});
  for (const Element e : {Element::f32, Element::bf16})
    for (const std::int64_t recompute : {0, 2})
      for (const bool kl : {false, true}) {
        auto setup = setup_of(true, 30);
        setup.train.num_steps_per_rollout = 3;
        setup.algorithm.use_kl_loss = kl;
        setup.algorithm.kl_loss_coef = kl ? 0.1 : 0.0;
        setup.algorithm.ref_update_interval = 1;
        if (recompute) {
          setup.train.recompute_granularity = "full";
          setup.train.recompute_method = "uniform";
          setup.train.recompute_num_layers = recompute;
        }
        const HfFolder folder = HfFolder::open(kFolder);
        const ArenaLayout whole = make_arena_layout(folder.config(), e);
        // Two rollouts on ranks that keep what `part` gives them.
        const auto train = [&](Group& group, const ArenaLayout& part, LayerGather* actor_layers,
                               Arena& actor, LayerGather* reference_layers, Arena& reference) {
          load_arena(folder, actor);
          load_arena(folder, reference);
          std::optional<RoleWeights> role;
          if (kl) role.emplace(RoleWeights{folder, reference, reference_layers});
          FsdpTrainer trainer(setup, {folder, actor, actor_layers}, role, group);
          Outcome out;
          out.metrics = trainer.train(batch, 6).steps.at(2);
          if (kl) trainer.update_reference();
          out.log_probs = trainer.log_probs(batch);
          out.metrics = trainer.train(batch, 6).steps.at(2);
          out.weights.resize(static_cast<std::size_t>(part.flat_elements));
          actor.read_flat(out.weights.data());
          std::vector<float> masters(out.weights.size()), rounded(out.weights.size());
          trainer.gather(masters);  // what the arena must hold once it is rounded
          Arena fresh(part);
          fresh.write_flat(0, part.flat_elements, masters.data());
          fresh.read_flat(rounded.data());
          EXPECT_EQ(rounded, out.weights);
          return out;
        };
        Group alone = Group::alone("trainer");
        Arena actor(whole), reference(whole);
        const Outcome one = train(alone, whole, nullptr, actor, nullptr, reference);
        for (const int ranks : {2, 3}) {
          std::vector<Outcome> several(static_cast<std::size_t>(ranks));
          on_rank_threads(ranks, [&](int r, const Store& store) {
            Group group = Group::gloo(store, "trainer", r, ranks);
            Group first = Group::gloo(store, "actor", r, ranks);
            Group second = Group::gloo(store, "reference", r, ranks);
            const ArenaLayout part = make_shard_layout(whole, shard_ranges(whole, ranks)[r]);
            Arena mine(part), its(part);
            LayerGather actor_layers(whole, mine, first, 1);  // one slot: each layer anew
            LayerGather reference_layers(whole, its, second);
            several[r] = train(group, part, &actor_layers, mine, &reference_layers, its);
          });
          Outcome together = several[0];
          together.weights.clear();
          for (const Outcome& rank : several) {
            EXPECT_EQ(rank.log_probs, one.log_probs);
            EXPECT_EQ(rank.metrics.means, one.metrics.means);
            EXPECT_EQ(rank.metrics.grad_norm, one.metrics.grad_norm);
            together.weights.insert(together.weights.end(), rank.weights.begin(),
                                    rank.weights.end());
          }
          expect_same(one, together);
        }
      }
}

// The gap to the engine is told for samples of the trainer's own weights; that of older ones by how
// much older their oldest token is.
// Long rope turns by the factors that suit the run's longest sequence: the reference's too.
TEST(Fsdp, AReferenceOfTheSameWeightsHasNoKlUnderLongRope) {
  const HfFolder folder =
      HfFolder::open(std::string(TANDEM_SOURCE_DIR) + "/tests/golden/tiny/phi3_longrope");
  auto batch = random_batch(2, 2, 1);
  for (Sample& s : batch.samples)
    for (TokenId& id : s.tokens) id %= 70;  // of its vocabulary
  for (const std::int64_t longest : {60, 500}) {  // the original limit is 64
    auto setup = setup_of(true);
    setup.longest_sequence = longest;
    setup.algorithm.use_kl_loss = true;
    setup.algorithm.kl_loss_coef = 0.1;
    Arena actor(make_arena_layout(folder.config(), Element::f32));
    Arena reference(make_arena_layout(folder.config(), Element::f32));
    load_arena(folder, actor);
    load_arena(folder, reference);
    Group one = Group::alone("trainer");
    FsdpTrainer trainer(setup, {folder, actor}, RoleWeights{folder, reference}, one);
    EXPECT_EQ(trainer.train(batch, 1).steps.at(0).means.at("train/kl_loss"), 0.0) << longest;
  }
}

TEST(Fsdp, TheGapIsToldByTheAgeOfTheSamples) {
  auto batch = random_batch(3, 2, 5);
  batch.trainer_version = 4;
  const std::int64_t lags[] = {0, 0, 1, 2, 2, 2};
  for (std::size_t i = 0; i < batch.samples.size(); ++i) {
    auto& versions = batch.samples[i].weight_versions;
    std::fill(versions.begin(), versions.end(), 4);
    versions.front() -= lags[i];  // one old token makes an old sample
  }
  const Outcome aged = run_alone(setup_of(true), batch, Element::f32, 1);
  std::map<std::int64_t, std::vector<double>> gaps;  // each sample's mean, by lag
  double most = 0;
  for (std::size_t i = 0; i < batch.samples.size(); ++i) {
    const Sample& s = batch.samples[i];
    double sum = 0;
    for (std::size_t t = 0; t < s.loss_mask.size(); ++t) {
      if (!s.loss_mask[t]) continue;
      const double gap = std::abs(double{aged.log_probs[i][t]} - double{s.log_probs[t]});
      sum += gap;
      if (lags[i] == 0) most = std::max(most, gap);
    }
    gaps[lags[i]].push_back(sum / static_cast<double>(s.loss_tokens()));
    if (lags[i] != 0) gaps[-1].push_back(gaps[lags[i]].back());
  }
  const auto mean = [&](std::int64_t lag) {
    double sum = 0;
    for (const double gap : gaps[lag]) sum += gap;
    return sum / static_cast<double>(gaps[lag].size());
  };
  const StepMetrics& m = aged.metrics;
  EXPECT_EQ(m.on_policy_samples, 2);
  EXPECT_DOUBLE_EQ(m.rollout_abs_diff_max, most);
  EXPECT_NEAR(m.mean("train/train_rollout_logprob_abs_diff"), mean(0), 1e-12);
  EXPECT_NEAR(m.mean("train/off_policy_logprob_abs_diff"), mean(-1), 1e-12);
  EXPECT_NEAR(m.mean("train/off_policy_logprob_abs_diff/lag_1"), mean(1), 1e-12);
  EXPECT_NEAR(m.mean("train/off_policy_logprob_abs_diff/lag_2"), mean(2), 1e-12);
  // Without a version all count.
  batch.trainer_version = 0;
  const Outcome all = run_alone(setup_of(true), batch, Element::f32, 1);
  EXPECT_EQ(all.metrics.on_policy_samples, 6);
  EXPECT_EQ(all.metrics.means.count("train/off_policy_logprob_abs_diff"), 0u);
}

// Two steps, a checkpoint, two more on another number of ranks: the bits of the unbroken run.
TEST(Fsdp, ACheckpointGoesOnOnAnyNumberOfRanks) {
  const auto batch = random_batch(8, 3, 11);
  const Outcome unbroken = run_alone(setup_of(true), batch, Element::bf16, 4);
  std::string root = ::testing::TempDir() + "ranks-XXXXXX";
  ASSERT_NE(::mkdtemp(root.data()), nullptr);
  const HfFolder folder = HfFolder::open(kFolder);
  for (const int writers : {1, 3}) {
    on_ranks(writers, [&](Group& group) {
      Arena arena(make_arena_layout(folder.config(), Element::bf16));
      load_arena(folder, arena);
      FsdpTrainer trainer(setup_of(true), {folder, arena}, std::nullopt, group);
      for (int s = 0; s < 2; ++s) trainer.train(batch, 4);
      std::optional<CheckpointWriter> writer;
      if (group.rank() == 0) writer.emplace(root, writers);
      group.barrier();
      const ShardFile mine = trainer.save(checkpoint_folder(root, writers) + ".part", {});
      std::vector<ShardFile> files;
      for (const std::string& text : group.all_gather_text(dump_json(to_json(mine))))
        files.push_back(shard_file_from_json(parse_json(text, "file"), "file"));
      if (writer)
        writer->commit({.rollout_id = writers,
                        .optimizer_steps = trainer.optimizer_steps(),
                        .files = files,
                        .run = Json::object()});
    });
    const std::string saved = checkpoint_folder(root, writers);
    EXPECT_TRUE(checkpoint_faults(saved, Look::at_all_bytes).empty());
    for (const int readers : {1, 2, 4, 8})
      on_ranks(readers, [&](Group& group) {
        Arena arena(make_arena_layout(folder.config(), Element::bf16));
        load_arena(folder, arena);
        FsdpTrainer trainer(setup_of(true), {folder, arena}, std::nullopt, group);
        trainer.load(saved, {});
        trainer.publish();
        EXPECT_EQ(trainer.optimizer_steps(), 2);
        Outcome out;
        for (int s = 0; s < 2; ++s) out.metrics = trainer.train(batch, 4).steps.at(0);
        out.weights.resize(unbroken.weights.size());
        arena.read_flat(out.weights.data());
        EXPECT_EQ(out.metrics.grad_norm, unbroken.metrics.grad_norm);
        EXPECT_EQ(0,
                  std::memcmp(out.weights.data(), unbroken.weights.data(), out.weights.size() * 4))
            << writers << " -> " << readers;
      });
  }
  std::filesystem::remove_all(root);
}

TEST(Fsdp, TheOrderOfArrivalChangesNothing) {
  const auto batch = random_batch(4, 4, 4);
  TrainBatch turned;
  for (std::size_t i = batch.samples.size(); i-- > 0;) {
    turned.samples.push_back(batch.samples[i]);
    turned.advantages.push_back(batch.advantages[i]);
  }
  const Outcome a = run_alone(setup_of(true), batch), b = run_alone(setup_of(true), turned);
  EXPECT_EQ(a.metrics.grad_norm, b.metrics.grad_norm);
  EXPECT_EQ(a.weights, b.weights);
}

// At ratio 1 a token's loss is -A. Mean per sample, then over samples; or over tokens.
TEST(Fsdp, LossDenominatorsAreThoseOfTheGlobalBatch) {
  TrainBatch batch = random_batch(2, 2, 5);
  double samples = 0, tokens = 0, count = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    double n = 0;
    for (auto m : batch.samples[i].loss_mask) n += m;
    samples -= batch.advantages[i] / 4;
    tokens -= batch.advantages[i] * n;
    count += n;
  }
  auto setup = setup_of(true);
  EXPECT_NEAR(run_alone(setup, batch, Element::f32, 1).metrics.mean("train/loss"), samples, 1e-6);
  setup.train.calculate_per_token_loss = true;
  EXPECT_NEAR(run_alone(setup, batch, Element::f32, 1).metrics.mean("train/loss"), tokens / count,
              1e-6);
  // A sample without loss tokens counts in the mean over samples and adds no token.
  auto& mask = batch.samples[3].loss_mask;
  double masked = 0;
  for (auto m : mask) masked += m;
  std::fill(mask.begin(), mask.end(), std::uint8_t{0});
  EXPECT_NEAR(run_alone(setup, batch, Element::f32, 1).metrics.mean("train/loss"),
              (tokens + batch.advantages[3] * masked) / (count - masked), 1e-6);
  for (Sample& s : batch.samples)
    std::fill(s.loss_mask.begin(), s.loss_mask.end(), std::uint8_t{0});
  const Outcome none = run_alone(setup, batch, Element::f32, 1);
  EXPECT_EQ(none.metrics.mean("train/loss"), 0.0);
  EXPECT_EQ(none.metrics.grad_norm, 0.0);
}

TEST(Fsdp, AGradientThatIsNotFiniteChangesNoState) {
  const auto good = random_batch(2, 2, 6);
  auto bad = good;
  bad.advantages[1] = NAN;
  Group one = Group::alone("trainer");
  const HfFolder folder = HfFolder::open(kFolder);
  Arena arena(make_arena_layout(folder.config(), Element::f32));
  load_arena(folder, arena);
  FsdpTrainer trainer(setup_of(true), {folder, arena}, std::nullopt, one);
  trainer.train(good, 9);
  std::vector<float> before(static_cast<std::size_t>(arena.layout().flat_elements)), after = before;
  arena.read_flat(before.data());
  const auto version = arena.version();
  const StepMetrics m = trainer.train(bad, 9).steps.at(0);
  arena.read_flat(after.data());
  EXPECT_TRUE(m.skipped);
  EXPECT_TRUE(std::isnan(m.grad_norm));
  EXPECT_EQ(before, after);
  EXPECT_EQ(arena.version(), version);
  EXPECT_EQ(trainer.optimizer_steps(), 1);
  // The run goes on as if the bad batch had never been.
  const StepMetrics next = trainer.train(good, 9).steps.at(0);
  const Outcome unbroken = run_alone(setup_of(true), good, Element::f32, 2);
  EXPECT_EQ(next.grad_norm, unbroken.metrics.grad_norm);
}

TEST(Fsdp, GroupsOfEqualRewardsAddNothingButTheirMetrics) {
  auto batch = random_batch(4, 2, 9);
  for (std::size_t i : {2, 3}) batch.advantages[i] = 0.0f;
  auto tiny = batch;  // so small that it vanishes, but takes the way through backward
  for (std::size_t i : {2, 3}) tiny.advantages[i] = 1e-30f;
  const Outcome skipped = run_alone(setup_of(true), batch), full = run_alone(setup_of(true), tiny);
  EXPECT_EQ(skipped.metrics.grad_norm, full.metrics.grad_norm);
  EXPECT_EQ(skipped.metrics.mean("train/train_rollout_logprob_abs_diff"),
            full.metrics.mean("train/train_rollout_logprob_abs_diff"));
  EXPECT_EQ(skipped.metrics.forward_tokens, full.metrics.forward_tokens);
  EXPECT_EQ(skipped.weights, full.weights);
}

TEST(Fsdp, SeveralOptimizerStepsUseTheLogProbabilitiesFromBeforeTheFirst) {
  const auto batch = random_batch(4, 2, 7);
  auto setup = setup_of(true);
  setup.train.num_steps_per_rollout = 2;
  Group one = Group::alone("trainer");
  const HfFolder folder = HfFolder::open(kFolder);
  Arena arena(make_arena_layout(folder.config(), Element::f32));
  load_arena(folder, arena);
  FsdpTrainer trainer(setup, {folder, arena}, std::nullopt, one);
  const auto steps = trainer.train(batch, 2).steps;
  ASSERT_EQ(steps.size(), 2u);
  EXPECT_EQ(steps[0].mean("train/ppo_kl"),
            0.0);  // the forward-only pass and the step agree exactly
  EXPECT_EQ(steps[0].mean("train/pg_clipfrac"), 0.0);
  EXPECT_NE(steps[1].mean("train/ppo_kl"), 0.0);
  EXPECT_EQ(steps[0].num_samples, 4);
}

// Recompute by layer: every cut of the layers gives the bits of keeping everything.
TEST(Fsdp, RecomputeChangesNoBit) {
  const auto batch = random_batch(4, 3, 12);
  for (Element e : {Element::f32, Element::bf16}) {
    const Outcome kept = run_alone(setup_of(true), batch, e);
    for (const auto& [method, layers] :
         {std::pair("uniform", 1), {"uniform", 2}, {"uniform", 5}, {"block", 1}, {"block", 9}}) {
      auto setup = setup_of(true);
      setup.train.recompute_granularity = "full";
      setup.train.recompute_method = method;
      setup.train.recompute_num_layers = layers;
      expect_same(kept, run_alone(setup, batch, e));
    }
  }
}

TEST(Recompute, RangesOfLayers) {
  TrainConfig train;
  const auto text = [&](std::int64_t num_layers) {
    std::string out;
    for (const LayerRange& r : recompute_ranges(train, num_layers))
      out += std::to_string(r.begin) + "-" + std::to_string(r.end) + " ";
    return out;
  };
  EXPECT_EQ(text(5), "");
  train.recompute_granularity = "selective";
  EXPECT_EQ(text(5), "");
  train.recompute_granularity = "full";
  train.recompute_method = "uniform";
  train.recompute_num_layers = 2;
  EXPECT_EQ(text(5), "0-2 2-4 4-5 ");
  train.recompute_method = "block";
  EXPECT_EQ(text(5), "0-1 1-2 ");
  train.recompute_num_layers = 9;
  EXPECT_EQ(text(2), "0-1 1-2 ");
}

TEST(GradientTree, AddsLeavesInABinaryTree) {
  GradientTree tree(1, Place::cpu);
  // 2^24 + 1 is not a float: the order of additions shows.
  const std::vector<float> leaves{16777216.0f, 1.0f, 1.0f, 1.0f, 5.0f};
  const auto sums = [&](std::int64_t first, std::int64_t last) {
    tree.begin_batch(first);
    for (std::int64_t i = first; i < last; ++i) {
      *tree.begin_leaf() = leaves[i];
      tree.end_leaf();
    }
    std::vector<std::pair<TreeNode, float>> out;
    for (const GradientTree::Sum& sum : tree.sums()) out.emplace_back(sum.node, *sum.values);
    return out;
  };
  using Sums = std::vector<std::pair<TreeNode, float>>;
  EXPECT_EQ(sums(0, 4), (Sums{{{2, 0}, (16777216.0f + 1.0f) + (1.0f + 1.0f)}}));
  EXPECT_EQ(sums(0, 4).front().second, 16777218.0f);
  // A part of the tree: what lies whole in it is added, the rest is left to those who have more.
  EXPECT_EQ(sums(1, 5), (Sums{{{0, 1}, 1.0f}, {{1, 1}, 2.0f}, {{0, 4}, 5.0f}}));
}

TEST(PackedBatch, LaysOutSharedPromptsOnce) {
  const auto batch = random_batch(1, 3, 8);
  std::vector<const Sample*> samples;
  std::int64_t rows = batch.samples[0].prompt_length();
  for (const Sample& s : batch.samples) {
    samples.push_back(&s);
    rows += s.response_length - 1;
  }
  const PackedBatch packed(samples, true);
  EXPECT_EQ(packed.num_rows(), rows);
  std::int64_t tokens = 0;
  for (const Sample& s : batch.samples)
    tokens += std::count(s.loss_mask.begin(), s.loss_mask.end(), std::uint8_t{1});
  EXPECT_EQ(static_cast<std::int64_t>(packed.loss.size()), tokens);
  // Each key row of a segment holds the token at that position of the sequence.
  for (const Segment& seg : packed.context.segments)
    for (std::int64_t p = 0; p < seg.position_begin + seg.num_rows; ++p)
      EXPECT_EQ(packed.positions[seg.key_rows[p]], p);
}

}  // namespace
}  // namespace tandem
