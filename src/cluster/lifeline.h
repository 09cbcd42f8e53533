// The rank's side of the contract in cluster.h. *Lost connection = exit*: the driver holds the
// other end of the lifeline and never writes to it; however the driver ends, the system closes that
// end, and the rank goes within a second. Nothing outlives the run.
#pragma once

#include <string>

#include "base/clock.h"
#include "base/json.h"

namespace tandem {

// Exit code of a rank whose driver is gone.
inline constexpr int kLifelineExitCode = 113;

struct RankInput {
  std::string token;
  std::string config;
};

// Reads standard input (or `fd`) to its end. Throws Error on a time-out, naming the wait.
RankInput read_rank_input(int fd, Deadline deadline);

// Starts a thread that waits for the lifeline's end, then kills this process's children (each with
// its group) and exits with kLifelineExitCode, without running destructors.
void lifeline_watch(int fd);

// Writes 'ready <announcement>' and closes the descriptor. The announcement holds "port" and may
// hold "host". Throws Error if the driver does not take it.
void announce_ready(int fd, const Json& announcement);

}  // namespace tandem
