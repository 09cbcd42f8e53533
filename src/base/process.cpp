// See process.h. Between fork and exec only async-signal-safe calls are made: everything the child
// needs is laid out before the fork.
#include "base/process.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>

#include "base/check.h"
#include "base/text.h"

extern char** environ;

namespace tandem {
namespace {

// Where descriptors wait while the low numbers are given out; above every number in pass_fds.
constexpr int kParkedFd = 64;

struct FdMove {
  int from;
  int to;
  int parked;
};

// What the child does, laid out before the fork.
struct ChildPlan {
  std::string program;
  std::string folder;
  std::vector<std::string> argv_text, env_text;
  std::vector<char*> argv, env;  // pointers into the texts, null at the end
  std::vector<FdMove> moves;
  bool die_with_parent;
  pid_t parent;
  int report_fd;
};

enum class Stage : int { folder, descriptors, exec };

struct Failure {
  Stage stage;
  int error;
};

[[noreturn]] void fail_child(int report_fd, Stage stage) {
  const Failure failure{stage, errno};
  const ssize_t ignored = ::write(report_fd, &failure, sizeof failure);
  static_cast<void>(ignored);
  ::_exit(127);
}

[[noreturn]] void run_child(ChildPlan& plan) {
  ::setpgid(0, 0);
  if (plan.die_with_parent) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != plan.parent) ::_exit(127);  // it died before the line above
  }
  ::signal(SIGPIPE, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);

  int report = ::fcntl(plan.report_fd, F_DUPFD_CLOEXEC, kParkedFd);
  if (report < 0) report = plan.report_fd;
  if (!plan.folder.empty() && ::chdir(plan.folder.c_str()) != 0) fail_child(report, Stage::folder);
  for (FdMove& move : plan.moves) {
    move.parked = ::fcntl(move.from, F_DUPFD_CLOEXEC, kParkedFd);
    if (move.parked < 0) fail_child(report, Stage::descriptors);
  }
  ::syscall(SYS_close_range, 3u, ~0u, CLOSE_RANGE_CLOEXEC);
  for (const FdMove& move : plan.moves) {
    if (::dup2(move.parked, move.to) < 0) fail_child(report, Stage::descriptors);
  }
  ::execve(plan.program.c_str(), plan.argv.data(), plan.env.data());
  fail_child(report, Stage::exec);
}

