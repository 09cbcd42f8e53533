// See python_process.h.
#include "data/python_process.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>

#include "base/check.h"
#include "base/log.h"

namespace tandem {
namespace {

constexpr std::size_t kShownErrorLines = 12;
constexpr double kStopGraceSeconds = 2;

}  // namespace

PythonPlace project_python() {
  const std::filesystem::path project =
      std::filesystem::path(own_executable()).parent_path().parent_path();
  return {(project / ".venv/bin/python").string(), (project / "python").string()};
}

SpawnOptions python_spawn(const PythonPlace& place, std::string_view who, const std::string& module,
                          const std::vector<std::string>& arguments) {
  TD_CHECK(::access(place.interpreter.c_str(), X_OK) == 0,
           "{}: the {} needs this Python interpreter and cannot run it: {}; run scripts/setup.sh, "
           "which makes the project's .venv",
           place.interpreter, who, errno_text(errno));
  SpawnOptions spawn;
  spawn.argv = {place.interpreter, "-m", module};
  spawn.argv.insert(spawn.argv.end(), arguments.begin(), arguments.end());
  std::string path = place.module_folder;
  if (const char* outer = std::getenv("PYTHONPATH"); outer && *outer)
    path.append(":").append(outer);
  spawn.env = {{"PYTHONPATH", path}};
  spawn.in = spawn.out = Stream::pipe;
  spawn.err = Stream::null;
  return spawn;
}

PythonProcess::PythonProcess(PythonProcessOptions options)
    : options_(std::move(options)), log_path_(options_.log_path) {
  if (!log_path_.empty()) return;
  log_in_memory_ = Fd(::memfd_create("python-stderr", MFD_CLOEXEC));
  TD_CHECK(static_cast<bool>(log_in_memory_), "{}: cannot keep its messages in memory: {}",
           options_.name, errno_text(errno));
  log_path_ = fmt::format("/proc/self/fd/{}", log_in_memory_.get());
}

PythonProcess::~PythonProcess() { stop(kStopGraceSeconds); }

void PythonProcess::start() {
  SpawnOptions spawn =
      python_spawn(options_.place, options_.name, options_.module, options_.arguments);
  spawn.err = Stream::log;
  spawn.log_path = log_path_;
  process_.emplace(Process::spawn(spawn));
  ++num_starts_;
  pipe_.emplace(std::move(process_->out()), std::move(process_->in()),
                fmt::format("{} (pid {})", options_.name, process_->pid()));
}

// Closes its input, which ends a helper that is idle; one that is not is ended after the grace.
void PythonProcess::stop(double grace_seconds) {
  if (!process_) return;
  pipe_->close_write();
  if (!process_->wait(Deadline::after(grace_seconds))) process_->terminate(kStopGraceSeconds);
  pipe_.reset();
  process_.reset();
}

std::string PythonProcess::last_errors() const {
  const std::string lines = read_last_lines(log_path_, kShownErrorLines);
  return lines.empty() ? "it wrote nothing on standard error"
                       : "last lines of its standard error:\n" + lines;
}

// The reply, or nothing with failure_ set.
std::optional<std::string> PythonProcess::exchange(std::string_view request, Deadline deadline) {
  failed_state_ = pipe_->write(request, deadline);
  if (failed_state_ == PipeState::ok) {
    Frame frame = pipe_->read(deadline);
    if (frame.ok()) return std::move(frame.payload);
    failed_state_ = frame.state;
  }
  failure_ = pipe_->describe(failed_state_);
  if (failed_state_ == PipeState::closed) {
    const auto exit = process_->wait(Deadline::after(kStopGraceSeconds));
    failure_ += exit ? "; the process ended: " + exit->describe() : "; it still runs and is ended";
  }
  stop(0);
  return std::nullopt;
}

Json PythonProcess::call(std::string_view request) {
  constexpr int kAttempts = 2;
  const Deadline deadline = Deadline::after(options_.call_timeout_seconds);
  if (in_call_) stop(0);  // the stream cannot be trusted after an error in mid-call
  for (int attempt = 1; attempt <= kAttempts; ++attempt) {
    in_call_ = true;
    if (!process_) start();
    std::optional<std::string> payload = exchange(request, deadline);
    in_call_ = false;
    if (payload) {
      Json reply = parse_json(*payload, options_.name + ": reply");
      const auto error = reply.find("error");
      TD_CHECK(error == reply.end(), "{}: {}", options_.name,
               read_value<std::string>(*error, options_.name + ": error"));
      return reply;
    }
    if (failed_state_ == PipeState::timed_out) break;
    if (attempt < kAttempts) {
      TD_LOG(warn, "{}; starting it again, {}", failure_, last_errors());
    }
  }
  throw Error(fmt::format("{}; {}", failure_, last_errors()));
}

}  // namespace tandem
