// One rollout engine: scheduler, weights' version and the mailbox, driven step by step from the
// rank's compute thread. What runs a batch is a function (runner.h makes the one over the model),
// so this file sees no tensor and a rank may put a message to its followers in between.
//
// Everything happens between two steps: commands, pause, a new weight version, abort. Invariant:
// each sampled token carries the version that was set when its batch ran. A request's on_finish is
// called exactly once, on the compute thread, after the step that ended its last sample.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/mailbox.h"
#include "engine/request.h"
#include "engine/scheduler.h"

namespace tandem {

// Runs the plan and fills one SampledToken per draw, in the plan's order.
using StepRunner = std::function<void(const StepPlan& plan, std::span<SampledToken> sampled)>;

// Runs plans beside the host: starts them in order and gives each one's tokens later.
struct AsyncRunner {
  // Whether the plan was taken; else nothing has happened. With sources, row i's token is what draw
  // sources[i] of the plan started before gives.
  std::function<bool(const StepPlan& plan, std::span<const std::int32_t> sources)> start;
  // The tokens of the oldest plan that was started and is not finished.
  std::function<void(std::span<SampledToken> sampled)> finish;
};

class Engine {
 public:
  // The mailbox must outlive the engine. `async` may be empty.
  Engine(EngineLimits limits, StepRunner runner, Mailbox& mailbox, AsyncRunner async = {});

  // Queues a request (also while paused). Throws what check_request throws.
  void add(GenerateRequest request, GenerateCallback on_finish, TokenCallback on_token = {},
           std::uint64_t ticket = 0);

  // Serves the mailbox, runs one batch unless paused, calls back for what ended. Returns whether
  // another step would run rows; if not, the caller waits on the mailbox.
  bool step();

  // Steps for as long as each can be planned and started while the one before it runs, there is no
  // mail and `wanted` (may be empty) says that nothing else wants this thread; one at least, as
  // step does. No step is under way on return. Without an asynchronous runner it is step.
  bool run(const std::function<bool()>& wanted);

  void pause(PauseMode mode);
  void resume();
  bool paused() const { return paused_; }

  // Drops cached KV. Refused (with the reason) while samples run or wait, unless paused with no
  // sample holding KV.
  ControlAnswer flush_cache();

  // Ends requests whose rid begins with the prefix (empty: all); returns how many.
  std::int64_t abort(const std::string& rid_prefix);

  // The version that the following batches' tokens carry. No prefix computed before is known any
  // more; KV that samples hold stays as it is: pause with retract first, unless mixing is wanted
  // (in_place).
  void set_weight_version(std::int64_t version);
  std::int64_t weight_version() const { return weight_version_; }

  EngineStats stats() const;

 private:
  void serve_mail();
  void serve(GenerateCommand& command);
  void serve(CancelCommand& command);
  void serve(AbortCommand& command);
  void serve(PauseCommand& command);
  void serve(ContinueCommand& command);
  void serve(FlushCommand& command);
  void serve(ProbeCommand& command);
  template <class Run>
  bool step_by(Run&& run);
  void run_plan(const StepPlan& plan);
  void run_async(const StepPlan& plan, const std::function<bool()>& wanted);
  void finish_step();
  void show_tokens();
  void deliver();

  Scheduler scheduler_;
  StepRunner runner_;
  AsyncRunner async_;
  Mailbox& mailbox_;
  std::vector<Command> mail_;
  std::vector<SampledToken> sampled_;
  struct Asker {
    GenerateCallback on_finish;
    TokenCallback on_token;
    std::uint64_t ticket = 0;
  };
  std::unordered_map<std::uint64_t, Asker> askers_;  // by request key
  std::int64_t num_streams_ = 0;                     // of them with on_token
  std::int64_t weight_version_ = 0;
  std::int64_t steps_ = 0;
  bool paused_ = false;
};

}  // namespace tandem
