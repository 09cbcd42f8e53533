// A weight update from a trainer's GPU to the GPU of an engine, or of one of its tensor-parallel
// ranks: read from memory over NVLink, or sent by NCCL, in many buckets and in one. Every element
// arrives, the sums of both ends are equal, and a row that went wrong would show.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "gpu/transfer_model.h"
#include "gpu/two_ranks.h"
#include "model/link.h"
#include "transfer/local_copy.h"
#include "transfer/update.h"

namespace tandem {
namespace {

// Rows that fill 16 bytes, rows that do not, and rows that end in half a word.
ModelConfig model(std::int64_t head_dim, std::int64_t hidden) {
  return transfer_model(head_dim, hidden, 44, 3);
}

// What an engine's arena must hold of the trainer's flat vector.
std::vector<float> part_of(const ArenaLayout& whole, const std::vector<float>& flat,
                           const ArenaLayout& part) {
  std::vector<float> out(static_cast<std::size_t>(part.flat_elements));
  for (const ArenaEntry& e : part.entries) {
    const std::int64_t cols = part.storages[e.storage].cols;
    for (std::int64_t r = 0; r < e.rows; ++r)
      for (const ArenaEntry& s : whole.entries) {
        const std::int64_t row = e.global_row + r - s.global_row,
                           width = whole.storages[s.storage].cols;
        if (s.hf_name != e.hf_name || row < 0 || row >= s.rows) continue;
        std::copy_n(flat.data() + s.flat_begin + row * width + e.global_col, cols,
                    out.data() + e.flat_begin + r * cols);
      }
  }
  return out;
}

struct Way {
  std::string name;
  LinkMode mode = LinkMode::p2p;
  bool memory = false;
  std::int64_t bucket = 512 << 20;
};
const Way kWays[] = {{"Memory", LinkMode::p2p, true},
                     {"P2p", LinkMode::p2p},
                     {"P2pSmallBuckets", LinkMode::p2p, false, 700},
                     {"Broadcast", LinkMode::broadcast},
                     {"BroadcastSmallBuckets", LinkMode::broadcast, false, 700}};
struct Shape {
  Element element;
  std::int64_t head_dim, hidden;
  int width;  // of the engine, whose last rank is looked at
  ShardRule rule;
};

class TwoRanks : public testing::TestWithParam<Way> {};

void update_twice(const Way& way, const Shape& shape, int rank, Store& store) {
  const ModelConfig config = model(shape.head_dim, shape.hidden);
  const ArenaLayout whole = make_arena_layout(config, shape.element, 0, 1, Place::cuda);
  const ArenaLayout part = make_arena_layout(config, shape.element, shape.width - 1, shape.width,
                                             Place::cuda, shape.rule);
  Arena arena(rank == 0 ? whole : part, true);
  TransferSetup setup;
  setup.source_layouts = {whole};
  setup.target_layouts = {part};
  setup.source_process = {0};
  setup.target_process = {1};
  setup.plan = make_transfer_plan({{&whole, 0, false}}, {{&part, 1, false}});
  setup.process = rank;
  setup.num_processes = 2;
  (rank == 0 ? setup.source : setup.served) = &arena;
  if (rank == 1) setup.target = &arena;
  setup.store = &store;
  setup.group.timeout_seconds = 30;
  setup.bucket_bytes = way.bucket;
  setup.shared_memory = way.memory;
  const auto server = announce_memory(store, rank, rank == 0 ? &arena.memory() : nullptr);
  std::int64_t version = 0;
  std::optional<EngineSide> engine;
  if (rank == 1)
    engine = EngineSide{.version = [&] { return version; },
                        .quiet = [] { return true; },
                        .overwrite = {},
                        .swap = [&](std::int64_t v) { version = v; }};
  WeightUpdate update(setup, make_link_transfer(setup, way.mode), engine);
  Group both = Group::gloo(store, "both", rank, 2);
  for (int round = 0; round < 2; ++round) {
    const auto flat = transfer_numbers(whole.flat_elements, round);
    if (rank == 0)
      for (const ArenaEntry& e : whole.entries)
        arena.write_rows(e, 0, e.rows, flat.data() + e.flat_begin);
    cuda_part().synchronize();
    both.barrier();
    const MoveReport report = update.move(round + 1);
    update.swap(round + 1);
    std::string sums;
    for (const BoxSum& s : rank == 0 ? report.sent : report.received)
      sums += fmt::format("{} {} {:x} {:x}\n", s.box, s.tensor, s.sum.a, s.sum.b);
    const auto ends = both.all_gather_text(sums);
    EXPECT_EQ(ends[0], ends[1]);
    EXPECT_NE(ends[0].find("embed_tokens"), std::string::npos);
    if (rank == 0) continue;
    EXPECT_EQ(report.moved_bytes, report.total_bytes);
    std::vector<float> got(static_cast<std::size_t>(part.flat_elements));
    arena.read_flat(got.data());
    EXPECT_EQ(got, part_of(whole, flat, part));
    // The sums are those of the CPU's kernel over what was read back.
    Arena host(make_arena_layout(config, shape.element, shape.width - 1, shape.width, Place::cpu,
                                 shape.rule));
    for (const ArenaEntry& e : part.entries)
      host.write_rows(e, 0, e.rows, got.data() + e.flat_begin);
    for (const BoxSum& s : report.received) {
      const TransferBox& b = setup.plan.boxes[static_cast<std::size_t>(s.box)];
      EXPECT_EQ(s.sum, checksum_rows(host, b.target_entry, b.target_row, b.rows)) << s.tensor;
    }
  }
  both.barrier();
}

TEST_P(TwoRanks, EngineHoldsTheTrainersValues) {
  TD_NEED_GPU();
  if (!GetParam().memory && !ranks_apart()) GTEST_SKIP() << "not run: 1 GPU";
  on_two_ranks([](int rank, Store& store) {
    int n = 0;
    for (const Element element : {Element::f32, Element::bf16})
      for (const auto& [dim, hidden] : {std::pair{6, 24}, {16, 64}, {5, 19}})
        for (const auto& [width, rule] : {std::pair{1, ShardRule::exact},
                                          {2, ShardRule::exact},
                                          {2, ShardRule::row_parallel}}) {
          if (width == 2 && rule == ShardRule::exact && hidden % 2 != 0) continue;  // cannot be cut
          SCOPED_TRACE(fmt::format("{} x {}, {} ranks", dim, hidden, width));
          // Names in a store are used once.
          const std::string key = fmt::format("case {}", n++);
          std::optional<Store> own;
          if (rank == 0) {
            own.emplace(Store::serve("127.0.0.1", 0, kTwoRanksSeconds));
            store.set(key, std::to_string(own->port()));
          } else {
            own.emplace(Store::connect(
                "127.0.0.1",
                static_cast<std::uint16_t>(std::stoi(store.get(key, kTwoRanksSeconds))),
                kTwoRanksSeconds));
          }
          update_twice(GetParam(), {element, dim, hidden, width, rule}, rank, *own);
          store.set(fmt::format("{} done {}", key, rank), "");
          store.get(fmt::format("{} done {}", key, 1 - rank), kTwoRanksSeconds);
        }
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, TwoRanks, testing::ValuesIn(kWays),
                         [](const auto& p) { return p.param.name; });

// A link of one rank, which any machine with a GPU has: messages to itself, in order and beside
// other work, and gathers in the stream, run at once and from a graph.
TEST(CudaLink, OneRankReachesItself) {
  TD_NEED_GPU();
  Store store = Store::serve("127.0.0.1", 0, kTwoRanksSeconds);
  Link messages(store, "messages", {0}, 0, LinkUse::messages, kTwoRanksSeconds);
  const auto options = at::dtype(at::kInt).device(device_of(Place::cuda));
  const auto from = at::arange(1000, options), to = at::zeros({1000}, options);
  const auto part = [](const at::Tensor& x, std::int64_t begin, std::int64_t count) {
    return LinkPart{.data = x.data_ptr<std::int32_t>() + begin, .bytes = 4 * count, .peer = 0};
  };
  const std::int64_t first = messages.exchange({part(from, 0, 300), part(from, 300, 0)},
                                               {part(to, 0, 300), part(to, 300, 0)});
  const std::int64_t second = messages.exchange({part(from, 300, 700)}, {part(to, 300, 700)});
  const std::int64_t third = messages.broadcast({part(to, 0, 10), part(to, 10, 990)}, 0);
  EXPECT_LT(first, second);
  messages.wait(first);
  EXPECT_TRUE(at::equal(to.narrow(0, 0, 300), from.narrow(0, 0, 300)));
  messages.wait(third);
  EXPECT_TRUE(at::equal(to, from));

  Link gathers(store, "gathers", {0}, 0, LinkUse::in_stream, kTwoRanksSeconds);
  const auto all = at::zeros({1000}, options);
  gathers.gather(from.data_ptr(), all.data_ptr(), 4000);
  gathers.settle();
  EXPECT_TRUE(at::equal(all, from));
  void* const graph = cuda_part().begin_graph();
  gathers.gather(from.data_ptr(), all.data_ptr(), 4000);
  cuda_part().end_graph(graph);
  for (int round = 0; round < 3; ++round) {
    from.add_(1);
    cuda_part().run_graph(graph);
    gathers.gather(all.data_ptr(), to.data_ptr(), 4000);  // graphs and calls of one link mix
    gathers.settle();
    EXPECT_TRUE(at::equal(to, from)) << round;
  }
  cuda_part().free_graph(graph);
}

// An engine's rank beside its trainer: whole rows, and columns of rows.
TEST(CudaColumns, PartBesideItsTrainerHoldsItsValues) {
  TD_NEED_GPU();
  for (const Element element : {Element::f32, Element::bf16})
    for (const auto& [dim, hidden] : {std::pair{6, 24}, {16, 64}, {5, 19}})
      for (int r = 0; r < 2; ++r) {
        const ModelConfig config = model(dim, hidden);
        const ArenaLayout whole = make_arena_layout(config, element, 0, 1, Place::cuda);
        const ArenaLayout part =
            make_arena_layout(config, element, r, 2, Place::cuda, ShardRule::row_parallel);
        Arena source(whole), target(part);
        const auto flat = transfer_numbers(whole.flat_elements, r);
        for (const ArenaEntry& e : whole.entries)
          source.write_rows(e, 0, e.rows, flat.data() + e.flat_begin);
        TransferSetup setup;
        setup.source_layouts = {whole};
        setup.target_layouts = {part};
        setup.source_process = setup.target_process = {0};
        setup.plan = make_transfer_plan({{&whole, 0, false}}, {{&part, 0, false}});
        setup.source = &source;
        setup.target = &target;
        WeightUpdate update(setup, make_colocate_transfer(setup),
                            EngineSide{.version = [] { return std::int64_t{0}; },
                                       .quiet = [] { return true; },
                                       .overwrite = {},
                                       .swap = [](std::int64_t) {}});
        const MoveReport report = update.move(1);
        std::vector<float> got(static_cast<std::size_t>(part.flat_elements));
        target.read_flat(got.data());
        EXPECT_EQ(got, part_of(whole, flat, part));
        ASSERT_EQ(report.sent.size(), report.received.size());
        for (std::size_t i = 0; i < report.sent.size(); ++i)
          EXPECT_EQ(report.sent[i].sum, report.received[i].sum) << report.sent[i].tensor;
      }
}

}  // namespace
}  // namespace tandem
