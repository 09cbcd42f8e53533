// Leaves and micro-batches as tables, and the properties that every plan must have.
#include "data/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "base/check.h"

namespace tandem {
namespace {

// Groups of the given sizes, every sample with the same lengths.
std::vector<PackItem> groups(const std::vector<int>& sizes, std::int64_t prompt = 10,
                             std::int64_t response = 5) {
  std::vector<PackItem> items;
  for (std::size_t g = 0; g < sizes.size(); ++g) {
    for (int i = 0; i < sizes[g]; ++i) items.push_back({items.size(), g, prompt, response});
  }
  return items;
}

std::vector<std::int64_t> leaf_sizes(const std::vector<Leaf>& leaves) {
  std::vector<std::int64_t> sizes;
  for (const Leaf& leaf : leaves) sizes.push_back(leaf.num_samples);
  return sizes;
}

TEST(Packing, LeafSizes) {
  struct Case {
    std::vector<int> group_sizes;
    std::int64_t num_leaves;
    std::vector<std::int64_t> wanted;
  };
  for (const Case& c : std::vector<Case>{
           {std::vector<int>(8, 8), 8, std::vector<std::int64_t>(8, 8)},
           {std::vector<int>(10, 4), 8, {4, 4, 4, 8, 4, 4, 4, 8}},
           {std::vector<int>(16, 2), 4, {8, 8, 8, 8}},
           {{8, 8, 8, 8}, 8, {4, 4, 4, 4, 4, 4, 4, 4}},  // fewer groups than leaves: cut in groups
           {{64}, 8, {8, 8, 8, 8, 8, 8, 8, 8}},
           {{3}, 4, {0, 1, 1, 1}},  // fewer samples than leaves
           {{}, 4, {0, 0, 0, 0}},
           {{1, 7, 1, 7}, 2, {8, 8}},        // nearest border to the middle
           {{6, 1, 1}, 2, {6, 2}},           // whole groups before evenness
           {{1, 1, 1, 5}, 4, {1, 1, 1, 5}},  // each half keeps its leaves' worth of groups
           {{5, 1, 1, 1}, 4, {5, 1, 1, 1}},
           {{4, 4}, 1, {8}}}) {
    PackOptions options;
    options.num_leaves = c.num_leaves;
    EXPECT_EQ(leaf_sizes(plan_leaves(groups(c.group_sizes), options)), c.wanted)
        << testing::PrintToString(c.group_sizes);
  }
}

TEST(Packing, MicroBatches) {
  struct Case {
    bool share;
    std::int64_t cap;
    std::vector<std::int64_t> wanted_tokens;  // of each micro-batch
  };
  // Two groups of three samples, prompt 10, response 5.
  for (const Case& c :
       std::vector<Case>{{false, 30, {30, 30, 30}},
                         {false, 1000, {90}},
                         {false, 15, {15, 15, 15, 15, 15, 15}},
                         {false, 14, {15, 15, 15, 15, 15, 15}},  // longer than the cap
                         {true, 1000, {50}},
                         {true, 25, {25, 25}},
                         {true, 39, {25, 25}},  // the next one needs its prompt: 40
                         {true, 40, {40, 20}},
                         {true, 20, {20, 15, 20, 15}},
                         {true, 1, {15, 15, 15, 15, 15, 15}}}) {
    PackOptions options;
    options.num_leaves = 1;
    options.share_prompt = c.share;
    options.max_tokens_per_gpu = c.cap;
    const auto leaves = plan_leaves(groups({3, 3}), options);
    std::vector<std::int64_t> tokens;
    for (const MicroBatch& batch : leaves[0].micro_batches) tokens.push_back(batch.num_tokens);
    EXPECT_EQ(tokens, c.wanted_tokens) << c.share << " " << c.cap;
  }
}

TEST(Packing, ALongSampleStandsAloneAndKeepsItsPlace) {
  auto items = groups({4}, 0, 5);
  items[1].response_tokens = 100;
  PackOptions options;
  options.num_leaves = 1;
  options.max_tokens_per_gpu = 10;
  const auto leaves = plan_leaves(items, options);
  ASSERT_EQ(leaves[0].micro_batches.size(), 3u);
  EXPECT_EQ(leaves[0].micro_batches[1].samples, std::vector<std::int64_t>{1});
  EXPECT_EQ(leaves[0].micro_batches[2].samples, (std::vector<std::int64_t>{2, 3}));
}

// Random batches: nothing lost or doubled, id order, the cap holds, arrival order does not matter.
TEST(Packing, Properties) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    std::vector<PackItem> items;
    for (std::uint64_t g = 0, n = random() % 20; g < n; ++g) {
      const std::int64_t prompt = random() % 30;
      for (std::uint64_t i = 0, size = 1 + random() % 9; i < size; ++i) {
        items.push_back({g * 16 + i, g, prompt, static_cast<std::int64_t>(random() % 50)});
      }
    }
    std::vector<PackItem> shuffled = items;
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    PackOptions options;
    options.num_leaves = 1 << (random() % 5);
    options.max_tokens_per_gpu = 1 + random() % 200;
    options.share_prompt = random() % 2;
    const auto plan = plan_leaves(items, options), other = plan_leaves(shuffled, options);
    ASSERT_EQ(plan.size(), static_cast<std::size_t>(options.num_leaves));
    std::size_t next = 0;
    for (std::size_t l = 0; l < plan.size(); ++l) {
      ASSERT_EQ(plan[l].micro_batches.size(), other[l].micro_batches.size());
      for (std::size_t m = 0; m < plan[l].micro_batches.size(); ++m) {
        const MicroBatch &a = plan[l].micro_batches[m], &b = other[l].micro_batches[m];
        ASSERT_EQ(a.samples.size(), b.samples.size());
        EXPECT_TRUE(a.num_tokens <= options.max_tokens_per_gpu || a.samples.size() == 1);
        std::int64_t tokens = 0;
        for (std::size_t i = 0; i < a.samples.size(); ++i, ++next) {
          ASSERT_EQ(a.samples[i], static_cast<std::int64_t>(next));
          const PackItem& item = items[next];
          EXPECT_EQ(shuffled[static_cast<std::size_t>(b.samples[i])].id, item.id);
          const bool shared =
              options.share_prompt && i > 0 && items[next - 1].prompt_id == item.prompt_id;
          tokens += item.response_tokens + (shared ? 0 : item.prompt_tokens);
        }
        EXPECT_EQ(a.num_tokens, tokens);
      }
    }
    EXPECT_EQ(next, items.size());
  }
}

