// The door between an engine's compute thread and everybody else (HTTP thread, rank).
//
// Others post commands; the engine takes them between two steps, so a command never sees a batch
// half done. Answers are callbacks, called on the compute thread: they must not block. The engine
// publishes a snapshot of its state after every step, which anybody may read at any time, also
// while the compute thread is busy with something else. Posting never blocks on the engine.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "engine/request.h"

namespace tandem {

struct ControlAnswer {
  bool ok = true;
  std::string message;
};
using ControlReply = std::function<void(const ControlAnswer&)>;

// The request has passed check_request with the engine's limits.
struct GenerateCommand {
  GenerateRequest request;
  GenerateCallback on_finish;
  TokenCallback on_token = {};  // may be empty
  std::uint64_t ticket = 0;     // what a CancelCommand names it by; 0: nothing does
};
// Nobody waits for the request any more. Ends it as an abort does, if it has not ended.
struct CancelCommand {
  std::uint64_t ticket = 0;
};
// Ends requests whose rid begins with the prefix; the empty prefix ends all.
struct AbortCommand {
  std::string rid_prefix;
  ControlReply reply;
};
struct PauseCommand {
  PauseMode mode = PauseMode::abort;
  ControlReply reply;
};
struct ContinueCommand {
  ControlReply reply;
};
struct FlushCommand {
  ControlReply reply;
};
// Answered after one token has been generated; at once while the engine is paused.
struct ProbeCommand {
  ControlReply reply;
};

using Command = std::variant<GenerateCommand, CancelCommand, AbortCommand, PauseCommand,
                             ContinueCommand, FlushCommand, ProbeCommand>;

struct EngineStats {
  std::int64_t running = 0;
  std::int64_t waiting = 0;
  std::int64_t free_blocks = 0;
  std::int64_t total_blocks = 0;
  std::int64_t tokens_sampled = 0;
  std::int64_t rows_computed = 0;
  std::int64_t rows_cached = 0;
  std::int64_t cached_blocks = 0;
  std::int64_t preemptions = 0;
  std::int64_t steps = 0;
  std::int64_t weight_version = 0;
  bool paused = false;
};

class Mailbox {
 public:
  // `wake` is called after each post, on the poster's thread: for an owner that waits elsewhere.
  explicit Mailbox(std::function<void()> wake = {}) : wake_(std::move(wake)) {}

  void post(Command command);

  // Swaps the posted commands, in order of posting, with `taken` (which the caller has emptied).
  void take(std::vector<Command>& taken);

  bool waiting() const;  // whether there is a command to take

  // Waits for a command; false if none came before the deadline.
  bool wait(const Deadline& deadline);

  void publish(const EngineStats& stats);
  EngineStats stats() const;

 private:
  std::function<void()> wake_;
  mutable std::mutex mutex_;
  std::condition_variable posted_;
  std::vector<Command> commands_;
  EngineStats stats_;
};

}  // namespace tandem
