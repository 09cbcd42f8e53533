// Point to point: every engine process gets exactly the rows that it holds, from the process that
// the plan names. Inside a host the target reads them from the owner's memory; between hosts all
// pairs stream at once, and nobody receives a byte that it does not keep.
#include <map>

#include "transfer/local_copy.h"
#include "transfer/parts.h"

namespace tandem {
namespace {

class P2pTransfer final : public Transfer {
 public:
  explicit P2pTransfer(const TransferSetup& setup) : copies_(setup), streams_(setup) {
    std::map<int, std::vector<StreamPart>> outgoing, incoming;  // by peer
    std::map<int, std::int64_t> source_of;
    for (const TransferBox& box : setup.plan.boxes) {
      if (!is_sent(box)) continue;
      const int from = setup.source_process[box.source_rank];
      const int to = setup.target_process[box.target_rank];
      const ArenaLayout& layout = setup.source_layouts[box.source_rank];
      source_of[from] = box.source_rank;
      const auto add = [&](std::vector<StreamPart>& parts) {
        add_parts(parts, layout, source_piece(box), {&box}, part_limit(setup));
      };
      if (from == setup.process) add(outgoing[to]);
      if (to == setup.process) add(incoming[from]);
    }
    for (auto& [peer, parts] : outgoing) streams_.send({.peer = peer}, std::move(parts));
    for (auto& [peer, parts] : incoming)
      streams_.receive({.peer = peer}, source_of[peer], std::move(parts));
    streams_.open("transfer/p2p");
  }

  std::int64_t move(std::span<RowsSum> sums) override {
    const std::int64_t copied = copies_.copy(sums);
    return copied + streams_.run(sums);
  }
  bool sums_what_it_sends(const TransferBox& box) const override { return is_sent(box); }

 private:
  bool is_sent(const TransferBox& box) const { return !box.in_place && !copies_.takes(box); }

  LocalCopies copies_;
  PartStreams streams_;
};

}  // namespace

std::unique_ptr<Transfer> make_p2p_transfer(const TransferSetup& setup) {
  return std::make_unique<P2pTransfer>(setup);
}

}  // namespace tandem
