// Boxes that a process copies by itself: from its own trainer's arena, or from that of a peer on
// the same host, which it maps into its memory. Nothing is sent; the peer only keeps still.
#pragma once

#include <map>
#include <vector>

#include "transfer/transfer.h"

namespace tandem {

// A read-only mapping of another process's shared arena.
class PeerMemory {
 public:
  // Error naming the process and the flag that does without.
  PeerMemory(Store& store, int process, double timeout_seconds);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;
  const std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Tells the others how to map this process's weights and which host it is on; once, before any of
// them asks. memory: shared, or null if it has none to show.
void announce_memory(Store& store, int process, const Memory* memory);
// Whether two processes can share memory: both on one host, as they announced.
bool on_one_host(Store& store, int a, int b, double timeout_seconds);

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
  std::int64_t copy_on_gpu(std::span<RowsSum> sums);
  const TransferSetup& setup_;
  std::vector<char> shares_;  // [processes²]: one host
  std::map<int, PeerMemory> peers_;
  std::vector<const TransferBox*> boxes_;
};

}  // namespace tandem
