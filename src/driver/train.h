// `tandem train`: the driver. It owns prompts, rewards, advantages, the loop and the metrics; it
// never touches a weight.
#pragma once

#include <string>
#include <vector>

#include "config/config.h"

namespace tandem {

// Runs a whole training run. `config` is valid; what it leaves open is resolved here. `notes` are
// lines about the command line for the log. Returns the exit code; throws Error with the cause when
// the run cannot go on.
int run_train(Config config, const std::vector<std::string>& notes);

}  // namespace tandem
