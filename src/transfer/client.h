// The driver's side of a weight update: both steps of the transaction over all ranks, and between
// them the proof that every box arrived as it left. No torch here.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/json.h"
#include "http/client.h"

namespace tandem {

// What an update cost; each part is the maximum over ranks.
struct UpdateTimes {
  double seconds = 0;        // from the optimizer's last write (else the call) to ready to serve
  double pause_seconds = 0;  // of engines that are paused for it and continue after it
  double announce_seconds = 0, move_seconds = 0, verify_seconds = 0, swap_seconds = 0;
  std::int64_t total_bytes = 0, moved_bytes = 0;  // over all engine ranks
  std::int64_t num_verified = 0;                  // boxes compared
  std::int64_t decoded_tokens = 0;                // that engines sampled while weights moved
};

class UpdateClient {
 public:
  // One address a rank, index = rank. The fetcher must outlive the client.
  UpdateClient(std::vector<http::Address> ranks, http::Fetcher& fetcher)
      : ranks_(std::move(ranks)), fetcher_(fetcher) {}

  // All engines serve `version` on return. Error naming the rank that failed, or tensor and ranks
  // of a box that differs; no engine has swapped then. since_write: count from the optimizer's last
  // write; else from the call, if something else was waited for. before_swap (may be empty): makes
  // engines rest that went on while weights moved; its time counts as pause.
  UpdateTimes update(std::int64_t version, bool since_write, Deadline deadline,
                     const std::function<void()>& before_swap = {});
  // That every engine serves `version`, and in each tensor what the trainer's master weights give.
  // Error naming the ranks, the tensor and both checksums. Returns the boxes compared.
  std::int64_t check(std::int64_t version, Deadline deadline);

 private:
  // POSTs to all ranks; the answers, and for errors who gave them.
  struct Answers {
    std::vector<Json> json;
    std::vector<std::string> sources;
  };
  Answers call(const std::string& path, std::int64_t version, Deadline deadline);

  std::vector<http::Address> ranks_;
  http::Fetcher& fetcher_;
};

}  // namespace tandem