TEST(Packing, RanksOwnConsecutiveLeavesAsWholeSubtrees) {
  for (std::int64_t leaves : {1, 2, 8, 32})
    for (std::int64_t ranks = 1; ranks <= leaves; ++ranks) {
      std::int64_t next = 0;
      for (std::int64_t r = 0; r < ranks; ++r) {
        const auto [first, last] = leaves_of_rank(leaves, r, ranks);
        EXPECT_EQ(first, next);
        EXPECT_GE(last - first, leaves / ranks);
        EXPECT_LE(last - first, (leaves + ranks - 1) / ranks);
        const auto nodes = tree_nodes(first, last);
        if ((ranks & (ranks - 1)) == 0) {
          EXPECT_EQ(nodes.size(), 1u);
        }
        for (std::size_t i = 0; i < nodes.size(); ++i) {
          EXPECT_EQ(nodes[i].index << nodes[i].level, next);
          next += std::int64_t{1} << nodes[i].level;
          EXPECT_TRUE(i == 0 || !are_siblings(nodes[i - 1], nodes[i]));
        }
        EXPECT_EQ(next, last);
      }
      EXPECT_EQ(next, leaves);
    }

  EXPECT_EQ(leaves_of_rank(8, 0, 1), std::pair(std::int64_t{0}, std::int64_t{8}));
  EXPECT_EQ(leaves_of_rank(8, 1, 2), std::pair(std::int64_t{4}, std::int64_t{8}));
  EXPECT_EQ(leaves_of_rank(8, 2, 4), std::pair(std::int64_t{4}, std::int64_t{6}));
  EXPECT_EQ(leaves_of_rank(8, 7, 8), std::pair(std::int64_t{7}, std::int64_t{8}));
  EXPECT_EQ(leaves_of_rank(8, 0, 3), std::pair(std::int64_t{0}, std::int64_t{2}));
  EXPECT_EQ(leaves_of_rank(8, 1, 3), std::pair(std::int64_t{2}, std::int64_t{5}));
  EXPECT_EQ(leaves_of_rank(8, 2, 3), std::pair(std::int64_t{5}, std::int64_t{8}));
  EXPECT_THROW(leaves_of_rank(6, 0, 3), Error);
  EXPECT_THROW(leaves_of_rank(4, 0, 8), Error);
}

TEST(Packing, Refusals) {
  PackOptions options;
  options.num_leaves = 6;
  EXPECT_THROW(plan_leaves(groups({1}), options), Error);
  options.num_leaves = 2;
  options.max_tokens_per_gpu = 0;
  EXPECT_THROW(plan_leaves(groups({1}), options), Error);
  options.max_tokens_per_gpu = 10;
  auto twice = groups({2});
  twice[1].id = twice[0].id;
  EXPECT_THROW(plan_leaves(twice, options), Error);
}

}  // namespace
}  // namespace tandem
