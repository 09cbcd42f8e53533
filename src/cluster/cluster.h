// The seam to wherever ranks run: starts rank processes, learns their control addresses, sees them
// die and ends them. `local` starts them on this machine; ssh and Ray fulfil the same contract.
//
// The contract with a rank process (child side: cluster/lifeline.h):
//  - its standard input holds the run's token on the first line, then what it is told, to EOF;
//  - it is started with "--announce-fd N --lifeline-fd M" appended to its arguments; when it
//  serves,
//    it writes one line 'ready {"port": …}' to N;
//  - when M reaches its end the driver is gone, and the rank ends itself and its children.
// The cluster ends what it started and touches nothing else.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/json.h"
#include "base/process.h"
#include "http/client.h"

namespace tandem {

struct RankSpec {
  int rank = 0;
  std::vector<std::string> argv = {};  // {own_executable(), "rank"}
  std::vector<std::pair<std::string, std::string>> env = {};
  std::string token = {};   // of the run; no newline
  std::string config = {};  // what it is told: assignment and resolved config, as JSON
};

struct RankHandle {
  int rank = 0;
  std::string host;  // where it runs, for people
  pid_t pid = 0;
  http::Address address;  // its control server; port 0 until it has announced itself
  Json announcement;      // all that it announced
};

struct RankDeath {
  int rank = 0;
  ProcessExit exit;
  std::string
      text;  // "rank 0 (pid 12 on localhost): killed by signal 9 (Killed); the last lines …"
};

class Cluster {
 public:
  virtual ~Cluster() = default;

  // Starts a process; returns before it serves. Throws Error if it cannot be started.
  virtual RankHandle start(const RankSpec& spec) = 0;

  // Waits until every started rank has announced itself; handles in order of start. Throws Error
  // as soon as one of them dies, or naming those still missing when the deadline passes.
  virtual std::vector<RankHandle> wait_ready(Deadline deadline) = 0;

  // Ranks that ended without being told to, each reported once. Returns at once if there is one,
  // else waits for one until the deadline.
  virtual std::vector<RankDeath> deaths(Deadline deadline) = 0;

  // Ends all ranks, the last started first: closes their lifelines and gives them until the
  // deadline to go, then SIGTERM, then SIGKILL. Afterwards none is left. The destructor does it
  // too.
  virtual void stop(Deadline deadline) = 0;
};

// Ranks on this machine. Their output goes to <run_folder>/logs/rank_N.log. Used from one thread,
// which must live as long as the ranks (PR_SET_PDEATHSIG).
std::unique_ptr<Cluster> make_local_cluster(const std::string& run_folder);

}  // namespace tandem
