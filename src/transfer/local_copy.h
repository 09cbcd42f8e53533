// Boxes that a process copies by itself: from its own trainer's arena, or from that of a peer on
// the same host, which it maps into its memory. Nothing is sent; the peer only keeps still. Between
// GPUs the reads go over NVLink, and a peer that cannot be mapped is one on another host.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "base/descriptor_passing.h"
#include "transfer/transfer.h"

namespace tandem {

// Another process's shared arena in this one's memory, to be read.
class PeerMemory {
 public:
  // Error naming the process and the flag that does without; on a GPU data() is null then.
  PeerMemory(Store& store, int process, Place place, double timeout_seconds);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;
  const std::byte* data() const { return data_; }

 private:
  Place place_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Tells the others how to map this process's weights and which host it is on; once, before any of
// them asks. memory: shared, or null if it has none to show. Returns what answers those who ask, to
// be kept as long as they may; null where nobody need be asked.
std::unique_ptr<DescriptorServer> announce_memory(Store& store, int process, const Memory* memory);

class LocalCopies {
 public:
  // Takes the boxes whose target is this process and whose source is it too or, with
  // setup.shared_memory, a process of its host.
  explicit LocalCopies(const TransferSetup& setup);
  // Whether a box is copied by its target rather than sent.
  bool takes(const TransferBox& box) const;
  // Returns the bytes copied; adds their checksums (Transfer::move).
  std::int64_t copy(std::span<RowsSum> sums);

 private:
  void agree_on_peers();
  RowsView view_source(const TransferBox& box) const;
  std::int64_t copy_on_gpu(std::span<RowsSum> sums);
  const TransferSetup& setup_;
  std::vector<char> shares_;  // [processes²], source and target: the target maps the source
  std::map<int, PeerMemory> peers_;
  std::vector<const TransferBox*> boxes_;
};

}  // namespace tandem
