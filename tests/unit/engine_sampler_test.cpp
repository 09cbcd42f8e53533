// Draws among changed and truncated distributions: which tokens are kept, against a sort of the
// whole vocabulary; how often each is drawn; and that a draw depends on its key alone.
#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <utility>

#include "ops/kernels/kernels.h"

namespace tandem {
namespace {

// Probabilities of the kept tokens by the definition in sampler.h, in double, with a full sort.
std::map<TokenId, double> kept_by_sort(const std::vector<float>& logits, const PlanDraw& draw) {
  std::vector<double> p;
  const double top = *std::max_element(logits.begin(), logits.end());
  for (const float z : logits) p.push_back(std::exp((z - top) / draw.temperature));
  const double sum = std::accumulate(p.begin(), p.end(), 0.0);
  std::vector<TokenId> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](TokenId a, TokenId b) { return p[a] > p[b]; });
  std::map<TokenId, double> kept;
  double before = 0, mass = 0;
  for (std::size_t rank = 0; rank < order.size(); ++rank) {
    const TokenId id = order[rank];
    if (draw.top_k > 0 && static_cast<std::int64_t>(rank) >= draw.top_k) break;
    if (rank > 0 && before >= draw.top_p * sum) break;
    if (p[id] < draw.min_p * p[order[0]] || p[id] == 0) break;
    kept[id] = p[id];
    mass += p[id];
    before += p[id];
  }
  for (auto& [id, share] : kept) share /= mass;
  return kept;
}

std::vector<float> random_logits(std::size_t vocab, float spread, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, spread);
  std::vector<float> logits(vocab);
  for (float& z : logits) z = normal(random);
  return logits;
}

struct Truncation {
  const char* name;
  double temperature, top_p;
  std::int64_t top_k;
  double min_p;
};

const std::vector<Truncation> kTruncations = {{"top_k", 1, 1, 5, 0},
                                              {"top_k 1", 1, 1, 1, 0},
                                              {"top_p", 1, 0.9, -1, 0},
                                              {"small top_p", 1, 1e-9, -1, 0},
                                              {"min_p", 1, 1, -1, 0.1},
                                              {"min_p 1", 1, 1, -1, 1},
                                              {"all three", 0.7, 0.95, 40, 0.02},
                                              {"hot", 3, 0.99, -1, 0},
                                              {"cold", 0.2, 0.5, 300, 0},
                                              {"nearly all", 1, 0.999999, -1, 0},
                                              {"top_k of nearly all", 1, 1, 998, 0}};

TEST(Sampler, KeepsWhatTheDefinitionKeeps) {
  for (const float spread : {0.01f, 1.0f, 6.0f, 40.0f}) {
    const auto logits = random_logits(1000, spread, 3);
    for (const Truncation& t : kTruncations) {
      PlanDraw draw = {.temperature = t.temperature,
                       .top_p = t.top_p,
                       .top_k = t.top_k,
                       .min_p = t.min_p,
                       .seed = 5};
      const auto wanted = kept_by_sort(logits, draw);
      std::map<TokenId, double> seen;
      Sampler sampler;
      const int draws = 4000;
      for (int i = 0; i < draws; ++i) {
        draw.sample_id = static_cast<std::uint64_t>(i);
        ++seen[sampler.draw(logits, draw, {})];
      }
      for (auto& [id, count] : seen) {
        const auto kept = wanted.find(id);
        ASSERT_NE(kept, wanted.end()) << t.name << ", spread " << spread << ": drew " << id;
        const double p = kept->second;
        // Five standard deviations of a binomial count, and one draw for rare tokens.
        EXPECT_NEAR(count / draws, p, 5 * std::sqrt(p * (1 - p) / draws) + 1.5 / draws)
            << t.name << ", spread " << spread << ", token " << id;
      }
      for (const auto& [id, p] : wanted) {
        if (p * draws > 30) {
          EXPECT_TRUE(seen.contains(id)) << t.name << " never drew " << id;
        }
      }
    }
  }
}

TEST(Sampler, EqualLogitsStandInOrderOfIds) {
  const std::vector<float> logits(64, 1.5f);
  Sampler sampler;
  std::set<TokenId> seen;
  PlanDraw draw = {.top_k = 3};
  for (draw.position = 0; draw.position < 200; ++draw.position) {
    seen.insert(sampler.draw(logits, draw, {}));
  }
  EXPECT_EQ(seen, (std::set<TokenId>{0, 1, 2}));
}

