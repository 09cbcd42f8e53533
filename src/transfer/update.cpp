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

const std::string& WeightUpdate::tensor_of(const TransferBox& b) const {
  return setup_.source_layouts[b.source_rank].entries[b.source_entry].hf_name;
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
    TD_CHECK(version > served,
             "weight update: version {} announced while the engine serves {}; a later one wanted",
             version, served);
    if (!engine_->moves_aside) check_quiet();
  }
  if (engine_ && engine_->overwrite) engine_->overwrite();
  const bool counts = engine_ && engine_->tokens_sampled;
  const std::int64_t sampled_before = counts ? engine_->tokens_sampled() : 0;
  report.announce_seconds = lap();
  // What others copy is added up first: they do it meanwhile.
  const auto sent_later = [&](const TransferBox& b) { return transfer_->sums_what_it_sends(b); };
  const auto leaves_here = [&](const TransferBox& b) {
    return !b.in_place && setup_.source_process[b.source_rank] == setup_.process;
  };
  std::vector<RowsSum> sent(setup_.plan.boxes.size()), sums(sent.size());
  std::vector<Piece> pieces;
  std::vector<std::size_t> boxes;
  for (std::size_t i = 0; i < sent.size(); ++i) {
    const TransferBox& b = setup_.plan.boxes[i];
    if (!leaves_here(b) || sent_later(b) || setup_.copies_on_gpu(b)) continue;
    pieces.push_back(source_piece(b));
    boxes.push_back(i);
  }
  if (!pieces.empty()) {
    const auto found = checksum_pieces(*setup_.source, pieces);
    for (std::size_t i = 0; i < boxes.size(); ++i) sent[boxes[i]] = found[i];
  }
  report.verify_seconds = lap();
  report.moved_bytes = transfer_->move(sums);
  report.move_seconds = lap();
  for (std::size_t i = 0; i < sent.size(); ++i) {
    const TransferBox& b = setup_.plan.boxes[i];
    const auto box = static_cast<std::int64_t>(i);
    if (leaves_here(b))
      report.sent.push_back({box, tensor_of(b), sent_later(b) ? sums[i] : sent[i]});
    if (!b.in_place && setup_.target_process[b.target_rank] == setup_.process)
      report.received.push_back({box, tensor_of(b), sums[i]});
  }
  if (counts) report.decoded_tokens = engine_->tokens_sampled() - sampled_before;
  staged_ = version;
  return report;
}

void WeightUpdate::check_quiet() const {
  TD_CHECK(engine_->quiet(),
           "weight update: the engine still runs samples on version {}; pause it first",
           engine_->version());
}

void WeightUpdate::swap(std::int64_t version) {
  TD_CHECK(staged_ == version, "weight update: swap to version {} without its weights; move first",
           version);
  if (engine_) check_quiet();
  staged_ = -1;
  if (engine_) engine_->swap(version);
}

CheckReport WeightUpdate::check(std::span<const float> flat) const {
  CheckReport report;
  if (engine_) report.version = engine_->version();
  for (std::size_t i = 0; i < setup_.plan.boxes.size(); ++i) {
    const TransferBox& b = setup_.plan.boxes[i];
    const auto box = static_cast<std::int64_t>(i);
    if (setup_.source_process[b.source_rank] == setup_.process)
      report.fresh.push_back(
          {box, tensor_of(b),
           checksum_flat_piece(setup_.source_layouts[b.source_rank], flat, source_piece(b))});
    if (setup_.target_process[b.target_rank] == setup_.process)
      report.served.push_back(
          {box, tensor_of(b), checksum_rows(*setup_.served, b.target_entry, b.target_row, b.rows)});
  }
  return report;
}

}  // namespace tandem
