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

class Fleet {
 public:
  // Starts every rank and waits until all serve. config is resolved, kv_cache_tokens included.
  Fleet(const Config& config, const Placement& placement);
  ~Fleet();
  Fleet(const Fleet&) = delete;
  Fleet& operator=(const Fleet&) = delete;

  std::vector<EngineClient*> engines();
  TrainerClient& trainer() { return *trainer_; }
  // The next weight version: moved, verified, served by all engines.
  UpdateTimes update_weights(Deadline deadline);
  // Of the rank that holds most; the peak is since the last call.
  ProcessMemory memory(Deadline deadline);
  std::int64_t weight_version() const { return weight_version_; }
  // A run that continues: the next update is version + 1.
  void set_weight_version(std::int64_t version) { weight_version_ = version; }
  std::int64_t num_ranks() const { return static_cast<std::int64_t>(placement_.ranks.size()); }

  std::vector<RankDeath> deaths(Deadline deadline) { return cluster_->deaths(deadline); }
  // Ends all ranks.
  void stop(Deadline deadline);

 private:
  Placement placement_;
  std::optional<Store> store_;
  std::unique_ptr<Cluster> cluster_;
  http::Fetcher fetcher_;
  std::vector<http::Call> memory_calls_;  // one a rank
  std::vector<std::unique_ptr<EngineClient>> engines_;
  std::optional<TrainerClient> trainer_;
  std::optional<UpdateClient> update_;
  std::int64_t weight_version_ = 0;
};

}  // namespace tandem
