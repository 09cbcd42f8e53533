// Weight updates over several "processes" (threads with arenas, a store and Gloo groups of their
// own): every way, in memory and over sockets, into engines of any width, ends with the trainer's
// values in every engine arena and with equal checksums at both ends of every box.
#include "transfer/update.h"

#include <gtest/gtest.h>

#include <thread>

#include "base/check.h"
#include "transfer/local_copy.h"
#include "unit/tiny_llama.h"

namespace tandem {
namespace {

std::vector<float> numbers(std::int64_t n) {
  std::vector<float> flat(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < flat.size(); ++i)
    flat[i] = static_cast<float>(static_cast<int>(i % 251) - 125) / 8;
  return flat;
}

struct Case {
  bool p2p;
  bool memory;
  int trainers, engines, width;
  Element element;
  std::int64_t bucket;
  ShardRule rule = ShardRule::exact;
  std::int64_t intermediate = 40;
};

struct FakeEngine {
  std::int64_t version = 3;
  bool quiet = true;
  EngineSide side() {
    return {.version = [this] { return version; },
            .quiet = [this] { return quiet; },
            .overwrite = {},
            .swap = [this](std::int64_t v) { version = v; }};
  }
};

// One process: trainers come first, then engine ranks.
struct Process {
  Process(const Case& c, Store& store, int process) {
    ModelConfig model = tiny_llama();
    model.intermediate_size = c.intermediate;
    std::vector<TransferSide> sources, targets;
    for (int i = 0; i < c.trainers; ++i) {
      setup.source_layouts.push_back(make_arena_layout(model, c.element));
      setup.source_process.push_back(i);
    }
    for (int i = 0; i < c.engines * c.width; ++i) {
      setup.target_layouts.push_back(
          make_arena_layout(model, c.element, i % c.width, c.width, Place::cpu, c.rule));
      setup.target_process.push_back(c.trainers + i);
    }
    for (int i = 0; i < c.trainers; ++i) sources.push_back({&setup.source_layouts[i], i, false});
    for (int i = 0; i < c.engines * c.width; ++i)
      targets.push_back({&setup.target_layouts[i], c.trainers + i, false});
    setup.plan = make_transfer_plan(sources, targets);
    setup.process = process;
    setup.num_processes = c.trainers + c.engines * c.width;
    setup.store = &store;
    setup.group.timeout_seconds = 20;
    setup.bucket_bytes = c.bucket;
    setup.shared_memory = c.memory;
    std::optional<EngineSide> side;
    if (process < c.trainers) {
      arena = std::make_unique<Arena>(setup.source_layouts[process], true);
      arena->write_flat(0, arena->layout().flat_elements,
                        numbers(arena->layout().flat_elements).data());
      setup.source = arena.get();
      announce_memory(store, process, &arena->memory());
    } else {
      arena = std::make_unique<Arena>(setup.target_layouts[process - c.trainers]);
      setup.served = setup.target = arena.get();
      announce_memory(store, process, nullptr);
      side = engine.side();
    }
    update = std::make_unique<WeightUpdate>(
        setup, c.p2p ? make_p2p_transfer(setup) : make_broadcast_transfer(setup), side);
  }
  TransferSetup setup;
  std::unique_ptr<Arena> arena;
  FakeEngine engine;
  std::unique_ptr<WeightUpdate> update;
};

class Ways : public ::testing::TestWithParam<Case> {};

TEST_P(Ways, EveryEngineHoldsTheTrainersValues) {
  const Case& c = GetParam();
  Store server = Store::serve("127.0.0.1", 0, 20);
  const int n = c.trainers + c.engines * c.width;
  std::vector<std::unique_ptr<Process>> processes(static_cast<std::size_t>(n));
  std::vector<MoveReport> reports(processes.size());
  std::vector<std::string> faults(processes.size());
  std::vector<std::thread> threads;
  for (int p = 0; p < n; ++p)
    threads.emplace_back([&, p] {
      try {
        Store store = Store::connect("127.0.0.1", server.port(), 20);
        processes[p] = std::make_unique<Process>(c, store, p);
        reports[p] = processes[p]->update->move(4);
        processes[p]->update->swap(4);
        server.get(fmt::format("transfer/memory/{}", n - 1), 20);
      } catch (const Error& e) {
        faults[p] = e.what();
      }
      processes[p]->setup.store = nullptr;
    });
  for (auto& t : threads) t.join();
  for (const std::string& fault : faults) ASSERT_EQ(fault, "");

  ModelConfig model = tiny_llama();
  model.intermediate_size = c.intermediate;
  const ArenaLayout whole = make_arena_layout(model, c.element);
  const std::vector<float> want = numbers(whole.flat_elements);
  std::map<std::int64_t, RowsSum> sent, received;
  for (const MoveReport& r : reports) {
    for (const BoxSum& s : r.sent) sent[s.box] = s.sum;
    for (const BoxSum& s : r.received) received[s.box] = s.sum;
  }
  EXPECT_EQ(sent, received);
  // Compared anew: the trainers' values as they are before rounding, with what the engines serve.
  const std::vector<float> masters = numbers(processes[0]->arena->layout().flat_elements);
  std::map<std::int64_t, RowsSum> fresh, served;
  for (int p = 0; p < n; ++p) {
    const CheckReport r = processes[p]->update->check(masters);
    EXPECT_EQ(r.version, p < c.trainers ? std::nullopt : std::optional<std::int64_t>(4));
    for (const BoxSum& s : r.fresh) fresh[s.box] = s.sum;
    for (const BoxSum& s : r.served) served[s.box] = s.sum;
  }
  EXPECT_EQ(fresh, sent);
  EXPECT_EQ(served, sent);
  EXPECT_EQ(sent.size(), processes[0]->setup.plan.boxes.size());
  for (int p = c.trainers; p < n; ++p) {
    EXPECT_EQ(processes[p]->engine.version, 4);
    EXPECT_GT(reports[p].moved_bytes, 0);
    const Arena& arena = *processes[p]->arena;
    for (const ArenaEntry& e : arena.layout().entries) {
      const std::int64_t cols = arena.layout().storages[e.storage].cols;
      std::vector<float> got(static_cast<std::size_t>(e.rows * cols));
      arena.read_rows(e, 0, e.rows, got.data());
      const auto all = std::find_if(whole.entries.begin(), whole.entries.end(),
                                    [&](const ArenaEntry& w) { return w.hf_name == e.hf_name; });
      const std::int64_t width = whole.storages[all->storage].cols;
      for (std::int64_t r = 0; r < e.rows; ++r) {
        const auto from =
            want.begin() + all->flat_begin + (e.global_row + r) * width + e.global_col;
        ASSERT_TRUE(std::equal(from, from + cols, got.begin() + r * cols))
            << e.hf_name << " row " << r << " of process " << p;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, Ways,
    ::testing::Values(Case{true, true, 1, 1, 1, Element::f32, 1 << 20},
                      Case{true, false, 1, 1, 1, Element::f32, 1 << 20},
                      Case{false, true, 1, 1, 1, Element::bf16, 1 << 20},
                      Case{false, false, 1, 1, 1, Element::bf16, 1 << 20},
                      // buckets smaller than a tensor, two owners, engines of two ranks
                      Case{true, false, 2, 1, 2, Element::bf16, 1024},
                      Case{false, false, 2, 1, 2, Element::bf16, 1024},
                      Case{true, true, 2, 2, 2, Element::f32, 4096},
                      // more ranks than key/value heads, three owners
                      Case{true, false, 3, 1, 4, Element::bf16, 1024},
                      Case{false, true, 3, 1, 4, Element::f32, 4096},
                      Case{false, false, 2, 2, 1, Element::f32, 4096},
                      Case{true, false, 4, 2, 1, Element::f32, 4096},
                      // row-parallel: pairs of columns, and 11 or 12 elements that are none
                      Case{true, true, 1, 1, 2, Element::bf16, 4096, ShardRule::row_parallel},
                      Case{true, false, 2, 1, 4, Element::bf16, 1024, ShardRule::row_parallel},
                      Case{false, false, 1, 2, 2, Element::f32, 4096, ShardRule::row_parallel},
                      Case{false, true, 2, 1, 4, Element::bf16, 4096, ShardRule::row_parallel, 44},
                      Case{true, false, 1, 1, 4, Element::bf16, 4096, ShardRule::row_parallel, 44},
                      Case{false, false, 1, 1, 4, Element::bf16, 1 << 20, ShardRule::row_parallel,
                           44}));

// With two engine arenas a weight that arrives changed is seen by its sum and not served.
TEST(WeightUpdate, ABrokenMoveLeavesWhatIsServed) {
  TransferSetup setup;
  setup.source_layouts = setup.target_layouts = {make_arena_layout(tiny_llama(), Element::bf16)};
  setup.source_process = setup.target_process = {0};
  setup.plan = make_transfer_plan({{&setup.source_layouts[0], 0, false}},
                                  {{&setup.target_layouts[0], 0, false}});
  Arena source(setup.source_layouts[0]), served(setup.source_layouts[0]),
      staging(setup.source_layouts[0]);
  const std::int64_t n = source.layout().flat_elements;
  source.write_flat(0, n, numbers(n).data());
  setup.source = &source;
  setup.target = &staging;
  setup.served = &served;
  FakeEngine engine;
  EngineSide side = engine.side();
  side.swap = [&](std::int64_t v) {
    served.swap_memory(staging);
    engine.version = v;
  };
  WeightUpdate update(
      setup, make_broken_transfer(setup, make_colocate_transfer(setup), BrokenUpdate::corrupt),
      side);
  for (const std::int64_t version : {4, 5}) {
    const MoveReport r = update.move(version);
    for (std::size_t i = 0; i < r.sent.size(); ++i) EXPECT_EQ(r.sent[i].sum, r.received[i].sum);
    update.swap(version);
  }
  std::vector<float> before(static_cast<std::size_t>(n)), after(before);
  served.read_flat(before.data());
  const MoveReport broken = update.move(6);
  std::vector<std::string> changed;
  for (std::size_t i = 0; i < broken.sent.size(); ++i)
    if (!(broken.sent[i].sum == broken.received[i].sum)) changed.push_back(broken.sent[i].tensor);
  EXPECT_EQ(changed, std::vector<std::string>{"model.embed_tokens.weight"});
  served.read_flat(after.data());
  EXPECT_EQ(before, after);
  EXPECT_EQ(engine.version, 5);
}

// A rank whose engine shares the trainer's arena.
TEST(WeightUpdate, SwapsOnlyALaterVersionOfAQuietEngine) {
  TransferSetup setup;
  setup.source_layouts = setup.target_layouts = {make_arena_layout(tiny_llama(), Element::f32)};
  setup.source_process = setup.target_process = {0};
  setup.plan = make_transfer_plan({{&setup.source_layouts[0], 0, true}},
                                  {{&setup.target_layouts[0], 0, true}});
  Arena arena(setup.source_layouts[0]);
  setup.source = setup.target = &arena;
  FakeEngine engine;
  WeightUpdate update(setup, make_colocate_transfer(setup), engine.side());
  EXPECT_THROW(update.move(3), Error);
  engine.quiet = false;
  EXPECT_THROW(update.move(4), Error);
  EXPECT_THROW(update.swap(4), Error);
  EXPECT_EQ(engine.version, 3);
  engine.quiet = true;
  EXPECT_EQ(update.move(4).moved_bytes, 0);
  EXPECT_EQ(engine.version, 3);
  update.swap(4);
  EXPECT_EQ(engine.version, 4);
  EXPECT_THROW(update.swap(4), Error);
  update.move(9);  // a run that continues goes on counting
  update.swap(9);
  EXPECT_EQ(engine.version, 9);
}

// The checksum sees a changed bit, a moved row and exchanged rows, and does not see the layout.
TEST(RowsSum, ComparesValuesAcrossLayouts) {
  const ModelConfig model = tiny_llama();
  Arena whole(make_arena_layout(model, Element::bf16)),
      left(make_arena_layout(model, Element::bf16, 0, 2)),
      right(make_arena_layout(model, Element::bf16, 1, 2));
  const auto flat = numbers(whole.layout().flat_elements);
  whole.write_flat(0, whole.layout().flat_elements, flat.data());
  for (std::size_t i = 0; i < whole.layout().entries.size(); ++i) {
    const ArenaEntry& e = whole.layout().entries[i];
    const std::int64_t cols = whole.layout().storages[e.storage].cols;
    RowsSum parts;
    bool cut = false;
    for (Arena* part : {&left, &right}) {
      const ArenaEntry& p = part->layout().entries[i];
      part->write_rows(p, 0, p.rows, flat.data() + e.flat_begin + p.global_row * cols);
      const RowsSum s = checksum_rows(*part, static_cast<std::int64_t>(i), 0, p.rows);
      cut = p.rows < e.rows;
      parts = cut ? RowsSum{parts.a + s.a, parts.b + s.b} : s;
    }
    EXPECT_EQ(checksum_rows(whole, static_cast<std::int64_t>(i), 0, e.rows), parts) << e.hf_name;
  }
  const ArenaEntry& e = whole.layout().entries[0];
  const RowsSum before = checksum_rows(whole, 0, 0, e.rows);
  std::vector<float> rows(static_cast<std::size_t>(2 * model.hidden_size));
  whole.read_rows(e, 3, 2, rows.data());
  std::vector<float> exchanged(rows.begin() + model.hidden_size, rows.end());
  exchanged.insert(exchanged.end(), rows.begin(), rows.begin() + model.hidden_size);
  whole.write_rows(e, 3, 2, exchanged.data());
  EXPECT_NE(checksum_rows(whole, 0, 0, e.rows), before);
  whole.write_rows(e, 3, 2, rows.data());
  EXPECT_EQ(checksum_rows(whole, 0, 0, e.rows), before);
  rows[5] += 0.125f;
  whole.write_rows(e, 3, 2, rows.data());
  EXPECT_NE(checksum_rows(whole, 0, 0, e.rows), before);
}

}  // namespace
}  // namespace tandem
