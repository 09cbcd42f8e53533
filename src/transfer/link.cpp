// Weights between GPUs of several processes over NCCL, from arena to arena without a copy in
// between: both sides hold every matrix row-major in one element type, so a box is one stretch of
// device memory at both ends. Broadcast: each owner sends its boxes once, to all processes that
// take them. P2p: each process gets its boxes from the process that owns them. What arrived is
// added up on the device afterwards.
#include <algorithm>
#include <map>
#include <set>

#include "base/check.h"
#include "transfer/local_copy.h"
#include "transfer/pieces.h"

namespace tandem {
namespace {

// A communicator of some of the run's processes.
class Link {
 public:
  // `name` is fresh in the store; `members` ascend and hold `process`.
  Link(Store& store, const std::string& name, const std::vector<int>& members, int process,
       double timeout_seconds)
      : members_(members), timeout_seconds_(timeout_seconds) {
    const std::string key = "link/" + name;
    std::string id(static_cast<std::size_t>(kLinkIdBytes), '\0');
    if (process == members.front()) {
      cuda_part().new_link_id(id.data());
      store.set(key, id);
    } else {
      id = store.get(key, timeout_seconds);
    }
    TD_CHECK(static_cast<std::int64_t>(id.size()) == kLinkIdBytes,
             "weight transfer: link '{}': an id of {} bytes found, {} wanted", name, id.size(),
             kLinkIdBytes);
    link_ = cuda_part().open_link(id.data(), rank_of(process), static_cast<int>(members.size()),
                                  timeout_seconds);
  }
  ~Link() { cuda_part().close_link(link_); }
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  int rank_of(int process) const {
    return static_cast<int>(std::find(members_.begin(), members_.end(), process) -
                            members_.begin());
  }
  void exchange(const std::vector<LinkPart>& sends, const std::vector<LinkPart>& receives) {
    cuda_part().link_exchange(link_, sends.data(), static_cast<std::int64_t>(sends.size()),
                              receives.data(), static_cast<std::int64_t>(receives.size()),
                              timeout_seconds_);
  }
  void broadcast(const std::vector<LinkPart>& parts, int root) {
    cuda_part().link_broadcast(link_, parts.data(), static_cast<std::int64_t>(parts.size()), root,
                               timeout_seconds_);
  }

 private:
  std::vector<int> members_;
  double timeout_seconds_;
  void* link_ = nullptr;
};

class LinkTransfer final : public Transfer {
 public:
  LinkTransfer(const TransferSetup& setup, LinkMode mode) : setup_(setup), copies_(setup) {
    for (const TransferBox& box : setup.plan.boxes) {
      if (box.in_place || copies_.takes(box)) continue;
      if (setup.target_process[box.target_rank] == setup.process) incoming_.push_back(&box);
      if (setup.source_process[box.source_rank] == setup.process) outgoing_.push_back(&box);
    }
    mode == LinkMode::broadcast ? open_streams() : open_exchange();
  }

  std::int64_t move(std::span<RowsSum> sums) override {
    std::int64_t bytes = copies_.copy(sums);
    // All processes walk the streams in one order; a process that is not in one has none.
    for (Stream& stream : streams_) {
      std::vector<LinkPart> parts;
      for (const TransferBox* b : stream.boxes)
        parts.push_back(stream.owner ? source_part(*b) : target_part(*b));
      stream.link->broadcast(parts, stream.root);
    }
    if (exchange_) {
      std::vector<LinkPart> sends, receives;
      for (const TransferBox* b : outgoing_) sends.push_back(source_part(*b));
      for (const TransferBox* b : incoming_) receives.push_back(target_part(*b));
      exchange_->exchange(sends, receives);
    }
    std::vector<Piece> pieces;
    for (const TransferBox* b : incoming_)
      pieces.push_back({b->target_entry, b->target_row, b->rows});
    if (pieces.empty()) return bytes;
    const auto found = checksum_pieces(*setup_.target, pieces);
    for (std::size_t i = 0; i < incoming_.size(); ++i) {
      sums[static_cast<std::size_t>(incoming_[i] - setup_.plan.boxes.data())] += found[i];
      bytes += target_part(*incoming_[i]).bytes;
    }
    return bytes;
  }

