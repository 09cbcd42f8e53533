// How the driver talks to the trainer's ranks: every call goes to all of them at once, since they
// do it together, and blocks until the last answer or the deadline. Every error names the rank's
// address. No torch here.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "checkpoint/shards.h"
#include "data/batch.h"
#include "http/client.h"
#include "trainer/results.h"

namespace tandem {

// The parts of a checkpoint that the ranks wrote.
struct SavedParts {
  std::vector<ShardFile> files;  // by rank
  std::int64_t optimizer_steps = 0;
};

class TrainerClient {
 public:
  // One address a trainer rank, in their order. The fetcher carries the long calls; it must outlive
  // the client.
  TrainerClient(std::vector<http::Address> ranks, http::Fetcher& fetcher)
      : ranks_(std::move(ranks)), leader_(ranks_.front()), fetcher_(fetcher) {}

  // on_progress is called on this thread a few times a second while the ranks work, with the first
  // rank's counts. Error too if the ranks' results differ: their weights would.
  TrainResult train(const TrainBatch& batch, std::int64_t total_steps, Deadline deadline,
                    const std::function<void(std::int64_t done, std::int64_t total)>& on_progress);
  // The present weights become the reference's.
  void update_reference(Deadline deadline);
  // Has the ranks write their parts of a checkpoint into the folder, or take their state from one
  // and bring the weights into their arenas. `optimizer`, `reference`: their state goes along.
  SavedParts save(const std::string& folder, bool optimizer, Deadline deadline);
  void load(const std::string& folder, bool optimizer, bool reference, Deadline deadline);
  // Writes the present weights as a Hugging Face folder on the rank's file system.
  void save_hf(const std::string& folder, Deadline deadline);

 private:
  // The first rank's answer.
  Json answer(const std::string& path, const std::string& body, Deadline deadline);
  std::vector<http::Call> calls(const std::string& path, const std::string& body,
                                const std::string& content_type) const;
  std::vector<http::Address> ranks_;
  http::Client leader_;
  http::Fetcher& fetcher_;
};

}  // namespace tandem
