// Every term of the loss through the whole trainer: value and gradient norm against the plain
// formula, one sample at a time, on a tiny model; ranks and layouts; what is masked stays out.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <random>

#include "base/check.h"
#include "checkpoint/checkpoints.h"
#include "checkpoint/weights.h"
#include "trainer/fsdp.h"
#include "unit/rank_threads.h"

namespace tandem {
namespace {

const std::string kFolder = std::string(TANDEM_SOURCE_DIR) + "/tests/golden/tiny/llama_odd";

// An actor and a reference whose weights lie a little beside it.
struct Roles {
  HfFolder folder = HfFolder::open(kFolder);
  Arena actor{make_arena_layout(folder.config(), Element::f32)};
  Arena reference{make_arena_layout(folder.config(), Element::f32)};
  explicit Roles(double distance = 0.02) {
    load_arena(folder, actor);
    std::vector<float> flat(static_cast<std::size_t>(actor.layout().flat_elements));
    actor.read_flat(flat.data());
    std::mt19937 random(11);
    std::normal_distribution<float> noise(0, static_cast<float>(distance));
    if (distance > 0)
      for (float& v : flat) v += noise(random);
    reference.write_flat(0, actor.layout().flat_elements, flat.data());
  }
  RoleWeights actor_role() { return {folder, actor}; }
  RoleWeights reference_role() { return {folder, reference}; }
};

TrainerSetup setup_of() {
  TrainerSetup setup;
  setup.train.max_tokens_per_gpu = 60;
  setup.train.num_steps_per_rollout = 1;
  setup.optimizer.lr = 1e-2;
  setup.temperature = 0.7;
  return setup;
}

// Samples with `lengths` loss tokens each (and some others), two to a prompt; the engine's
// log-probabilities are the actor's plus noise.
TrainBatch batch_of(Roles& roles, const std::vector<int>& lengths, double noise_size = 0.3) {
  std::mt19937 random(5);
  std::normal_distribution<float> noise(0, static_cast<float>(noise_size));
  TrainBatch batch;
  std::vector<TokenId> prompt;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (i % 2 == 0) {
      prompt.resize(4 + random() % 20);
      for (TokenId& t : prompt) t = static_cast<TokenId>(3 + random() % 90);
    }
    Sample s;
    s.id = i;
    s.prompt_id = i / 2;
    s.tokens = prompt;
    for (int left = lengths[i]; left > 0;) {
      const bool counts = s.loss_mask.empty() || random() % 4 != 0;
      s.loss_mask.push_back(counts);
      left -= counts;
    }
    s.response_length = static_cast<std::int64_t>(s.loss_mask.size());
    for (std::size_t t = 0; t < s.loss_mask.size(); ++t)
      s.tokens.push_back(static_cast<TokenId>(3 + random() % 90));
    s.log_probs.assign(s.loss_mask.size(), -2.0f);
    s.weight_versions.assign(s.loss_mask.size(), 1);
    batch.samples.push_back(s);
    batch.advantages.push_back(static_cast<float>(i % 3) - 1.2f + 0.1f * static_cast<float>(i));
  }
  Group one = Group::alone("scores");
  FsdpTrainer scorer(setup_of(), roles.actor_role(), std::nullopt, one);
  const TokenValues scores = scorer.log_probs(batch);
  for (std::size_t i = 0; i < batch.samples.size(); ++i)
    for (std::size_t t = 0; t < scores[i].size(); ++t)
      if (batch.samples[i].loss_mask[t])
        batch.samples[i].log_probs[t] = scores[i][t] + noise(random);
  return batch;
}

// ---- the plain formula ----

struct Plain {
  double loss = 0, grad_norm = 0;
};

struct PlainSample {
  std::vector<std::int64_t> kept;  // places of its loss tokens in the response
  at::Tensor now, entropy, old, engine, reference, advantages, weights;
};

at::Tensor pick(const std::vector<float>& values, const std::vector<std::int64_t>& places) {
  std::vector<float> out;
  for (const auto p : places) out.push_back(values[static_cast<std::size_t>(p)]);
  return at::tensor(out);
}

at::Tensor plain_kl(const at::Tensor& d, KlLossType type) {
  if (type == KlLossType::k1) return d;
  if (type == KlLossType::k2) return 0.5 * d * d;
  return (-d).exp() - 1 + d;
}

// Per token: -min(r·A, clip(r)·A), at most c·|A| for A < 0, times the weight, plus the other terms.
at::Tensor plain_policy(const PlainSample& s, const AlgorithmConfig& a) {
  auto difference = s.now - s.old;
  if (a.advantage_estimator == AdvantageEstimator::gspo)
    difference = difference.mean() + at::zeros_like(difference);
  const auto r = difference.exp();
  const double high = a.eps_clip_high.value_or(a.eps_clip);
  auto loss = -at::minimum(r * s.advantages, r.clamp(1 - a.eps_clip, 1 + high) * s.advantages);
  if (a.eps_clip_c)
    loss = at::where(s.advantages < 0, at::minimum(loss, -*a.eps_clip_c * s.advantages), loss);
  if (a.use_opsm && (s.old - s.now).mean().item<double>() > a.opsm_delta)
    loss = at::where(s.advantages < 0, at::zeros_like(loss), loss);
  return loss * s.weights;
}

at::Tensor plain_extra(const PlainSample& s, const AlgorithmConfig& a) {
  auto extra = -a.entropy_coef * s.entropy;
  if (!a.use_kl_loss) return extra;
  auto kl = plain_kl(s.now - s.reference, a.kl_loss_type);
  if (a.use_unbiased_kl) kl = kl * (s.now - s.old).exp();
  return extra + a.kl_loss_coef * kl;
}

PlainSample plain_sample(const Sample& s, const std::vector<float>& actor,
                         const std::vector<float>& reference, const std::vector<float>& advantages,
                         const LogProbs& now, const AlgorithmConfig& a) {
  PlainSample out;
  const auto c = correct_mismatch(actor, s.log_probs, s.loss_mask, a);
  std::vector<std::int64_t> among;  // of the packed batch's loss tokens those that are kept
  std::int64_t place = 0;
  for (std::int64_t t = 0; t < s.response_length; ++t) {
    if (c.mask[t]) {
      out.kept.push_back(t);
      among.push_back(place);
    }
    place += s.loss_mask[t];
  }
  const auto index = at::tensor(among, at::kLong);
  out.now = now.log_probs.index_select(0, index);
  out.entropy = now.entropy.index_select(0, index);
  out.engine = pick(s.log_probs, out.kept);
  out.old = a.use_rollout_logprobs ? out.engine : out.now.detach();
  if (!reference.empty()) out.reference = pick(reference, out.kept);
  out.advantages = pick(advantages, out.kept);
  out.weights = pick(c.weights, out.kept);
  return out;
}

Plain plain_step(Roles& roles, const TrainBatch& batch, const TrainerSetup& setup) {
  const AlgorithmConfig& a = setup.algorithm;
  Group one = Group::alone("plain");
  FsdpTrainer actor_scorer(setup_of(), roles.actor_role(), std::nullopt, one);
  FsdpTrainer reference_scorer(setup_of(), roles.reference_role(), std::nullopt, one);
  const TokenValues actor = actor_scorer.log_probs(batch);
  const TokenValues reference = reference_scorer.log_probs(batch);
  TokenValues kl;
  for (std::size_t i = 0; i < actor.size() && a.kl_coef != 0; ++i) {
    const auto d = at::tensor(actor[i]) - at::tensor(reference[i]);
    const auto k = plain_kl(d, a.kl_loss_type).contiguous();
    kl.emplace_back(k.data_ptr<float>(), k.data_ptr<float>() + k.numel());
  }
  const TokenValues advantages = token_advantages(batch, kl, a).advantages;

  PackedModel model(roles.folder.config(), roles.actor, nullptr, 0);
  FlatBuffer gradient(roles.actor.layout().flat_elements, Place::cpu);
  model.model().set_grads(gradient.data());
  std::vector<std::unique_ptr<PackedBatch>> packed;
  std::vector<PlainSample> samples;
  double tokens = 0;
  for (std::size_t i = 0; i < batch.samples.size(); ++i) {
    const Sample* const alone[] = {&batch.samples[i]};
    packed.push_back(std::make_unique<PackedBatch>(alone, false));
    const LogProbs now = model.log_probs(*packed.back(), setup.temperature, true);
    samples.push_back(
        plain_sample(batch.samples[i], actor[i], reference[i], advantages[i], now, a));
    tokens += static_cast<double>(samples.back().kept.size());
  }
  auto loss = at::zeros({});
  const auto count = static_cast<double>(samples.size());
  for (const PlainSample& s : samples) {
    if (s.kept.empty()) continue;
    const double mean = setup.train.calculate_per_token_loss
                            ? 1 / tokens
                            : 1 / (count * static_cast<double>(s.kept.size()));
    const double policy = setup.train.constant_loss_length
                              ? 1 / (count * static_cast<double>(*setup.train.constant_loss_length))
                              : mean;
    loss = loss + policy * plain_policy(s, a).sum() + mean * plain_extra(s, a).sum();
  }
  loss.backward();
  model.model().finish_grads();
  double squares = 0;
  for (std::int64_t i = 0; i < gradient.size(); ++i)
    squares += static_cast<double>(gradient.data()[i]) * gradient.data()[i];
  return {.loss = loss.item<double>(), .grad_norm = std::sqrt(squares)};
}

// ---- tables ----

using E = AdvantageEstimator;

struct Case {
  const char* name;
  void (*set)(TrainerSetup&);
};

const Case kCases[] = {
    {"default", [](TrainerSetup&) {}},
    {"per token", [](TrainerSetup& s) { s.train.calculate_per_token_loss = true; }},
    {"constant length",
     [](TrainerSetup& s) {
       s.train.constant_loss_length = 8;
       s.algorithm.entropy_coef = 0.1;
     }},
    {"old log-probabilities of the engine",
     [](TrainerSetup& s) { s.algorithm.use_rollout_logprobs = true; }},
    {"dual clip",
     [](TrainerSetup& s) {
       s.algorithm.use_rollout_logprobs = true;
       s.algorithm.eps_clip_c = 1.1;
     }},
    {"gspo",
     [](TrainerSetup& s) {
       s.algorithm.use_rollout_logprobs = true;
       s.algorithm.advantage_estimator = E::gspo;
     }},
    {"entropy", [](TrainerSetup& s) { s.algorithm.entropy_coef = 0.5; }},
    {"kl k1 in the loss",
     [](TrainerSetup& s) {
       s.algorithm.use_kl_loss = true;
       s.algorithm.kl_loss_coef = 0.7;
     }},
    {"kl k2 in the loss",
     [](TrainerSetup& s) {
       s.algorithm.use_kl_loss = true;
       s.algorithm.kl_loss_coef = 0.7;
       s.algorithm.kl_loss_type = KlLossType::k2;
     }},
    {"kl k3 in the loss, unbiased, off policy",
     [](TrainerSetup& s) {
       s.algorithm.use_kl_loss = s.algorithm.use_unbiased_kl = true;
       s.algorithm.use_rollout_logprobs = true;
       s.algorithm.kl_loss_coef = 0.7;
       s.algorithm.kl_loss_type = KlLossType::k3;
     }},
    {"kl low_var and entropy over tokens",
     [](TrainerSetup& s) {
       s.algorithm.use_kl_loss = true;
       s.algorithm.kl_loss_coef = 0.7;
       s.algorithm.kl_loss_type = KlLossType::low_var_kl;
       s.algorithm.entropy_coef = 0.2;
       s.train.calculate_per_token_loss = true;
     }},
    {"kl in the reward, reinforce++",
     [](TrainerSetup& s) {
       s.algorithm.advantage_estimator = E::reinforce_plus_plus;
       s.algorithm.normalize_advantages = true;
       s.algorithm.kl_coef = 0.3;
       s.algorithm.gamma = 0.9;
     }},
    {"kl in the reward, reinforce++ baseline",
     [](TrainerSetup& s) {
       s.algorithm.advantage_estimator = E::reinforce_plus_plus_baseline;
       s.algorithm.normalize_advantages = true;
       s.algorithm.kl_coef = 0.3;
       s.algorithm.kl_loss_type = KlLossType::k3;
     }},
    {"tis",
     [](TrainerSetup& s) {
       s.algorithm.use_tis = true;
       s.algorithm.tis_clip = 1.2;
     }},
    {"tis masks",
     [](TrainerSetup& s) {
       s.algorithm.use_tis = true;
       s.algorithm.tis_mode = TisMode::mask;
       s.algorithm.tis_clip = 1.2;
       s.algorithm.tis_clip_low = 0.8;
     }},
    {"rejection by sequence",
     [](TrainerSetup& s) {
       s.algorithm.use_rs = true;
       s.algorithm.rs_level = RatioLevel::geometric;
       s.algorithm.rs_lower_bound = 0.9;
       s.algorithm.rs_upper_bound = 1.1;
     }},
    {"opsm",
     [](TrainerSetup& s) {
       s.algorithm.use_rollout_logprobs = s.algorithm.use_opsm = true;
       s.algorithm.opsm_delta = 0.01;
     }},
};

StepMetrics one_step(Roles& roles, const TrainBatch& batch, const TrainerSetup& setup) {
  Group one = Group::alone("trainer");
  FsdpTrainer trainer(setup, roles.actor_role(), roles.reference_role(), one);
  return trainer.train(batch, 1).steps.at(0);
}

const std::vector<int> kLengths = {1, 3, 7, 13, 2, 5};

TEST(Algorithm, LossAndGradientAreThoseOfThePlainFormula) {
  double last_loss = NAN;
  for (const Case& c : kCases) {
    Roles roles;
    const TrainBatch batch = batch_of(roles, kLengths);
    TrainerSetup setup = setup_of();
    c.set(setup);
    const Plain wanted = plain_step(roles, batch, setup);
    const StepMetrics found = one_step(roles, batch, setup);
    EXPECT_NEAR(found.mean("train/loss"), wanted.loss, 2e-6 * (1 + std::abs(wanted.loss)))
        << c.name;
    EXPECT_NEAR(found.grad_norm, wanted.grad_norm, 2e-5 * wanted.grad_norm) << c.name;
    EXPECT_NE(found.mean("train/loss"), last_loss) << c.name;
    last_loss = found.mean("train/loss");
  }
}

struct Outcome {
  StepMetrics metrics;
  std::map<std::string, double, std::less<>> rollout_means;
  std::vector<float> weights;
};

Outcome run(const TrainBatch& batch, const TrainerSetup& setup, Group& group) {
  Roles roles;
  FsdpTrainer trainer(setup, roles.actor_role(), roles.reference_role(), group);
  const TrainResult result = trainer.train(batch, 2);
  Outcome out{.metrics = result.steps.back(), .rollout_means = result.rollout_means, .weights = {}};
  out.weights.resize(static_cast<std::size_t>(roles.actor.layout().flat_elements));
  roles.actor.read_flat(out.weights.data());
  return out;
}

// Case C12: 1, 2 and 4 data ranks, 4 sequences with 1, 3, 7 and 13 loss tokens: equal bit for bit,
// with everything on that needs numbers from other ranks.
TEST(Algorithm, RanksChangeNoBit) {
  Roles roles;
  const TrainBatch batch = batch_of(roles, {1, 3, 7, 13});
  for (const bool per_token : {false, true}) {
    TrainerSetup setup = setup_of();
    setup.train.calculate_per_token_loss = per_token;
    AlgorithmConfig& a = setup.algorithm;
    a.advantage_estimator = E::reinforce_plus_plus;
    a.normalize_advantages = true;
    a.kl_coef = 0.1;
    a.use_kl_loss = a.use_rollout_entropy = true;
    a.use_tis = true;
    a.tis_mode = TisMode::mask;
    a.tis_clip_low = 0.7;
    a.tis_clip = 1.4;
    a.entropy_coef = 0.01;
    Group alone = Group::alone("trainer");
    const Outcome one = run(batch, setup, alone);
    if (per_token) {
      EXPECT_LT(one.metrics.loss_tokens, 24);  // some were rejected
    }
    for (const int ranks : {2, 4}) {
      std::vector<Outcome> each(static_cast<std::size_t>(ranks));
      on_rank_threads(ranks, [&](int r, const Store& store) {
        Group group = Group::gloo(store, "trainer", r, ranks);
        each[static_cast<std::size_t>(r)] = run(batch, setup, group);
      });
      for (const Outcome& other : each) {
        EXPECT_EQ(other.metrics.means, one.metrics.means) << ranks;
        EXPECT_EQ(other.rollout_means, one.rollout_means) << ranks;
        EXPECT_EQ(other.metrics.grad_norm, one.metrics.grad_norm) << ranks;
        EXPECT_EQ(other.weights, one.weights) << ranks;
      }
    }
  }
}

// Case C12 also: 24 loss tokens whatever the layout, shown by the loss itself. At ratio 1 a token's
// loss is -A.
TEST(Algorithm, TokenMeanDividesByAllTokens) {
  Roles roles;
  TrainBatch batch = batch_of(roles, {1, 3, 7, 13});
  batch.advantages = {1, 2, 3, 4};
  TrainerSetup setup = setup_of();
  setup.train.calculate_per_token_loss = true;
  const StepMetrics m = one_step(roles, batch, setup);
  EXPECT_EQ(m.loss_tokens, 24);
  EXPECT_NEAR(m.mean("train/loss"), -(1 + 2 * 3 + 3 * 7 + 4 * 13) / 24.0, 1e-6);
}

// Case C16: what stands at a masked position reaches nothing.
TEST(Algorithm, MaskedPositionsReachNoGradient) {
  Roles roles;
  const TrainBatch clean = batch_of(roles, kLengths);
  TrainerSetup setup = setup_of();
  setup.algorithm.use_rs = setup.algorithm.use_kl_loss = true;
  setup.algorithm.use_tis = true;
  setup.algorithm.kl_loss_coef = 0.1;
  setup.algorithm.rs_lower_bound = 0.5;
  setup.algorithm.rs_upper_bound = 2.0;
  Group one = Group::alone("trainer");
  const Outcome wanted = run(clean, setup, one);
  for (const float bad : {-100.0f, -INFINITY, NAN}) {
    TrainBatch batch = clean;
    int spoiled = 0;
    for (Sample& s : batch.samples)
      for (std::size_t t = 0; t < s.loss_mask.size(); ++t)
        if (!s.loss_mask[t]) {
          s.log_probs[t] = bad;
          ++spoiled;
        }
    ASSERT_GT(spoiled, 3);
    const Outcome found = run(batch, setup, one);
    EXPECT_EQ(found.metrics.means, wanted.metrics.means) << bad;
    EXPECT_EQ(found.metrics.grad_norm, wanted.metrics.grad_norm) << bad;
    EXPECT_EQ(found.weights, wanted.weights) << bad;
  }
}

// ---- the reference ----

TEST(Reference, StandsStillUntilItIsUpdated) {
  Roles roles(0.0);
  const TrainBatch batch = batch_of(roles, kLengths);
  TrainerSetup setup = setup_of();
  setup.algorithm.use_kl_loss = true;  // measured, not in the loss
  setup.algorithm.kl_loss_type = KlLossType::k3;
  setup.algorithm.ref_update_interval = 2;
  Group one = Group::alone("trainer");
  FsdpTrainer trainer(setup, roles.actor_role(), roles.reference_role(), one);
  const TrainResult first = trainer.train(batch, 9);
  EXPECT_EQ(first.steps[0].mean("train/kl_loss"), 0.0);  // equal weights, equal bits
  EXPECT_EQ(first.rollout_means.at("rollout/ref_log_probs"),
            first.steps[0].mean("rollout/log_probs"));
  const TrainResult second = trainer.train(batch, 9);
  EXPECT_GT(second.steps[0].mean("train/kl_loss"), 0.0);
  EXPECT_EQ(second.rollout_means.at("rollout/ref_log_probs"),
            first.rollout_means.at("rollout/ref_log_probs"));
  trainer.update_reference();
  const TrainResult third = trainer.train(batch, 9);
  EXPECT_EQ(third.steps[0].mean("train/kl_loss"), 0.0);
  EXPECT_NE(third.rollout_means.at("rollout/ref_log_probs"),
            first.rollout_means.at("rollout/ref_log_probs"));
  // It reads only: the actor went the same way as without it.
  Roles alone_roles(0.0);
  TrainerSetup plain = setup_of();
  FsdpTrainer alone(plain, alone_roles.actor_role(), std::nullopt, one);
  for (int s = 0; s < 3; ++s) {
    const auto m = alone.train(batch, 9).steps[0];
    if (s == 2) {
      EXPECT_EQ(m.grad_norm, third.steps[0].grad_norm);
    }
  }
}

// A reference that has moved is part of a checkpoint: a trainer that goes on from it computes the
// same KL, on as many ranks as it likes.
TEST(Reference, GoesOnFromACheckpoint) {
  const std::string root =
      std::filesystem::temp_directory_path() / ("tandem-reference-" + std::to_string(::getpid()));
  TrainerSetup setup = setup_of();
  setup.algorithm.use_kl_loss = true;
  setup.algorithm.kl_loss_coef = 0.1;
  setup.algorithm.kl_loss_type = KlLossType::k3;
  setup.algorithm.ref_update_interval = 1;
  Group one = Group::alone("trainer");
  Roles roles(0.0);
  const TrainBatch batch = batch_of(roles, kLengths);
  FsdpTrainer trainer(setup, roles.actor_role(), roles.reference_role(), one);
  trainer.train(batch, 9);
  trainer.update_reference();
  trainer.train(batch, 9);
  {
    CheckpointWriter writer(root, 1);
    const ShardFile part = trainer.save(writer.folder(), {});
    writer.commit({.rollout_id = 1, .optimizer_steps = 2, .files = {part}});
  }
  const TrainResult unbroken = trainer.train(batch, 9);

  Roles fresh(0.0);
  FsdpTrainer again(setup, fresh.actor_role(), fresh.reference_role(), one);
  again.load(checkpoint_folder(root, 1), {});
  again.publish();
  const TrainResult resumed = again.train(batch, 9);
  EXPECT_EQ(resumed.steps[0].means, unbroken.steps[0].means);
  EXPECT_EQ(resumed.steps[0].grad_norm, unbroken.steps[0].grad_norm);
  EXPECT_EQ(resumed.rollout_means, unbroken.rollout_means);
  EXPECT_GT(resumed.steps[0].mean("train/kl_loss"), 0.0);
  std::filesystem::remove_all(root);
}

// Case C25 for the reference: its log-probabilities are at the temperature of the rollout.
TEST(Reference, UsesTheTemperature) {
  Roles roles;
  const TrainBatch batch = batch_of(roles, {4});
  for (const double temperature : {0.5, 1.0, 2.0}) {
    TrainerSetup setup = setup_of();
    setup.temperature = temperature;
    setup.algorithm.use_kl_loss = true;
    Group one = Group::alone("trainer");
    FsdpTrainer trainer(setup, roles.actor_role(), roles.reference_role(), one);
    const double found = trainer.train(batch, 1).rollout_means.at("rollout/ref_log_probs");
    at::NoGradGuard no_grad;
    PackedModel model(roles.folder.config(), roles.reference, nullptr, 0);
    const Sample& s = batch.samples[0];
    const Sample* const alone[] = {&s};
    PackedBatch packed(alone, true);
    model.log_probs(packed, 1.0, false);  // sets the pool
    const auto hidden = model.model().forward(packed.tokens, packed.positions, packed.context);
    double wanted = 0;
    for (const LossToken& t : packed.loss) {
      const std::int64_t row[] = {t.row};
      const auto z = model.model().logits(hidden, row)[0].to(at::kDouble) / temperature;
      wanted += at::log_softmax(z, 0)[t.id].item<double>() / 4;
    }
    EXPECT_NEAR(found, wanted, 1e-5) << temperature;
  }
}

TEST(Reference, MustShareTheVocabulary) {
  Roles roles;
  const HfFolder other =
      HfFolder::open(std::string(TANDEM_SOURCE_DIR) + "/tests/golden/tiny/qwen2");
  Arena arena(make_arena_layout(other.config(), Element::f32));
  TrainerSetup setup = setup_of();
  setup.algorithm.use_kl_loss = true;
  Group one = Group::alone("trainer");
  EXPECT_THROW(FsdpTrainer(setup, roles.actor_role(), RoleWeights{other, arena}, one), Error);
  FsdpTrainer without(setup_of(), roles.actor_role(), std::nullopt, one);
  EXPECT_THROW(without.update_reference(), Error);
}

}  // namespace
}  // namespace tandem
