// The body of `tandem rank`: one process that owns a weight arena and, over it, an engine, a
// trainer or both, and answers the driver over HTTP. One compute thread does everything that
// touches weights, so engine steps, optimizer steps and updates come one after the other by
// construction.
#pragma once

#include <string>
#include <vector>

namespace tandem {

// The command `tandem rank --announce-fd N --lifeline-fd M`: token and resolved config on standard
// input. Returns the exit code.
int run_rank(const std::vector<std::string>& arguments);

}  // namespace tandem
