// A weight update that goes wrong on purpose: a changed weight, a process that ends in the middle,
// one that never finishes.
#include <unistd.h>

#include <algorithm>
#include <csignal>

#include "transfer/transfer.h"

namespace tandem {
namespace {

constexpr std::int64_t kBrokenMove = 3;

class BrokenTransfer final : public Transfer {
 public:
  BrokenTransfer(const TransferSetup& setup, std::unique_ptr<Transfer> whole, BrokenUpdate how)
      : setup_(setup), whole_(std::move(whole)), how_(how) {}

  std::int64_t move(std::span<RowsSum> sums) override {
    const bool broken = ++moves_ == kBrokenMove;
    // The others wait for this process's part by then.
    if (broken && how_ == BrokenUpdate::die) ::raise(SIGKILL);
    while (broken && how_ == BrokenUpdate::hang) ::pause();
    const std::int64_t bytes = whole_->move(sums);
    if (broken) corrupt(sums);
    return bytes;
  }
  bool sums_what_it_sends(const TransferBox& box) const override {
    return whole_->sums_what_it_sends(box);
  }

 private:
  // The first weight that was moved here, as if it had arrived so.
  void corrupt(std::span<RowsSum> sums) {
    for (std::size_t i = 0; i < sums.size(); ++i) {
      const TransferBox& b = setup_.plan.boxes[i];
      if (setup_.target_process[b.target_rank] != setup_.process) continue;
      const ArenaEntry& e = setup_.target->layout().entries[b.target_entry];
      std::vector<float> row(static_cast<std::size_t>(b.row_elements));
      setup_.target->read_rows(e, b.target_row, 1, row.data());
      row.front() += 1.0f;
      setup_.target->write_rows(e, b.target_row, 1, row.data());
      sums[i] = checksum_rows(*setup_.target, b.target_entry, b.target_row, b.rows);
      return;
    }
  }

  const TransferSetup& setup_;
  std::unique_ptr<Transfer> whole_;
  BrokenUpdate how_;
  std::int64_t moves_ = 0;
};

}  // namespace

std::unique_ptr<Transfer> make_broken_transfer(const TransferSetup& setup,
                                               std::unique_ptr<Transfer> whole, BrokenUpdate how) {
  if (how == BrokenUpdate::none) return whole;
  return std::make_unique<BrokenTransfer>(setup, std::move(whole), how);
}

}  // namespace tandem
