// A rank's part of weight updates over HTTP: POST /weights/move, /weights/swap and, to see that it
// worked, /weights/check, each with {"weight_version": v}. The work runs on the compute thread, a
// move on a thread beside it where the engine goes on meanwhile.
#pragma once

#include <functional>
#include <vector>

#include "http/server.h"
#include "transfer/update.h"

namespace tandem {

struct WeightHooks {
  std::function<void(std::function<void()>)> post;       // runs work on the compute thread
  std::function<void(std::function<void()>)> post_move;  // runs a move
  // Monotonic seconds of the trainer's last optimizer write (0: none since the last update, or no
  // trainer here).
  std::function<double()> last_write;
  // The trainer's master weights, gathered with the other trainer ranks; empty: no trainer here.
  std::function<std::vector<float>()> gather;
  std::function<void()> after_swap = {};  // on the compute thread; may be empty
};
void add_weight_routes(http::Server& server, WeightHooks hooks, WeightUpdate& update);

}  // namespace tandem