TEST(Sampler, ADrawDependsOnItsKeyAlone) {
  const auto logits = random_logits(500, 2, 1), other = random_logits(700, 9, 2);
  const PlanDraw draw = {.top_p = 0.9, .seed = 7, .sample_id = 3, .position = 11};
  Sampler fresh, used;
  for (std::uint64_t i = 0; i < 20; ++i) used.draw(other, {.top_k = 20, .sample_id = i}, {});
  EXPECT_EQ(fresh.draw(logits, draw, {}), used.draw(logits, draw, {}));
  std::set<TokenId> tokens;
  for (int which = 0; which < 4; ++which) {
    for (std::uint64_t i = 0; i < 30; ++i) {
      PlanDraw d = {.top_p = 0.999, .seed = 7};
      (which == 0 ? d.seed : which == 1 ? d.sample_id : d.position) = i;
      d.evaluation = which == 3;
      tokens.insert(fresh.draw(logits, d, {}));
    }
  }
  EXPECT_GT(tokens.size(), 40u) << "each part of the key matters";
}

// Worked by hand: z - subtract, then the factor by sign, then the bias.
TEST(Sampler, ChangesLogitsInOrder) {
  std::vector<float> logits = {2, -1, 0.5f, 4, 4};
  const std::vector<LogitChange> changes = {
      {.id = 0, .subtract = 0.5f, .scale = 1.5f},                 // 1.5 / 1.5
      {.id = 1, .subtract = 0.5f, .scale = 2},                    // -1.5 · 2
      {.id = 2, .subtract = 1.5f, .scale = 2, .add = 3},          // -1 · 2 + 3
      {.id = 3, .add = -std::numeric_limits<float>::infinity()},  // forbidden
      {.id = 4, .add = 1},
      {.id = 4, .add = 2}};
  apply_changes(changes, logits);
  EXPECT_EQ(logits, (std::vector<float>{1, -3, 1, -std::numeric_limits<float>::infinity(), 7}));
}

TEST(Sampler, GreedyAndPlainDrawsFollowTheChanges) {
  std::vector<float> logits = random_logits(300, 1, 4);
  logits[17] = 9;
  logits[18] = 8.5f;
  Sampler sampler;
  const std::vector<LogitChange> forbid = {
      {.id = 17, .add = -std::numeric_limits<float>::infinity()}};
  EXPECT_EQ(sampler.draw(logits, {.temperature = 0}, {}), 17);
  EXPECT_EQ(sampler.draw(logits, {.temperature = 0}, forbid), 18);
  EXPECT_EQ(sampler.draw(logits, {.temperature = 0, .top_p = 0.1, .top_k = 50}, forbid), 18);
  for (std::uint64_t i = 0; i < 300; ++i) {
    EXPECT_NE(sampler.draw(logits, {.sample_id = i}, forbid), 17);
    EXPECT_NE(sampler.draw(logits, {.top_k = 3, .sample_id = i}, forbid), 17);
  }
  EXPECT_EQ(logits[17], 9) << "the model's logits stay";
}

// C25: logits [2, 0], token 0: the engine's and the trainer's value at each temperature.
TEST(Sampler, TheTemperatureDividesTheLogitsOnBothSides) {
  const float logits[2] = {2, 0};
  const TokenId id = 0;
  for (const auto& [temperature, wanted] :
       {std::pair(0.5, -0.018150f), std::pair(1.0, -0.126928f), std::pair(2.0, -0.313262f)}) {
    float trained = 0, log_sum_exp = 0, entropy = 0;
    kernels().log_softmax_gather(logits, &id, static_cast<float>(temperature), &trained,
                                 &log_sum_exp, &entropy, 1, 2);
    EXPECT_NEAR(trained, wanted, 1e-6f);
    const double p = std::exp(static_cast<double>(wanted));
    EXPECT_NEAR(entropy, -p * std::log(p) - (1 - p) * std::log(1 - p), 1e-5);
    TokenId token = 1;
    float sampled = 0;
    for (SampleRow row{.temperature = temperature}; token != 0; ++row.sample_id) {
      kernels().sample(logits, 2, &row, 1, &token, &sampled);
    }
    EXPECT_EQ(sampled, trained);
  }
}

TEST(Sampler, LogitsThatAreNoNumbersEndInSomeToken) {
  const std::vector<float> logits(100, std::numeric_limits<float>::quiet_NaN());
  Sampler sampler;
  const TokenId token = sampler.draw(logits, {.top_p = 0.5, .top_k = 4}, {});
  EXPECT_GE(token, 0);
  EXPECT_LT(token, 100);
}

}  // namespace
}  // namespace tandem
