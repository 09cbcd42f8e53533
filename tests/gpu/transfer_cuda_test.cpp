// A weight update into an arena of the engine's own on the same GPU: every element arrives and is
// compared on the device. And the device's checksums, by which ends on two GPUs are compared: they
// are those of the CPU's kernel.
#include <gtest/gtest.h>

#include "gpu/gpu.h"
#include "gpu/transfer_model.h"
#include "transfer/update.h"

namespace tandem {
namespace {

// Rows and columns that do and do not fill 16 bytes.
ModelConfig model(std::int64_t head_dim, std::int64_t hidden) {
  return transfer_model(head_dim, hidden, 40, 2);
}

// On a GPU the flat vector's elements come from there.
void fill(Arena& arena, const std::vector<float>& flat) {
  for (const ArenaEntry& e : arena.layout().entries)
    arena.write_rows(e, 0, e.rows, flat.data() + e.flat_begin);
}

class CudaUpdate : public testing::TestWithParam<Element> {};

TEST_P(CudaUpdate, DoubleBufferedArenaHoldsTheTrainersValues) {
  TD_NEED_GPU();
  for (const auto& [dim, hidden] : {std::pair{6, 24}, {16, 64}, {5, 19}}) {
    const ModelConfig config = model(dim, hidden);
    const ArenaLayout layout = make_arena_layout(config, GetParam(), 0, 1, Place::cuda);
    Arena source(layout), target(layout);
    const auto flat = transfer_numbers(layout.flat_elements);
    fill(source, flat);
    TransferSetup setup;
    setup.source_layouts = setup.target_layouts = {layout};
    setup.source_process = setup.target_process = {0};
    setup.plan = make_transfer_plan({{&layout, 0, false}}, {{&layout, 0, false}});
    setup.source = &source;
    setup.target = &target;
    std::int64_t version = 3;
    WeightUpdate update(setup, make_colocate_transfer(setup),
                        EngineSide{.version = [&] { return version; },
                                   .quiet = [] { return true; },
                                   .overwrite = {},
                                   .swap = [&](std::int64_t v) { version = v; }});
    const MoveReport report = update.move(4);
    update.swap(4);
    EXPECT_EQ(version, 4);
    EXPECT_EQ(report.moved_bytes, report.total_bytes);
    std::vector<float> got(flat.size());
    target.read_flat(got.data());
    EXPECT_EQ(got, flat);

    Arena host(make_arena_layout(config, GetParam()));
    fill(host, flat);
    ASSERT_EQ(report.sent.size(), setup.plan.boxes.size());
    ASSERT_EQ(report.received.size(), setup.plan.boxes.size());
    for (std::size_t i = 0; i < report.sent.size(); ++i) {
      const TransferBox& b = setup.plan.boxes[i];
      const RowsSum want = checksum_rows(host, b.source_entry, b.source_row, b.rows);
      EXPECT_EQ(checksum_rows(source, b.source_entry, b.source_row, b.rows), want)
          << report.sent[i].tensor;
      EXPECT_EQ(checksum_rows(target, b.target_entry, b.target_row, b.rows), want)
          << report.sent[i].tensor;
      EXPECT_EQ(report.sent[i].sum, report.received[i].sum);
    }
    // A row that changes at the target after the copy shows.
    std::vector<float> one(static_cast<std::size_t>(layout.storages[0].cols), 1.5f);
    target.write_rows(layout.entries[0], 0, 1, one.data());
    EXPECT_NE(checksum_rows(target, 0, 0, layout.entries[0].rows),
              checksum_rows(source, 0, 0, layout.entries[0].rows));
  }
}

INSTANTIATE_TEST_SUITE_P(Types, CudaUpdate, testing::Values(Element::f32, Element::bf16),
                         [](const auto& p) { return p.param == Element::f32 ? "f32" : "bf16"; });

}  // namespace
}  // namespace tandem
