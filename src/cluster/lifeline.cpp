// See lifeline.h.
#include "cluster/lifeline.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <optional>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/file.h"
#include "base/log.h"
#include "base/pipe.h"
#include "base/text.h"

namespace tandem {
namespace {

struct Child {
  pid_t pid;
  pid_t group;
};

// /proc/N/stat: "pid (name) state ppid pgrp …"; the name may hold anything.
std::optional<Child> living_child(const std::string& pid_text, pid_t parent) {
  const auto pid = parse_int(pid_text);
  if (!pid) return std::nullopt;
  const Fd fd(::open(("/proc/" + pid_text + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
  char buffer[1024];
  const ssize_t n = fd ? ::read(fd.get(), buffer, sizeof buffer) : -1;
  if (n <= 0) return std::nullopt;  // it ended meanwhile
  const std::string_view stat(buffer, static_cast<std::size_t>(n));
  const std::size_t bracket = stat.rfind(") ");
  if (bracket == stat.npos) return std::nullopt;
  const auto fields = split(stat.substr(bracket + 2), ' ');
  if (fields.size() < 3 || fields[0] == "Z" || parse_int(fields[1]) != parent) return std::nullopt;
  return Child{static_cast<pid_t>(*pid), static_cast<pid_t>(parse_int(fields[2]).value_or(0))};
}

std::vector<Child> living_children() {
  std::vector<Child> children;
  std::error_code error;
  for (auto it = std::filesystem::directory_iterator("/proc", error);
       !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
    if (const auto child = living_child(it->path().filename().string(), ::getpid())) {
      children.push_back(*child);
    }
  }
  return children;
}

// Again until none is left: a child may have been started while the list was made.
void kill_children() {
  for (const Deadline deadline = Deadline::after(0.5); !deadline.expired();) {
    const std::vector<Child> children = living_children();
    if (children.empty()) return;
    for (const Child& child : children) {
      ::kill(child.group == child.pid ? -child.pid : child.pid, SIGKILL);
    }
    ::usleep(2000);
  }
}

void wait_for_end(int fd) {
  constexpr int kLookMilliseconds = 1000;  // poll needs no limit here; looking again costs nothing
  for (;;) {
    pollfd entry{fd, POLLIN, 0};
    const int ready = ::poll(&entry, 1, kLookMilliseconds);
    if (ready <= 0) continue;
    char byte;
    const ssize_t n = ::read(fd, &byte, 1);
    if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) return;
  }
}

}  // namespace

RankInput read_rank_input(int fd, Deadline deadline) {
  std::string text;
  for (;;) {
    pollfd entry{fd, POLLIN, 0};
    const int ready = ::poll(&entry, 1, deadline.poll_milliseconds());
    if (ready == 0 && deadline.expired()) {
      throw Error(fmt::format(
          "standard input: no end within {} (waiting for the driver to send the config)",
          deadline.describe()));
    }
    if (ready <= 0) continue;
    char buffer[1 << 14];
    const ssize_t n = ::read(fd, buffer, sizeof buffer);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    TD_CHECK(n >= 0, "standard input: cannot read: {}", errno_text(errno));
    if (n == 0) break;
    text.append(buffer, static_cast<std::size_t>(n));
  }
  const std::size_t newline = text.find('\n');
  TD_CHECK(newline != text.npos,
           "standard input: found {} bytes without a newline, wanted the run's token on a line and "
           "the config after it; ranks are started by the driver",
           text.size());
  return {text.substr(0, newline), text.substr(newline + 1)};
}

void lifeline_watch(int fd) {
  std::thread([fd] {
    wait_for_end(fd);
    kill_children();
    TD_LOG(info, "the driver has let go: ending");
    ::_exit(kLifelineExitCode);
  }).detach();
}

void announce_ready(int fd, const Json& announcement) {
  const Fd owned(fd);
  const PipeState state =
      write_bytes(fd, "ready " + dump_json(announcement) + "\n", Deadline::after(10));
  TD_CHECK(state == PipeState::ok, "announce-fd {}: the driver did not take the announcement", fd);
}

}  // namespace tandem
