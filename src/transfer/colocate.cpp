// Colocated update, both ends. In place it cannot be taken back: the trainer has written the very
// memory that the engine reads, which is why the engine must hold no running sample and why the
// optimizer writes only after it has seen a finite gradient norm.
#include <vector>

#include "base/check.h"
#include "base/clock.h"
#include "transfer/transfer.h"

namespace tandem {
namespace {

class ColocateTransfer final : public Transfer {
 public:
  ColocateTransfer(const Arena& trainer, Arena& engine, EngineSide engine_side)
      : trainer_(trainer), engine_(engine), engine_side_(std::move(engine_side)) {
    const bool shared = &trainer == &engine;
    plan_ = make_transfer_plan({{&trainer.layout(), 0, shared}}, {{&engine.layout(), 0, shared}});
  }

  UpdateReport update(std::int64_t version) override {
    UpdateReport report{
        .version = version, .total_bytes = plan_.total_bytes, .moved_bytes = plan_.moved_bytes};
    double mark = monotonic_seconds();
    auto lap = [&] {
      const double now = monotonic_seconds(), passed = now - mark;
      mark = now;
      return passed;
    };
    const std::int64_t served = engine_side_.version();
    TD_CHECK(version == served + 1,
             "weight update: version {} announced while the engine serves {}; {} wanted", version,
             served, served + 1);
    TD_CHECK(engine_side_.quiet(),
             "weight update: the engine still runs samples on version {}; pause it first", served);
    report.announce_seconds = lap();
    const std::int64_t source_version = trainer_.version();
    for (const TransferBox& box : plan_.boxes)
      if (!box.in_place) move(box);
    report.move_seconds = lap();
    verify(source_version);
    report.verify_seconds = lap();
    if (&engine_ != &trainer_) engine_.set_version(source_version);
    engine_side_.swap(version);
    report.swap_seconds = lap();
    return report;
  }

 private:
  void move(const TransferBox& box) {
    rows_.resize(static_cast<std::size_t>(box.rows * box.row_elements));
    trainer_.read_rows(trainer_.layout().entries[box.source_entry], box.source_row, box.rows,
                       rows_.data());
    engine_.write_rows(engine_.layout().entries[box.target_entry], box.target_row, box.rows,
                       rows_.data());
  }

  void verify(std::int64_t source_version) const {
    TD_CHECK(trainer_.version() == source_version,
             "weight update: the trainer wrote version {} while version {} was moving",
             trainer_.version(), source_version);
  }

  const Arena& trainer_;
  Arena& engine_;
  EngineSide engine_side_;
  TransferPlan plan_;
  std::vector<float> rows_;
};

}  // namespace

std::unique_ptr<Transfer> make_colocate_transfer(const Arena& trainer, Arena& engine,
                                                 EngineSide engine_side) {
  return std::make_unique<ColocateTransfer>(trainer, engine, std::move(engine_side));
}

}  // namespace tandem
