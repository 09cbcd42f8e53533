// Users' Python functions in helper processes: many calls at once, each with its own end.
//
// What a caller can rely on: every call that was submitted comes back exactly once, with a value or
// with a text that says why there is none; nothing that a function does (raise, hang, crash, take
// all memory, print) touches another call or the run. A process that dies or does not answer is
// ended and replaced. The calls that were open in it are run once more, each alone in a process, so
// that the guilty one is known: it fails, the others succeed. A call that hung alone fails at once.
// One thread uses a pool; processes live as long as it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/json.h"
#include "base/pipe.h"
#include "base/process.h"
#include "data/python_process.h"

namespace tandem {

struct FunctionOptions {
  std::string name;       // for messages: "--custom-rm-path my.rewards.f"
  std::string load_json;  // the request that loads the function (python/tandem/function_helper.py)
  std::int64_t num_processes = 1;
  std::int64_t calls_per_process = 64;  // open at once in a process, if the function is async
  double call_timeout_seconds = 120;
  double start_timeout_seconds = 120;  // a process's start with all imports
  std::int64_t memory_limit_mb = 0;    // of one process; 0: none
  PythonPlace place = project_python();
  std::string log_path;  // standard error of all processes; empty: it is dropped
};

struct FunctionResult {
  std::uint64_t id = 0;
  std::string error;  // empty: value holds
  Json value;

  bool ok() const { return error.empty(); }
};

class FunctionPool {
 public:
  explicit FunctionPool(FunctionOptions options);
  ~FunctionPool();
  FunctionPool(const FunctionPool&) = delete;
  FunctionPool& operator=(const FunctionPool&) = delete;

  // Starts one process and loads the function. Error with the fault's text if that fails.
  void check();
  // `fields`: members of the request beside call and id, "\"samples\":[…]". Ids differ.
  void submit(std::uint64_t id, const std::string& fields);
  std::size_t num_open() const { return open_; }
  // Moves calls and answers along, waits for one at most until the deadline; returns what ended.
  // Error if the function cannot be loaded any more.
  std::vector<FunctionResult> poll(Deadline deadline);

  std::int64_t num_starts() const { return num_starts_; }
  // Resident memory of the processes together.
  std::int64_t resident_bytes() const;

 private:
  struct Call {
    std::uint64_t id = 0;
    std::string request;
    int failures = 0;     // processes that ended with it
    double deadline = 0;  // monotonic; 0: not running
  };
  struct Worker {
    std::optional<Process> process;
    std::optional<FramedPipe> pipe;
    std::vector<Call> running;
    bool alone = false;  // its call must stay the only one
  };

  std::string last_errors() const;
  void start(Worker& worker);
  void stop(Worker& worker);
  void feed();
  void read_all(std::vector<FunctionResult>& results);
  void fail(Worker& worker, const std::string& why, bool hung,
            std::vector<FunctionResult>& results);
  double next_deadline() const;
  double call_deadline() const;  // of a call that begins now

  FunctionOptions options_;
  std::vector<Worker> workers_;
  std::deque<Call> waiting_;
  std::size_t open_ = 0;
  bool is_async_ = false;
  bool gave_notice_ = false;  // a process told that the function blocks
  std::int64_t num_starts_ = 0;
  int failed_starts_ = 0;  // in a row
};

}  // namespace tandem
