// Block counts, sharing and copy on write; integrity under random load, and that the check itself
// sees faults.
#include "engine/kv_cache.h"

#include <gtest/gtest.h>

#include <random>

namespace tandem {
namespace {

TEST(KvCache, CopiesOnlyTheBorderBlockAndOnlyWhileShared) {
  KvCache cache(8, 4);
  std::vector<BlockCopy> copies;
  BlockTable first, second;
  cache.prepare_write(first, 0, 6, copies);
  EXPECT_EQ(first.size(), 2u);
  EXPECT_TRUE(copies.empty());
  cache.share(first, 6, second);
  EXPECT_EQ(cache.num_free(), 6);
  EXPECT_EQ(cache.blocks_to_write(second, 6, 7), 1);
  EXPECT_EQ(cache.blocks_to_write(second, 6, 9), 2);
  const std::int32_t border = second[1];
  cache.prepare_write(second, 6, 7, copies);
  ASSERT_EQ(copies.size(), 1u);
  EXPECT_EQ(copies[0].from, border);
  EXPECT_EQ(copies[0].to, second[1]);
  EXPECT_EQ(first[1], border);
  EXPECT_EQ(cache.blocks_to_write(first, 6, 7), 0) << "the last holder writes in place";
  EXPECT_EQ(cache.slot(second, 6), second[1] * 4 + 2);
  cache.release(first);
  EXPECT_EQ(cache.num_free(), 6) << "the full block still has a holder";
  cache.release(second);
  EXPECT_EQ(cache.num_free(), 8);
}

TEST(KvCache, SharesOnlyTheBlocksAskedFor) {
  KvCache cache(8, 4);
  std::vector<BlockCopy> copies;
  BlockTable long_table, short_table;
  cache.prepare_write(long_table, 0, 20, copies);
  cache.share(long_table, 8, short_table);
  EXPECT_EQ(short_table.size(), 2u);
  cache.prepare_write(short_table, 8, 10, copies);
  EXPECT_TRUE(copies.empty()) << "a new block is not a copy";
}

TEST(KvCache, FindFaultSeesForgottenAndForeignBlocks) {
  KvCache cache(8, 4);
  std::vector<BlockCopy> copies;
  BlockTable table;
  cache.prepare_write(table, 0, 9, copies);
  const BlockTable* tables[] = {&table};
  EXPECT_EQ(cache.find_fault(tables), "");
  EXPECT_NE(cache.find_fault({}), "") << "blocks without a table";
  BlockTable broken = table;
  broken[0] = broken[1];
  const BlockTable* broken_tables[] = {&broken};
  EXPECT_NE(cache.find_fault(broken_tables), "");
  broken[0] = 8;
  EXPECT_NE(cache.find_fault(broken_tables), "");
}

std::vector<TokenId> block_of(TokenId first) { return {first, first + 1, first + 2, first + 3}; }

TEST(KvCache, KnownBlocksOutliveTheirLastReference) {
  KvCache cache(3, 4);
  std::vector<BlockCopy> copies;
  BlockTable first;
  cache.prepare_write(first, 0, 8, copies);
  EXPECT_TRUE(cache.remember(first, 0, block_of(10), false));
  EXPECT_TRUE(cache.remember(first, 1, block_of(20), false));
  const BlockTable was = first;
  cache.release(first);
  EXPECT_EQ(cache.num_free(), 3) << "what is only known counts as free";
  BlockTable second;
  EXPECT_FALSE(cache.take(second, block_of(20))) << "that block follows another";
  EXPECT_TRUE(cache.take(second, block_of(10)));
  EXPECT_TRUE(cache.take(second, block_of(20)));
  EXPECT_FALSE(cache.take(second, block_of(20)));
  EXPECT_EQ(second, was);
  EXPECT_EQ(cache.num_free(), 1);
  const BlockTable* tables[] = {&second};
  EXPECT_EQ(cache.find_fault(tables), "");
  cache.release(second);

  // A new sequence takes the block that was never known first, then the follower, then its parent.
  BlockTable third;
  cache.prepare_write(third, 0, 8, copies);
  EXPECT_NE(third[0], was[0]);
  EXPECT_EQ(third[1], was[1]);
  BlockTable fourth;
  EXPECT_TRUE(cache.take(fourth, block_of(10)));
  cache.forget();
  EXPECT_EQ(cache.num_cached(), 0);
  BlockTable none;
  EXPECT_FALSE(cache.take(none, block_of(10)));
  const BlockTable* both[] = {&third, &fourth};
  EXPECT_EQ(cache.find_fault(both), "") << "held blocks stay held";
  cache.release(fourth);
  cache.release(third);
  EXPECT_EQ(cache.num_free(), 3);
}

TEST(KvCache, OneBlockIsKeptOfTwoThatHoldTheSame) {
  KvCache cache(8, 4);
  std::vector<BlockCopy> copies;
  BlockTable a, b;
  cache.prepare_write(a, 0, 8, copies);
  cache.prepare_write(b, 0, 8, copies);
  EXPECT_TRUE(cache.remember(a, 0, block_of(1), false));
  EXPECT_FALSE(cache.remember(b, 0, block_of(1), false)) << "known already, and not to be replaced";
  EXPECT_NE(a[0], b[0]);
  EXPECT_TRUE(cache.remember(b, 0, block_of(1), true));
  EXPECT_EQ(a[0], b[0]);
  EXPECT_EQ(cache.num_free(), 5);
  EXPECT_TRUE(cache.remember(b, 1, block_of(5), true)) << "its chain goes on through the other's";
  EXPECT_TRUE(cache.remember(b, 1, block_of(5), false)) << "the known block is its own";
  const BlockTable* tables[] = {&a, &b};
  EXPECT_EQ(cache.find_fault(tables), "");
  cache.release(a);
  cache.release(b);
  EXPECT_EQ(cache.num_free(), 8);
}

TEST(KvCache, KeepsItsCountsUnderRandomLoad) {
  KvCache cache(50, 4);
  std::mt19937_64 random(5);
  std::vector<BlockTable> tables(12);
  std::vector<std::int64_t> lengths(12, 0);
  std::vector<const BlockTable*> all;
  for (const BlockTable& table : tables) all.push_back(&table);
  std::int64_t num_copies = 0;
  for (int step = 0; step < 20000; ++step) {
    const std::size_t i = random() % tables.size();
    const std::size_t j = random() % tables.size();
    if (random() % 8 == 0) {
      cache.release(tables[i]);
      lengths[i] = 0;
    } else if (lengths[i] == 0 && i != j && lengths[j] > 0 && random() % 2 == 0) {
      lengths[i] = 1 + static_cast<std::int64_t>(random() % lengths[j]);
      cache.share(tables[j], lengths[i], tables[i]);
    } else {
      const std::int64_t end = lengths[i] + 1 + static_cast<std::int64_t>(random() % 6);
      const std::int64_t needed = cache.blocks_to_write(tables[i], lengths[i], end);
      if (needed > cache.num_free()) continue;
      const std::int64_t free_before = cache.num_free();
      std::vector<BlockCopy> copies;
      cache.prepare_write(tables[i], lengths[i], end, copies);
      EXPECT_EQ(free_before - cache.num_free(), needed);
      lengths[i] = end;
      num_copies += static_cast<std::int64_t>(copies.size());
    }
    ASSERT_EQ(cache.find_fault(all), "") << "after step " << step;
  }
  EXPECT_GT(num_copies, 100);
  for (BlockTable& table : tables) cache.release(table);
  EXPECT_EQ(cache.num_free(), 50);
  cache.reset();
  EXPECT_EQ(cache.find_fault(all), "");
}

}  // namespace
}  // namespace tandem