std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) return name;
  const char* path = std::getenv("PATH");
  for (const std::string_view folder : split(path ? path : "/usr/bin:/bin", ':')) {
    const std::string candidate = fmt::format("{}/{}", folder.empty() ? "." : folder, name);
    if (::access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  throw Error(fmt::format("{}: no such program in PATH", name));
}

std::vector<std::string> child_environment(const SpawnOptions& options) {
  std::map<std::string, std::string> values;
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view text = *entry;
    const std::size_t equal = text.find('=');
    if (equal != text.npos) values[std::string(text.substr(0, equal))] = text.substr(equal + 1);
  }
  for (const auto& [name, value] : options.env) values[name] = value;
  std::vector<std::string> result;
  for (const auto& [name, value] : values) result.push_back(name + "=" + value);
  return result;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

// Opens what a standard stream of the child shall be; `ours` gets the other end of a pipe.
Fd open_stream(Stream stream, bool is_input, const SpawnOptions& options, Fd& ours) {
  switch (stream) {
    case Stream::inherit:
      return {};
    case Stream::null:
      return Fd(::open("/dev/null", (is_input ? O_RDONLY : O_WRONLY) | O_CLOEXEC));
    case Stream::pipe: {
      PipeEnds ends = make_pipe();
      ours = std::move(is_input ? ends.write : ends.read);
      return std::move(is_input ? ends.read : ends.write);
    }
    case Stream::log: {
      Fd fd(::open(options.log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
      TD_CHECK(static_cast<bool>(fd), "{}: cannot open for appending: {}", options.log_path,
               errno_text(errno));
      return fd;
    }
  }
  return {};
}

void read_failure(int fd, const SpawnOptions& options, pid_t pid) {
  Failure failure{};
  ssize_t n;
  while ((n = ::read(fd, &failure, sizeof failure)) < 0 && errno == EINTR) {
  }
  if (n != static_cast<ssize_t>(sizeof failure)) return;  // closed by exec: it runs
  ::waitpid(pid, nullptr, 0);
  const std::string reason = errno_text(failure.error);
  switch (failure.stage) {
    case Stage::folder:
      throw Error(fmt::format("{}: cannot start {} in this folder: {}", options.folder,
                              options.argv[0], reason));
    case Stage::descriptors:
      throw Error(fmt::format("{}: cannot hand over descriptors: {}; raise 'ulimit -n'",
                              options.argv[0], reason));
    case Stage::exec:
      throw Error(fmt::format("{}: cannot start: {}", options.argv[0], reason));
  }
}

}  // namespace

std::string ProcessExit::describe() const {
  if (signal == 0) return fmt::format("exited with code {}", code);
  const char* name = ::sigdescr_np(signal);
  return fmt::format("killed by signal {} ({})", signal, name ? name : "unknown");
}

Process Process::spawn(const SpawnOptions& options) {
  TD_CHECK(!options.argv.empty(), "spawn: an empty command line");
  ChildPlan plan;
  plan.program = find_program(options.argv[0]);
  plan.folder = options.folder;
  plan.argv_text = options.argv;
  plan.env_text = child_environment(options);
  plan.argv = pointers(plan.argv_text);
  plan.env = pointers(plan.env_text);
  plan.die_with_parent = options.die_with_parent;
  plan.parent = ::getpid();

  Process process;
  process.name_ = options.argv[0];
  const Fd in = open_stream(options.in, true, options, process.in_);
  const Fd out = open_stream(options.out, false, options, process.out_);
  const Fd err = open_stream(options.err, false, options, process.err_);
  for (const auto& [fd, to] : {std::pair(&in, 0), std::pair(&out, 1), std::pair(&err, 2)}) {
    if (*fd) plan.moves.push_back({fd->get(), to, -1});
  }
  for (const auto& [from, to] : options.pass_fds) {
    TD_CHECK(to >= 3 && to < kParkedFd, "spawn: descriptor number {} in the child, wanted 3 to {}",
             to, kParkedFd - 1);
    plan.moves.push_back({from, to, -1});
  }
  PipeEnds report = make_pipe();
  plan.report_fd = report.write.get();

  const pid_t pid = ::fork();
  TD_CHECK(pid >= 0, "{}: cannot start: fork: {}", options.argv[0], errno_text(errno));
  if (pid == 0) run_child(plan);
  ::setpgid(pid, pid);  // both sides do it: the group exists whoever comes first
  report.write.close();
  read_failure(report.read.get(), options, pid);
  process.pid_ = pid;
  process.pidfd_ = Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!process.pidfd_) {
    const int error = errno;
    ::kill(-pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    throw Error(
        fmt::format("{}: cannot watch the process: pidfd_open: {}; Linux 5.4 or newer is needed",
                    options.argv[0], errno_text(error)));
  }
  return process;
}

Process::~Process() {
  if (!pidfd_) return;  // ended, moved from or never started
  ::kill(-pid_, SIGKILL);
  static_cast<void>(wait(Deadline::after(10.0)));
}

std::optional<ProcessExit> Process::try_wait() {
  if (exit_ || !pidfd_) return exit_;
  siginfo_t info{};
  const auto id = static_cast<id_t>(pidfd_.get());
  // Looks without reaping: while the leader is a zombie its group number cannot be given away.
  if (::waitid(P_PIDFD, id, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) {
    return std::nullopt;
  }
  ::kill(-pid_, SIGKILL);
  ::waitid(P_PIDFD, id, &info, WEXITED);
  pidfd_.close();
  exit_ =
      info.si_code == CLD_EXITED ? ProcessExit{info.si_status, 0} : ProcessExit{0, info.si_status};
  return exit_;
}

std::optional<ProcessExit> Process::wait(Deadline deadline) {
  for (;;) {
    if (const auto exit = try_wait()) return exit;
    if (deadline.expired() || !pidfd_) return std::nullopt;
    pollfd entry{pidfd_.get(), POLLIN, 0};
    ::poll(&entry, 1, deadline.poll_milliseconds());
  }
}

void Process::signal_group(int signal) {
  if (pidfd_ && !try_wait()) ::kill(-pid_, signal);
}

ProcessExit Process::terminate(double grace_seconds) {
  constexpr double kKillSeconds = 30;
  signal_group(SIGTERM);
  signal_group(SIGCONT);  // a stopped process sees SIGTERM only when it goes on
  if (const auto exit = wait(Deadline::after(grace_seconds))) return *exit;
  signal_group(SIGKILL);
  const auto exit = wait(Deadline::after(kKillSeconds));
  TD_CHECK(exit.has_value(), "{} (pid {}): still there {} s after SIGKILL; it hangs in the kernel",
           name_, pid_, kKillSeconds);
  return *exit;
}

std::string own_executable() {
  std::string path(4096, '\0');
  const ssize_t n = ::readlink("/proc/self/exe", path.data(), path.size());
  TD_CHECK(n > 0, "/proc/self/exe: cannot read: {}", errno_text(errno));
  path.resize(static_cast<std::size_t>(n));
  return path;
}

std::string cuda_part_path() {
  return (std::filesystem::path(own_executable()).parent_path() / "libtandem_cuda.so").string();
}

std::vector<std::string> visible_gpus() {
  std::vector<std::string> all;
  while (::access(fmt::format("/dev/nvidia{}", all.size()).c_str(), F_OK) == 0)
    all.push_back(std::to_string(all.size()));
  const char* told = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!told || all.empty()) return all;
  std::vector<std::string> named;
  for (const std::string_view name : split(told, ',')) {
    if (trim(name).empty() || trim(name).starts_with('-')) break;  // as CUDA reads it
    named.emplace_back(trim(name));
  }
  return named;
}

int num_gpus() { return static_cast<int>(visible_gpus().size()); }

}  // namespace tandem
