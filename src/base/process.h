// A child process: started in a process group of its own, watched through a pidfd, ended as a
// group. What can be relied on:
//  - spawn reports a failed exec (with the program's name) before it returns;
//  - the child inherits standard streams and the descriptors named in pass_fds, nothing else;
//  - when the child's end is seen, what is left of its group is killed before the number is given
//    back to the system, so no other group can be hit; the destructor kills what still runs;
//  - PR_SET_PDEATHSIG is bound to the *thread* that spawns: spawn from a thread that lives as long
//    as the children shall. It is a speed-up only; a child that must not outlive its parent
//    watches a pipe (cluster/lifeline.h).
// Not thread-safe: one thread uses a Process at a time.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/file.h"

namespace tandem {

enum class Stream {
  inherit,
  null,  // /dev/null
  pipe,  // the other end is in the Process
  log    // SpawnOptions::log_path, appended (output streams only)
};

struct SpawnOptions {
  std::vector<std::string> argv = {};  // argv[0] is looked up in PATH if it holds no '/'
  std::vector<std::pair<std::string, std::string>> env =
      {};                   // added to ours, replacing equal names
  std::string folder = {};  // working folder; empty: ours
  Stream in = Stream::null;
  Stream out = Stream::inherit;
  Stream err = Stream::inherit;
  std::string log_path = {};
  std::vector<std::pair<int, int>> pass_fds = {};  // (our descriptor, its number in the child)
  bool die_with_parent = true;
};

// How a process ended.
struct ProcessExit {
  int code = 0;    // exit code, if signal == 0
  int signal = 0;  // the signal that killed it, or 0

  bool ok() const { return code == 0 && signal == 0; }
  std::string describe() const;  // "exited with code 3", "killed by signal 9 (Killed)"
};

class Process {
 public:
  // Throws Error if the program cannot be started.
  static Process spawn(const SpawnOptions& options);

  Process(Process&&) noexcept = default;
  Process& operator=(Process&&) = delete;
  ~Process();

  pid_t pid() const { return pid_; }
  const std::string& name() const { return name_; }  // argv[0], for messages

  // Readable (poll) once the process has ended; -1 after its end was seen.
  int pidfd() const { return pidfd_.get(); }

  // Our ends of piped streams; may be moved out or closed by the caller.
  Fd& in() { return in_; }
  Fd& out() { return out_; }
  Fd& err() { return err_; }

  // The exit if the process has ended (remembered), or nothing. try_wait does not block.
  std::optional<ProcessExit> try_wait();
  std::optional<ProcessExit> wait(Deadline deadline);

  // Sends a signal to the whole group; nothing if the end was seen already.
  void signal_group(int signal);

  // SIGTERM to the group, `grace_seconds` to end, then SIGKILL; returns how the process ended.
  ProcessExit terminate(double grace_seconds);

 private:
  Process() = default;

  std::string name_;
  pid_t pid_ = -1;
  Fd pidfd_, in_, out_, err_;  // pidfd_ is open while the end was not seen
  std::optional<ProcessExit> exit_;
};

// The path of the running program, for starting it again as another command.
std::string own_executable();

// Where the part for NVIDIA GPUs lies, built or not: libtandem_cuda.so in the program's folder.
std::string cuda_part_path();
// NVIDIA GPUs whose device files this process sees, those that CUDA_VISIBLE_DEVICES leaves, by the
// names that it has for them.
std::vector<std::string> visible_gpus();
int num_gpus();

}  // namespace tandem
