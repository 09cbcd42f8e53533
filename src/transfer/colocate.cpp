// The colocated way. Over one arena nothing moves: the optimizer's write was the update. An engine
// with an arena of its own beside its trainer (tensor parallel, or double-buffered) copies its
// rows.
#include "transfer/local_copy.h"

namespace tandem {
namespace {

class ColocateTransfer final : public Transfer {
 public:
  explicit ColocateTransfer(const TransferSetup& setup) : copies_(setup) {}
  std::int64_t move(std::span<RowsSum> sums) override { return copies_.copy(sums); }

 private:
  LocalCopies copies_;
};

}  // namespace

std::unique_ptr<Transfer> make_colocate_transfer(const TransferSetup& setup) {
  return std::make_unique<ColocateTransfer>(setup);
}

}  // namespace tandem
