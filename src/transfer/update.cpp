// One rank's part of the transaction.
#include "transfer/update.h"

#include "base/check.h"
#include "base/clock.h"

namespace tandem {

WeightUpdate::WeightUpdate(const TransferSetup& setup, std::unique_ptr<Transfer> transfer,
                           std::optional<EngineSide> engine)
    : setup_(setup), transfer_(std::move(transfer)), engine_(std::move(engine)) {
  for (const TransferBox& b : setup.plan.boxes)
    if (setup.target_process[b.target_rank] == setup.process)
      target_bytes_ += b.rows * b.row_elements *
                       (setup.target_layouts[b.target_rank].element == Element::f32 ? 4 : 2);
}

MoveReport WeightUpdate::move(std::int64_t version) {
  MoveReport report;
  report.version = version;
  report.total_bytes = target_bytes_;
  double mark = monotonic_seconds();
  auto lap = [&] {
    const double now = monotonic_seconds(), passed = now - mark;
    mark = now;
    return passed;
  };
  staged_ = -1;
  if (engine_) {
    const std::int64_t served = engine_->version();
    TD_CHECK(version == served + 1,
             "weight update: version {} announced while the engine serves {}; {} wanted", version,
             served, served + 1);
    TD_CHECK(engine_->quiet(),
             "weight update: the engine still runs samples on version {}; pause it first", served);
  }
  if (engine_ && engine_->overwrite) engine_->overwrite();
  report.announce_seconds = lap();
  report.moved_bytes = transfer_->move();
  report.move_seconds = lap();
  for (std::size_t i = 0; i < setup_.plan.boxes.size(); ++i) {
    const TransferBox& b = setup_.plan.boxes[i];
    if (b.in_place) continue;
    const ArenaLayout& from = setup_.source_layouts[b.source_rank];
    const std::string& tensor = from.entries[b.source_entry].hf_name;
    const auto index = static_cast<std::int64_t>(i);
    if (setup_.source_process[b.source_rank] == setup_.process)
      report.sent.push_back(
          {index, tensor, checksum_rows(*setup_.source, b.source_entry, b.source_row, b.rows)});
    if (setup_.target_process[b.target_rank] == setup_.process)
      report.received.push_back(
          {index, tensor, checksum_rows(*setup_.target, b.target_entry, b.target_row, b.rows)});
  }
  report.verify_seconds = lap();
  staged_ = version;
  return report;
}

void WeightUpdate::swap(std::int64_t version) {
  TD_CHECK(staged_ == version, "weight update: swap to version {} without its weights; move first",
           version);
  staged_ = -1;
  if (engine_) engine_->swap(version);
}

}  // namespace tandem
