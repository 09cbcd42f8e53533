// A rank's part of weight updates over HTTP: POST /weights/move and /weights/swap, each with
// {"weight_version": v}. The work runs on the compute thread.
#pragma once

#include <functional>

#include "http/server.h"
#include "transfer/update.h"

namespace tandem {

// post: runs work on the compute thread. last_write: monotonic seconds of the trainer's last
// optimizer write (0: none since the last update, or no trainer here).
void add_weight_routes(http::Server& server, std::function<void(std::function<void()>)> post,
                       WeightUpdate& update, std::function<double()> last_write);

}  // namespace tandem
