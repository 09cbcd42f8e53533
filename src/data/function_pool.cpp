// See function_pool.h.
#include "data/function_pool.h"

#include <poll.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/memory.h"

namespace tandem {
namespace {

constexpr double kWriteSeconds = 10;      // a request into the pipe of a living process
constexpr double kAsyncGraceSeconds = 5;  // the process judges asynchronous calls first
constexpr double kStopGraceSeconds = 1;
constexpr int kMaxFailedStarts = 3;
constexpr std::size_t kShownErrorLines = 12;

}  // namespace

FunctionPool::FunctionPool(FunctionOptions options)
    : options_(std::move(options)), workers_(static_cast<std::size_t>(options_.num_processes)) {}

FunctionPool::~FunctionPool() {
  for (Worker& worker : workers_) stop(worker);
}

void FunctionPool::stop(Worker& worker) {
  if (!worker.process) return;
  worker.pipe->close_write();
  if (!worker.running.empty() || !worker.process->wait(Deadline::after(kStopGraceSeconds)))
    worker.process->terminate(kStopGraceSeconds);
  worker.pipe.reset();
  worker.process.reset();
  worker.alone = false;
}

std::string FunctionPool::last_errors() const {
  if (options_.log_path.empty()) return "";
  const std::string lines = read_last_lines(options_.log_path, kShownErrorLines);
  return lines.empty() ? "" : fmt::format("; last lines of {}:\n{}", options_.log_path, lines);
}

void FunctionPool::start(Worker& worker) {
  SpawnOptions spawn =
      python_spawn(options_.place, options_.name, "tandem.function_helper",
                   {"--memory-limit-mb", std::to_string(options_.memory_limit_mb)});
  if (!options_.log_path.empty()) spawn.err = Stream::log;
  spawn.log_path = options_.log_path;
  std::string why;
  while (failed_starts_ < kMaxFailedStarts) {
    worker.process.emplace(Process::spawn(spawn));
    ++num_starts_;
    worker.pipe.emplace(std::move(worker.process->out()), std::move(worker.process->in()),
                        fmt::format("{} (pid {})", options_.name, worker.process->pid()));
    const Deadline deadline = Deadline::after(options_.start_timeout_seconds);
    PipeState state = worker.pipe->write(options_.load_json, deadline);
    Frame frame;
    if (state == PipeState::ok) {
      frame = worker.pipe->read(deadline);
      state = frame.state;
    }
    if (state == PipeState::ok) {
      const Json reply = parse_json(frame.payload, options_.name);
      const auto fault = optional_key<std::string>(reply, "error", options_.name, "");
      TD_CHECK(fault.empty(), "{}: cannot be loaded: {}", options_.name, fault);
      is_async_ = require<bool>(reply, "is_async", options_.name);
      failed_starts_ = 0;
      return;
    }
    ++failed_starts_;
    why = worker.pipe->describe(state);
    stop(worker);
  }
  throw Error(fmt::format("{}: its process could not be started {} times; {}{}", options_.name,
                          kMaxFailedStarts, why, last_errors()));
}

void FunctionPool::check() {
  if (!workers_.front().process) start(workers_.front());
}

std::int64_t FunctionPool::resident_bytes() const {
  std::int64_t bytes = 0;
  for (const Worker& worker : workers_)
    if (worker.process) bytes += process_memory(worker.process->pid()).resident_bytes;
  return bytes;
}

void FunctionPool::submit(std::uint64_t id, const std::string& fields) {
  waiting_.push_back(
      {.id = id, .request = fmt::format(R"({{"call":"run","id":{},{}}})", id, fields)});
  ++open_;
}

double FunctionPool::call_deadline() const {
  return monotonic_seconds() + options_.call_timeout_seconds +
         (is_async_ ? kAsyncGraceSeconds : 0.0);
}

// Waiting calls into the processes that have room.
void FunctionPool::feed() {
  for (Worker& worker : workers_) {
    while (!waiting_.empty() && !worker.alone) {
      const bool retried = waiting_.front().failures > 0;
      if (!worker.process) start(worker);  // says whether calls may run side by side
      const auto room =
          static_cast<std::size_t>(is_async_ && !retried ? options_.calls_per_process : 1);
      if (worker.running.size() >= room) break;
      Call call = std::move(waiting_.front());
      waiting_.pop_front();
      worker.alone = retried;
      call.deadline = call_deadline();
      const PipeState state = worker.pipe->write(call.request, Deadline::after(kWriteSeconds));
      worker.running.push_back(std::move(call));
      if (state != PipeState::ok) break;  // read_all sees the closed pipe or the deadline passes
    }
  }
}

// Ends a worker whose process is gone (or hangs) and decides what becomes of its calls.
void FunctionPool::fail(Worker& worker, const std::string& why, bool hung,
                        std::vector<FunctionResult>& results) {
  std::vector<Call> calls = std::move(worker.running);
  worker.running.clear();
  const bool known = calls.size() == 1;
  if (worker.process && hung) worker.process->signal_group(SIGKILL);
  stop(worker);
  for (Call& call : calls) {
    ++call.failures;
    if (known && (hung || call.failures > 1)) {
      results.push_back({.id = call.id, .error = why, .value = {}});
      --open_;
      continue;
    }
    waiting_.push_front(std::move(call));
  }
}

void FunctionPool::read_all(std::vector<FunctionResult>& results) {
  for (Worker& worker : workers_) {
    while (worker.process && !worker.running.empty()) {
      Frame frame = worker.pipe->read(Deadline::after(0));
      if (frame.state == PipeState::timed_out) break;
      if (frame.state == PipeState::closed) {
        const auto exit = worker.process->wait(Deadline::after(kStopGraceSeconds));
        const std::string why =
            fmt::format("its process ended: {}", exit ? exit->describe() : "it closed its pipe");
        TD_LOG(warn, "{}: {} with {} calls open{}", options_.name, why, worker.running.size(),
               last_errors());
        fail(worker, why, false, results);
        break;
      }
      Json reply = parse_json(frame.payload, options_.name);
      if (const auto notice = reply.find("notice"); notice != reply.end()) {
        if (!std::exchange(gave_notice_, true))
          TD_LOG(warn, "{}: {}", options_.name, notice->get<std::string>());
        continue;
      }
      const auto id = require<std::uint64_t>(reply, "id", options_.name);
      const auto call = std::find_if(worker.running.begin(), worker.running.end(),
                                     [&](const Call& c) { return c.id == id; });
      if (call == worker.running.end()) continue;
      worker.running.erase(call);
      worker.alone = false;
      // The process is alive and holds each call's own time itself; those that one blocking call
      // kept from beginning have theirs yet.
      if (is_async_)
        for (Call& other : worker.running) other.deadline = call_deadline();
      --open_;
      const auto value = reply.find("value");
      results.push_back({.id = id,
                         .error = optional_key<std::string>(reply, "error", options_.name, ""),
                         .value = value == reply.end() ? Json() : std::move(*value)});
    }
    const double now = monotonic_seconds();
    if (std::any_of(worker.running.begin(), worker.running.end(),
                    [&](const Call& c) { return c.deadline <= now; }))
      fail(worker, fmt::format("no result within {:g} s", options_.call_timeout_seconds), true,
           results);
  }
}

double FunctionPool::next_deadline() const {
  double next = INFINITY;
  for (const Worker& worker : workers_)
    for (const Call& call : worker.running) next = std::min(next, call.deadline);
  return next;
}

std::vector<FunctionResult> FunctionPool::poll(Deadline deadline) {
  std::vector<FunctionResult> results;
  while (true) {
    read_all(results);
    feed();  // also what a process that is gone left behind
    if (!results.empty() || open_ == 0 || deadline.expired()) return results;
    std::vector<pollfd> descriptors;
    for (const Worker& worker : workers_)
      if (worker.process && !worker.running.empty())
        descriptors.push_back({.fd = worker.pipe->read_fd(), .events = POLLIN, .revents = 0});
    const double wait = std::min(deadline.remaining(), next_deadline() - monotonic_seconds());
    const int milliseconds = static_cast<int>(std::clamp(std::ceil(wait * 1e3), 0.0, 60000.0));
    ::poll(descriptors.data(), descriptors.size(), milliseconds);
  }
}

}  // namespace tandem
