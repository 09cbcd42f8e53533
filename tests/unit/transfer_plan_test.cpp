// Plans over several layouts: every target row is covered once, from the process that already has
// it if there is one, and what does not fit is refused by name.
#include "transfer/plan.h"

#include <gtest/gtest.h>

#include <map>

#include "base/check.h"
#include "model/shard.h"
#include "unit/tiny_llama.h"

namespace tandem {
namespace {

std::vector<ArenaLayout> layouts(std::int64_t n, Element e = Element::f32,
                                 ShardRule rule = ShardRule::exact) {
  std::vector<ArenaLayout> out;
  for (std::int64_t r = 0; r < n; ++r)
    out.push_back(make_arena_layout(tiny_llama(), e, r, n, Place::cpu, rule));
  return out;
}

std::vector<TransferSide> sides(const std::vector<ArenaLayout>& l, bool shared,
                                std::int64_t first_process) {
  std::vector<TransferSide> out;
  for (std::size_t i = 0; i < l.size(); ++i)
    out.push_back({&l[i], first_process + static_cast<std::int64_t>(i), shared});
  return out;
}

void expect_covered(const TransferPlan& plan, const std::vector<ArenaLayout>& targets) {
  std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, int> rows;
  for (const TransferBox& b : plan.boxes)
    for (std::int64_t r = 0; r < b.rows; ++r)
      ++rows[{b.target_rank, b.target_entry, b.target_row + r}];
  std::size_t want = 0;
  for (const ArenaLayout& l : targets)
    for (const ArenaEntry& e : l.entries) want += static_cast<std::size_t>(e.rows);
  EXPECT_EQ(rows.size(), want);
  for (const auto& [key, count] : rows) EXPECT_EQ(count, 1);
}

// A box of rows means the same rows at both ends.
void expect_same_rows(const TransferBox& b, const std::vector<ArenaLayout>& sources,
                      const std::vector<ArenaLayout>& targets) {
  const ArenaEntry& source = sources[b.source_rank].entries[b.source_entry];
  const ArenaEntry& target = targets[b.target_rank].entries[b.target_entry];
  EXPECT_EQ(source.hf_name, target.hf_name);
  EXPECT_EQ(source.global_row + b.source_row, target.global_row + b.target_row);
  EXPECT_LE(b.source_row + b.rows, source.rows);
}

// Trainer ranks that keep a shard each: every rank sends what it holds, and nothing else.
TEST(TransferPlan, TakesEachRowFromTheShardThatHoldsIt) {
  const ArenaLayout whole = make_arena_layout(tiny_llama(), Element::f32);
  for (const std::int64_t from : {2, 3, 40})
    for (const std::int64_t to : {1, 2, 4}) {
      std::vector<ArenaLayout> shards;
      for (const FlatRange& range : shard_ranges(whole, from))
        shards.push_back(make_shard_layout(whole, range));
      const auto targets = layouts(to);
      const auto plan = make_transfer_plan(sides(shards, false, 0), sides(targets, false, 100));
      expect_covered(plan, targets);
      std::vector<std::int64_t> sent(shards.size(), 0);
      for (const TransferBox& b : plan.boxes) {
        expect_same_rows(b, shards, targets);
        sent[b.source_rank] += b.rows * b.row_elements;
      }
      for (std::size_t s = 0; s < shards.size(); ++s) {
        const std::int64_t once = shards[s].flat_elements;
        EXPECT_TRUE(to == 1 ? sent[s] == once : sent[s] >= once) << s << ": " << sent[s];
      }
    }
}

TEST(TransferPlan, CoversEveryRowOnceForAnyCut) {
  for (std::int64_t from : {1, 2})
    for (std::int64_t to : {1, 2, 4}) {  // 4: two ranks hold each key/value head
      const auto s = layouts(from), t = layouts(to, Element::bf16);
      const auto plan = make_transfer_plan(sides(s, false, 0), sides(t, false, 10));
      expect_covered(plan, t);
      EXPECT_EQ(plan.moved_bytes, plan.total_bytes);
      for (const TransferBox& b : plan.boxes) expect_same_rows(b, s, t);
    }
}

TEST(TransferPlan, RowParallelRanksTakeTheirColumns) {
  for (std::int64_t to : {2, 4}) {
    const auto s = layouts(1), t = layouts(to, Element::bf16, ShardRule::row_parallel);
    const auto plan = make_transfer_plan(sides(s, false, 0), sides(t, false, 10));
    expect_covered(plan, t);
    std::map<std::string, std::int64_t> elements;  // of matrices that are cut by columns
    for (const TransferBox& b : plan.boxes) {
      const ArenaEntry& target = t[b.target_rank].entries[b.target_entry];
      EXPECT_EQ(b.source_col, target.global_col);
      if (b.row_elements < target.hf_shape.back())
        elements[target.hf_name] += b.rows * b.row_elements;
    }
    EXPECT_EQ(elements.size(), 4u);  // o_proj and down_proj of two layers
    for (const auto& [name, count] : elements)
      EXPECT_EQ(count, 24 * (name.ends_with("o_proj.weight") ? 24 : 40)) << name;
  }
  // The other way round no rank has all that is needed.
  const auto cut = layouts(2, Element::f32, ShardRule::row_parallel), whole = layouts(1);
  EXPECT_THROW(make_transfer_plan(sides(cut, false, 0), sides(whole, false, 10)), Error);
}

TEST(TransferPlan, TakesFromItsOwnProcessFirst) {
  const auto s = layouts(1), t = layouts(1);
  const std::vector<TransferSide> two{{&s[0], 0, false}, {&s[0], 1, false}};
  for (const TransferBox& b : make_transfer_plan(two, {{&t[0], 1, false}}).boxes)
    EXPECT_EQ(b.source_rank, 1);
}

TEST(TransferPlan, OneArenaMovesNothing) {
  const auto l = layouts(1);
  const auto plan = make_transfer_plan(sides(l, true, 0), sides(l, true, 0));
  expect_covered(plan, l);
  EXPECT_EQ(plan.moved_bytes, 0);
  EXPECT_EQ(plan.total_bytes, l[0].flat_elements * 4);
}

TEST(TransferPlan, NamesWhatDoesNotFit) {
  auto s = layouts(1), t = layouts(1);
  auto text = [&] {
    try {
      make_transfer_plan(sides(s, false, 0), sides(t, false, 1));
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  const std::string name = s[0].entries[3].hf_name;
  s[0].entries.erase(s[0].entries.begin() + 3);
  EXPECT_NE(text().find(name), std::string::npos) << text();
  std::swap(s, t);
  EXPECT_NE(text().find(name), std::string::npos) << text();
  s = t = layouts(1);
  t[0].entries[5].hf_shape[0] += 2;
  EXPECT_NE(text().find("shape"), std::string::npos) << text();
}

TEST(TransferPlan, OwnersTakeTurns) {
  const auto s = layouts(1), t = layouts(1);
  const std::vector<TransferSide> two{{&s[0], 0, false}, {&s[0], 1, false}};
  std::int64_t bytes[2] = {0, 0};
  for (const TransferBox& b : make_transfer_plan(two, {{&t[0], 2, false}}).boxes)
    bytes[b.source_rank] += b.rows * b.row_elements;
  EXPECT_GT(bytes[0], 0);
  EXPECT_GT(bytes[1], 0);
}

}  // namespace
}  // namespace tandem
