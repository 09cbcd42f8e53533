// What a rank computes with: folder, arena, model, KV pool and engine, put together from a config.
// Used by `tandem rank`, and alone by the commands that serve or generate without training.
#pragma once

#include <memory>
#include <string>

#include "checkpoint/hf_folder.h"
#include "comm/fanout.h"
#include "comm/group.h"
#include "config/config.h"
#include "engine/engine.h"
#include "engine/mailbox.h"
#include "engine/runner.h"
#include "model/arena.h"
#include "model/kv_pool.h"
#include "model/model.h"

namespace tandem {

// Threads, kernels and the device of this process; before any other call, and from the thread that
// will compute. Returns a line for the log.
std::string start_compute(const ComputeConfig& config);

Place compute_place(Device device);

// The element type of --dtype for this processor and folder.
Element compute_element(ComputeDtype dtype);

// A model folder's weights in an arena.
struct Weights {
  Weights(const std::string& folder_path, Element element, Place place = Place::cpu);
  HfFolder folder;
  Arena arena;
};

// What an engine over several tensor-parallel ranks needs besides; all null for one rank.
struct EnginePeers {
  Group* group = nullptr;       // of the engine's ranks; the leader is rank 0
  Link* link = nullptr;         // of the same, on GPUs
  Fanout* followers = nullptr;  // the leader's stream of plans
  double timeout_seconds = 60;  // for a follower to take a plan
};

// An engine over an arena, or the leader's part of it. Its step refuses to run on weights that no
// update has published.
class EngineWorker {
 public:
  // kv_tokens: positions of the KV cache over all samples. vocabulary: for texts that end answers.
  EngineWorker(const HfFolder& folder, Arena& arena, const EngineConfig& config,
               std::int64_t kv_tokens, std::function<void()> wake, EnginePeers peers = {},
               std::shared_ptr<const Vocabulary> vocabulary = {});

  Engine& engine() { return *engine_; }
  Mailbox& mailbox() { return mailbox_; }
  const EngineLimits& limits() const { return limits_; }
  std::int64_t kv_bytes() const { return pool_.bytes(); }
  // Of prompt and answer together; decides long rope's factors (Model::set_longest_sequence).
  void set_longest_sequence(std::int64_t tokens) { model_.set_longest_sequence(tokens); }
  void perturb() { model_.perturb(); }  // --debug-perturb-kernel engine
  // The present content of the arena is what the engine serves from now on.
  void publish();
  // Gives the KV cache's memory back until the next step, which takes it again; what prefixes were
  // known is forgotten. False (and nothing happens) while samples run, wait or hold KV.
  bool release_kv();
  bool kv_released() const { return pool_.released(); }
  std::int64_t captured_graphs() const { return runner_.captured_graphs(); }
  // The arena's content is no whole version: no step runs before the next publish().
  void unpublish() { published_ = kNothing; }

 private:
  static constexpr std::int64_t kNothing = -1;
  void check_published() const;

  Arena& arena_;
  Model model_;
  KvPool pool_;
  Runner runner_;
  Mailbox mailbox_;
  EngineLimits limits_;
  std::int64_t published_ = 0;
  std::unique_ptr<Engine> engine_;
};

// Another part of an engine: runs the plans that the leader sends, and decides nothing.
class EngineFollower {
 public:
  EngineFollower(const HfFolder& folder, Arena& arena, std::int64_t kv_tokens,
                 const EnginePeers& peers);

  void run(const StepPlan& plan) { runner_.follow(plan); }
  std::int64_t kv_bytes() const { return pool_.bytes(); }
  void set_longest_sequence(std::int64_t tokens) { model_.set_longest_sequence(tokens); }
  void perturb() { model_.perturb(); }
  void publish() { model_.rebind(); }

 private:
  Model model_;
  KvPool pool_;
  Runner runner_;
};

}  // namespace tandem
