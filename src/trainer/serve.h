// The trainer's HTTP face. Handlers check on the server's thread and post the work; it runs on the
// rank's compute thread between two engine steps, and the answer comes from there.
#pragma once

#include <functional>

#include "http/server.h"
#include "trainer/client.h"
#include "trainer/trainer.h"

namespace tandem {

using PostWork = std::function<void(std::function<void()>)>;

// /trainer/train, …/update_reference, …/save, …/load, …/publish, …/save_hf. All must outlive the
// server. before_train: called on the compute thread before each training step, to make room.
void add_trainer_routes(http::Server& server, PostWork post, Trainer& trainer,
                        std::function<void()> before_train = {});

}  // namespace tandem
