// The ranks of a run as the driver sees them: started by the placement, found by their clients.
// Engines are one client each (their leaders), the trainer is one client over all its ranks, weight
// updates go to every rank. The run's key-value store, by which ranks find each other, lives here.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/memory.h"
#include "cluster/cluster.h"
#include "cluster/placement.h"
#include "comm/store.h"
#include "config/config.h"
#include "engine/client.h"
#include "http/client.h"
#include "trainer/client.h"
#include "transfer/client.h"

namespace tandem {

// What the ranks used.
struct RankUsage {
  ProcessMemory most;  // of the rank that holds most; the peak is since the last call
  // Seconds at work since their start, one a trainer rank and one an engine rank.
  std::vector<double> trainer_busy, engine_busy;
};

class Fleet {
 public:
  // Starts every rank and waits until all serve. config is resolved, kv_cache_tokens included.
  Fleet(const Config& config, const Placement& placement);
  ~Fleet();
  Fleet(const Fleet&) = delete;
  Fleet& operator=(const Fleet&) = delete;

  std::vector<EngineClient*> engines();
  TrainerClient& trainer() { return *trainer_; }
  // The trainer's present weights as `version`: moved, verified, served by all engines; with
  // `check`, compared anew afterwards. Engines that write answers meanwhile are paused for it, with
  // moves_aside for the swap only; without `pause` none may. See UpdateClient::update for
  // since_write.
  struct UpdateCall {
    std::int64_t version = 0;
    bool since_write = true;
    bool check = false;
    std::optional<PauseMode> pause;
    bool moves_aside = false;  // the engines have a second copy of their weights
  };
  UpdateTimes update_weights(const UpdateCall& call, Deadline deadline);
  RankUsage usage(Deadline deadline);
  std::int64_t num_ranks() const { return static_cast<std::int64_t>(placement_.ranks.size()); }

  std::vector<RankDeath> deaths(Deadline deadline) { return cluster_->deaths(deadline); }
  // Ends all ranks.
  void stop(Deadline deadline);

 private:
  Placement placement_;
  std::optional<Store> store_;
  std::unique_ptr<Cluster> cluster_;
  http::Fetcher fetcher_;
  http::Fetcher generation_;             // its own, or other calls would wait for answers to end
  std::vector<http::Call> usage_calls_;  // one a rank
  std::vector<std::unique_ptr<EngineClient>> engines_;
  std::optional<TrainerClient> trainer_;
  std::optional<UpdateClient> update_;
};

}  // namespace tandem
