// Weights cut over ranks: the parts are the whole, byte for byte, wherever they are put together,
// and layers come and go through slots in the order that was told, on ranks that compute and on
// ranks that only take part.
#include "model/shard.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <optional>

#include "base/check.h"
#include "model/layer_gather.h"
#include "model/model.h"
#include "unit/rank_threads.h"
#include "unit/tiny_llama.h"

namespace tandem {
namespace {

ModelConfig tiny(bool tied) {
  ModelConfig c = tiny_llama();
  c.num_layers = 5;
  c.layers.resize(5);
  c.qkv_bias = true;
  c.qk_norm = QkNorm::head;
  c.tie_word_embeddings = tied;
  return c;
}

// Different on all elements of a tensor and for each `turn`.
std::vector<float> numbers(std::int64_t begin, std::int64_t end, int turn) {
  std::vector<float> flat;
  for (std::int64_t i = begin; i < end; ++i)
    flat.push_back(static_cast<float>((i * 7 + turn * 13) % 241 - 120) / 8);
  return flat;
}

// With the numbers from flat element `begin` of the whole model on.
struct Filled : Arena {
  Filled(const ArenaLayout& table, std::int64_t begin, int turn) : Arena(table) {
    write(begin, turn);
  }
  void write(std::int64_t begin, int turn) {
    const std::int64_t count = layout().flat_elements;
    write_flat(0, count, numbers(begin, begin + count, turn).data());
    set_version(turn);
  }
};

TEST(Shard, PartsAreTheWhole) {
  for (const Element e : {Element::f32, Element::bf16})
    for (const bool tied : {false, true})
      for (const int ranks : {1, 2, 3, 7, 200}) {
        const ArenaLayout whole = make_arena_layout(tiny(tied), e);
        std::vector<float> want(static_cast<std::size_t>(whole.flat_elements)), found;
        Filled(whole, 0, 0).read_flat(want.data());
        std::map<std::string, std::int64_t> rows;  // of each Hugging Face tensor
        std::int64_t at = 0, largest = 0;
        for (const FlatRange& range : shard_ranges(whole, ranks)) {
          EXPECT_EQ(range.begin, at);
          at = range.end;
          largest = std::max(largest, range.size());
          const ArenaLayout layout = make_shard_layout(whole, range);
          EXPECT_EQ(layout.flat_elements, range.size());
          std::vector<float> part(static_cast<std::size_t>(range.size()));
          Filled(layout, range.begin, 0).read_flat(part.data());
          found.insert(found.end(), part.begin(), part.end());
          for (const ArenaEntry& entry : layout.entries) {
            EXPECT_EQ(entry.global_row, rows[entry.hf_name]) << entry.hf_name;
            rows[entry.hf_name] += entry.rows;
          }
        }
        EXPECT_EQ(found, want);
        for (const ArenaEntry& entry : whole.entries) EXPECT_EQ(rows[entry.hf_name], entry.rows);
        // A panel is at most 16 rows of the widest matrix.
        EXPECT_LE(largest, whole.flat_elements / ranks + 16 * 40);
      }
}

// The sum that a memory plan adds up without a table.
TEST(Shard, WhatATensorParallelRankHoldsIsWhatItsTableHolds) {
  for (const ShardRule rule : {ShardRule::exact, ShardRule::row_parallel})
    for (const int width : {1, 2, 4}) {  // 4: two ranks hold each key/value head
      std::int64_t elements = 0;
      for (const ModelWeight& weight : model_weights(tiny(false)))
        for (const WeightPart& part : weight.parts)
          elements += rows_of_rank(weight, part, width, rule) * cols_of_rank(weight, width, rule);
      EXPECT_EQ(
          elements,
          make_arena_layout(tiny(false), Element::f32, 0, width, Place::cpu, rule).flat_elements);
    }
}

TEST(Shard, APartThatCutsAPanelIsRefused) {
  const ArenaLayout whole = make_arena_layout(tiny(false), Element::f32);
  EXPECT_THROW(make_shard_layout(whole, {0, 8 * 24}), Error);
  EXPECT_NO_THROW(make_shard_layout(whole, {0, 16 * 24}));
}

TEST(Shard, NeighboursNeverShareASlot) {
  const ArenaLayout whole = make_arena_layout(tiny(false), Element::bf16);
  for (const std::int64_t slots : {1, 2, 3, 9}) {
    const ArenaLayout layout = make_slot_layout(whole, slots);
    for (const ArenaStorage& a : layout.storages) {
      EXPECT_LE(a.offset_bytes + a.bytes, layout.bytes);
      for (const ArenaStorage& b : layout.storages) {
        const auto la = layer_of(a.name), lb = layer_of(b.name);
        const bool may = la && lb && *la != *lb && (*la - *lb) % slots == 0;
        const bool meet =
            a.offset_bytes < b.offset_bytes + b.bytes && b.offset_bytes < a.offset_bytes + a.bytes;
        EXPECT_TRUE(&a == &b || !meet || may) << a.name << " " << b.name;
      }
    }
    EXPECT_EQ(layout.bytes < whole.bytes, slots < 5);
  }
}

// The layers of a forward with or without a backward, as recompute orders them.
TEST(Shard, TheOrderOfLayers) {
  const ModelConfig config = tiny(false);
  Arena arena(make_arena_layout(config, Element::f32));
  Model model(config, arena, nullptr, nullptr);
  using Order = std::vector<std::int64_t>;
  EXPECT_EQ(model.layer_order(false), (Order{0, 1, 2, 3, 4}));
  EXPECT_EQ(model.layer_order(true), (Order{0, 1, 2, 3, 4, 4, 3, 2, 1, 0}));
  model.set_recompute({{0, 2}, {2, 4}});
  EXPECT_EQ(model.layer_order(true), (Order{0, 1, 2, 3, 4, 4, 2, 3, 3, 2, 0, 1, 1, 0}));
  EXPECT_EQ(model.layer_order(false), (Order{0, 1, 2, 3, 4}));
}

bool same_storage(const Arena& a, const Arena& b, std::int64_t storage) {
  return std::memcmp(a.storage_data(storage), b.storage_data(storage),
                     static_cast<std::size_t>(a.layout().storages[storage].bytes)) == 0;
}

// Whether a layer, or what is no layer's, is there as the whole model has it.
bool is_there(const Arena& found, const Arena& want, std::optional<std::int64_t> layer) {
  bool same = true;
  for (std::size_t i = 0; i < want.layout().storages.size(); ++i)
    if (layer_of(want.layout().storages[i].name) == layer)
      same = same && same_storage(found, want, static_cast<std::int64_t>(i));
  return same;
}

void on_ranks(int size, const std::function<void(Group&)>& body) {
  on_rank_threads(size, [&](int r, const Store& store) {
    Group group = Group::gloo(store, "layers", r, size);
    body(group);
  });
}

TEST(LayerGather, BringsEachLayerWhenItIsNeeded) {
  const std::vector<std::vector<std::int64_t>> passes = {
      {0, 1, 2, 3, 4, 4, 3, 2, 1, 0}, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 4, 2, 3, 3, 2, 0, 1, 1, 0}};
  for (const Element e : {Element::f32, Element::bf16})
    for (const int size : {2, 3})
      for (const std::int64_t slots : {1, 2, 3})
        on_ranks(size, [&](Group& group) {
          const ArenaLayout whole = make_arena_layout(tiny(false), e);
          const FlatRange mine = shard_ranges(whole, size)[static_cast<std::size_t>(group.rank())];
          Filled shard(make_shard_layout(whole, mine), mine.begin, 1);
          LayerGather layers(whole, shard, group, slots);
          for (const int turn : {1, 2}) {
            shard.write(mine.begin, turn);
            const Filled want(whole, 0, turn);
            for (int again = 0; again < 2; ++again) {
              layers.begin(passes);
              EXPECT_TRUE(is_there(layers.arena(), want, std::nullopt));
              EXPECT_EQ(layers.arena().version(), turn);
              for (std::size_t p = 0; p < passes.size(); ++p) {
                // Another rank each time computes nothing, or its forward alone.
                const bool idle = static_cast<int>(p) % size == group.rank();
                for (std::size_t i = 0; i < (idle ? p : passes[p].size()); ++i) {
                  layers.need(passes[p][i]);
                  layers.need(passes[p][i]);
                  EXPECT_TRUE(is_there(layers.arena(), want, passes[p][i])) << p << " " << i;
                }
                layers.end_pass();
              }
            }
          }
        });
}

TEST(LayerGather, AnotherOrderIsRefused) {
  on_ranks(2, [&](Group& group) {
    const ArenaLayout whole = make_arena_layout(tiny(false), Element::f32);
    const FlatRange mine = shard_ranges(whole, 2)[static_cast<std::size_t>(group.rank())];
    const Filled shard(make_shard_layout(whole, mine), mine.begin, 1);
    LayerGather layers(whole, shard, group);
    EXPECT_THROW(layers.need(0), Error);  // no pass was told
    layers.begin({{0, 1, 2, 3, 4}});
    layers.need(0);
    EXPECT_THROW(layers.begin({{0}}), Error);  // passes are not over
    EXPECT_THROW(layers.need(2), Error);
  });
}

}  // namespace
}  // namespace tandem