 private:
  // What one owner sends to all who take it, the same boxes in the same order to each.
  struct Stream {
    std::unique_ptr<Link> link;
    bool owner = false;
    int root = 0;
    std::vector<const TransferBox*> boxes;  // an owner's: those of its first receiver
  };

  void open_streams() {
    struct Receivers {
      std::set<int> processes;
      std::map<std::int64_t, std::vector<const TransferBox*>> boxes;  // by target of the plan
    };
    std::map<std::int64_t, Receivers> sources;
    for (const TransferBox& box : setup_.plan.boxes) {
      if (box.in_place || copies_.takes(box)) continue;
      sources[box.source_rank].processes.insert(setup_.target_process[box.target_rank]);
      sources[box.source_rank].boxes[box.target_rank].push_back(&box);
    }
    for (auto& [source, to] : sources) {
      const int owner = setup_.source_process[source];
      std::vector<int> members(to.processes.begin(), to.processes.end());
      members.insert(std::upper_bound(members.begin(), members.end(), owner), owner);
      const auto& first = to.boxes.begin()->second;
      for (const auto& [target, boxes] : to.boxes)
        TD_CHECK(
            same_rows(first, boxes),
            "weight transfer: broadcast between GPUs: engine rank {} takes other rows than {}; "
            "use --update-weight-transfer-mode p2p",
            target, to.boxes.begin()->first);
      if (!std::binary_search(members.begin(), members.end(), setup_.process)) continue;
      Stream stream;
      stream.owner = owner == setup_.process;
      stream.link = std::make_unique<Link>(*setup_.store, fmt::format("broadcast/{}", source),
                                           members, setup_.process, setup_.group.timeout_seconds);
      stream.root = stream.link->rank_of(owner);
      stream.boxes = first;
      for (const auto& [target, boxes] : to.boxes)
        if (!stream.owner && setup_.target_process[target] == setup_.process) stream.boxes = boxes;
      streams_.push_back(std::move(stream));
    }
  }

  void open_exchange() {
    // Any process's boxes, so that all of them build the link or none.
    bool sends = false;
    for (const TransferBox& box : setup_.plan.boxes)
      sends = sends || (!box.in_place && !copies_.takes(box));
    if (!sends) return;
    std::vector<int> all;
    for (int p = 0; p < setup_.num_processes; ++p) all.push_back(p);
    exchange_ = std::make_unique<Link>(*setup_.store, "p2p", all, setup_.process,
                                       setup_.group.timeout_seconds);
  }

  static bool same_rows(const std::vector<const TransferBox*>& a,
                        const std::vector<const TransferBox*>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const TransferBox* x, const TransferBox* y) {
                        return x->source_entry == y->source_entry &&
                               x->source_row == y->source_row && x->rows == y->rows;
                      });
  }

  static LinkPart part_of(std::span<const std::byte> bytes, int peer) {
    return {.data = const_cast<std::byte*>(bytes.data()),
            .bytes = static_cast<std::int64_t>(bytes.size()),
            .peer = peer};
  }
  LinkPart source_part(const TransferBox& b) const {
    const RowsView view =
        view_entry(setup_.source->layout(), setup_.source->memory().data(), b.source_entry);
    return part_of(device_stretch(view, b.source_row, b.rows),
                   setup_.target_process[b.target_rank]);
  }
  LinkPart target_part(const TransferBox& b) const {
    const RowsView view =
        view_entry(setup_.target->layout(), setup_.target->memory().data(), b.target_entry);
    return part_of(device_stretch(view, b.target_row, b.rows),
                   setup_.source_process[b.source_rank]);
  }

  const TransferSetup& setup_;
  LocalCopies copies_;
  std::vector<const TransferBox*> outgoing_, incoming_;
  std::vector<Stream> streams_;
  std::unique_ptr<Link> exchange_;
};

}  // namespace

std::unique_ptr<Transfer> make_link_transfer(const TransferSetup& setup, LinkMode mode) {
  return std::make_unique<LinkTransfer>(setup, mode);
}

}  // namespace tandem
