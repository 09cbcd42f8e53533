// Broadcast: each owner sends its weights once, and they go on from engine process to engine
// process, each of which keeps what is its own: so every link carries them once, all links at the
// same time. No process gathers the model. Inside a host the targets read the owner's memory
// instead.
#include <algorithm>
#include <map>
#include <set>

#include "transfer/local_copy.h"
#include "transfer/parts.h"

namespace tandem {
namespace {

class BroadcastTransfer final : public Transfer {
 public:
  explicit BroadcastTransfer(const TransferSetup& setup)
      : setup_(setup), copies_(setup), streams_(setup) {
    // Of each source: what it sends, by entry, and to whom.
    std::map<std::int64_t, std::map<std::int64_t, std::vector<const TransferBox*>>> sent;
    std::map<std::int64_t, std::set<int>> receivers;
    for (const TransferBox& box : setup.plan.boxes) {
      if (!is_sent(box)) continue;
      sent[box.source_rank][box.source_entry].push_back(&box);
      receivers[box.source_rank].insert(setup.target_process[box.target_rank]);
    }
    for (const auto& [source, entries] : sent) {
      std::vector<int> chain{setup.source_process[source]};
      chain.insert(chain.end(), receivers[source].begin(), receivers[source].end());
      const auto me = std::find(chain.begin(), chain.end(), setup.process);
      if (me != chain.end()) join(source, entries, chain, me - chain.begin());
    }
    streams_.open("transfer/broadcast");
  }

  std::int64_t move(std::span<RowsSum> sums) override {
    const std::int64_t copied = copies_.copy(sums);
    return copied + streams_.run(sums);
  }
  bool sums_what_it_sends(const TransferBox& box) const override { return is_sent(box); }

 private:
  bool is_sent(const TransferBox& box) const { return !box.in_place && !copies_.takes(box); }

  // This process's place in the chain of a source.
  void join(std::int64_t source,
            const std::map<std::int64_t, std::vector<const TransferBox*>>& entries,
            const std::vector<int>& chain, std::ptrdiff_t place) {
    const ArenaLayout& layout = setup_.source_layouts[source];
    std::vector<StreamPart> parts;
    for (const auto& [entry, boxes] : entries)
      add_parts(parts, layout, {.entry = entry, .row = 0, .rows = layout.entries[entry].rows},
                boxes, part_limit(setup_));
    const auto number = static_cast<int>(source);
    std::optional<ByteStreams::Route> onward;
    if (place + 1 < std::ssize(chain)) onward = {chain[place + 1], number};
    if (place == 0)
      streams_.send(*onward, std::move(parts));
    else
      streams_.receive({chain[place - 1], number}, source, std::move(parts), onward);
  }

  const TransferSetup& setup_;
  LocalCopies copies_;
  PartStreams streams_;
};

}  // namespace

std::unique_ptr<Transfer> make_broadcast_transfer(const TransferSetup& setup) {
  return std::make_unique<BroadcastTransfer>(setup);
}

}  // namespace tandem
