// A Python module of python/tandem/ running as a child process that answers requests over a framed
// pipe (JSON both ways). Shared by the tokenizer and by every later helper.
//
// What a caller can rely on: a call ends by its deadline; a process that dies costs one new start
// and one retry of the call, a second death is an Error with its last lines of standard error; a
// process that does not answer in time is ended and the call is an Error (the same request would
// hang again). After any failure the next call starts a fresh process. Calls are therefore
// idempotent requests, never commands with lasting effects. One thread uses an object at a time.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/file.h"
#include "base/json.h"
#include "base/pipe.h"
#include "base/process.h"

namespace tandem {

// Where Python and the helpers' modules are found.
struct PythonPlace {
  std::string interpreter;    // path of python
  std::string module_folder;  // folder that holds the package `tandem`; goes first in PYTHONPATH
};

// The project's own: for a program in <project>/build*/ these are <project>/.venv/bin/python and
// <project>/python. Nothing is checked here; a missing interpreter is named by the first call.
PythonPlace project_python();

// How `python -m module arguments…` is started with pipes at its standard input and output; modules
// are found in the place's folder, then where PYTHONPATH says. Its standard error is dropped until
// the caller says otherwise. Error naming `who` and the interpreter if that cannot be run.
SpawnOptions python_spawn(const PythonPlace& place, std::string_view who, const std::string& module,
                          const std::vector<std::string>& arguments);

struct PythonProcessOptions {
  std::string name;    // "tokenizer", for messages
  std::string module;  // "tandem.tokenizer_helper"
  std::vector<std::string> arguments;
  PythonPlace place = project_python();
  std::string log_path;               // standard error is appended here; empty: kept in memory
  double call_timeout_seconds = 120;  // one call, a start of the process included
};

class PythonProcess {
 public:
  explicit PythonProcess(PythonProcessOptions options);
  ~PythonProcess();
  PythonProcess(const PythonProcess&) = delete;
  PythonProcess& operator=(const PythonProcess&) = delete;

  // Sends one request (JSON text) and returns the parsed reply. The first call starts the process.
  // Errors: the process cannot be started, died twice, did not answer in time, or answered
  // {"error": text}.
  Json call(std::string_view request);

  std::int64_t num_starts() const { return num_starts_; }
  pid_t pid() const { return process_ ? process_->pid() : -1; }  // -1: not running

 private:
  void start();
  void stop(double grace_seconds);
  std::optional<std::string> exchange(std::string_view request, Deadline deadline);
  std::string last_errors() const;

  PythonProcessOptions options_;
  std::string log_path_;
  Fd log_in_memory_;
  std::optional<Process> process_;
  std::optional<FramedPipe> pipe_;
  bool in_call_ = false;  // still true at the next call: the last one ended in the middle
  std::string failure_;   // how the last exchange failed
  PipeState failed_state_ = PipeState::ok;
  std::int64_t num_starts_ = 0;
};

}  // namespace tandem
