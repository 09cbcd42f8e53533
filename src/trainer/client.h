// How the driver talks to the trainer's leader rank. Calls block until the answer or the deadline;
// every error names the rank's address. No torch here.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/clock.h"
#include "data/batch.h"
#include "http/client.h"
#include "trainer/results.h"

namespace tandem {

// What a weight update cost, as the rank measured it.
struct UpdateTimes {
  double seconds = 0;  // from the optimizer's last write (else the call) to ready to serve
  double announce_seconds = 0, move_seconds = 0, verify_seconds = 0, swap_seconds = 0;
  std::int64_t total_bytes = 0, moved_bytes = 0;
};

class TrainerClient {
 public:
  // The fetcher carries the long calls; it must outlive the client.
  TrainerClient(http::Address address, http::Fetcher& fetcher)
      : client_(std::move(address)), fetcher_(fetcher) {}

  // on_progress is called on this thread a few times a second while the rank works.
  TrainResult train(const TrainBatch& batch, std::int64_t total_steps, Deadline deadline,
                    const std::function<void(std::int64_t done, std::int64_t total)>& on_progress);
  UpdateTimes update_weights(std::int64_t version, Deadline deadline);
  // Writes the present weights as a Hugging Face folder on the rank's file system.
  void save_hf(const std::string& folder, Deadline deadline);

 private:
  Json answer(const std::string& path, std::string body, Deadline deadline);
  http::Client client_;
  http::Fetcher& fetcher_;
};

}  // namespace tandem
