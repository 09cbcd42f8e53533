// Connecting, and a loop over poll(2). A process with one route left blocks in send or recv
// instead, which wakes it once a piece and not once a packet.
#include "comm/streams.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <random>

#include "base/check.h"
#include "base/pipe.h"
#include "comm/socket.h"

namespace tandem {
namespace {

// Of the kernel's buffers: small enough that what lies in them stays in the processor's caches.
constexpr int kSocketBytes = 1 << 20;

std::string key_of(const std::string& name, int process) {
  return fmt::format("streams/{}/{}", name, process);
}

// Calls block, and end after the limit as poll does.
void set_limits(int fd, double seconds) {
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) & ~O_NONBLOCK);
  const auto whole = static_cast<time_t>(seconds);
  const timeval limit{whole,
                      static_cast<suseconds_t>((seconds - static_cast<double>(whole)) * 1e6)};
  ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kSocketBytes, sizeof kSocketBytes);
  ::setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &kSocketBytes, sizeof kSocketBytes);
}

}  // namespace

struct ByteStreams::End {
  int fd = -1;
  int peer = 0;
  const Source* source = nullptr;
  const Sink* sink = nullptr;
  std::span<const std::byte> to_send{};
  std::span<std::byte> to_fill{};
  bool waits = false, done = false;

  bool has_piece() const { return !to_send.empty() || !to_fill.empty(); }
  // Asks for a piece where there is none. Returns whether that changed anything: the first answer
  // that there is none yet does, since a piece has ended, on which another route may have waited.
  bool ask() {
    const bool waited = waits;
    waits = false;
    if (source) {
      const auto next = (*source)();
      waits = !next;
      to_send = next.value_or(std::span<const std::byte>());
    } else {
      const auto next = (*sink)();
      waits = !next;
      to_fill = next.value_or(std::span<std::byte>());
    }
    done = !waits && !has_piece();
    return !(waits && waited);
  }
};

ByteStreams::ByteStreams(Store& store, std::string name, int process, std::vector<Route> to,
                         std::vector<Route> from, const GroupOptions& options)
    : name_(std::move(name)),
      process_(process),
      timeout_seconds_(options.timeout_seconds),
      to_(std::move(to)),
      from_(std::move(from)),
      receiving_(from_.size()) {
  const Deadline deadline = Deadline::after(options.timeout_seconds);
  Listener listener;
  std::string secret;
  if (!from_.empty()) {
    listener = listen_on(options.host, 0, describe());
    std::random_device random;
    secret = fmt::format("{:08x}{:08x}", random(), random());
    store.set(key_of(name_, process_),
              fmt::format("{} {} {}", options.host, listener.port, secret));
  }
  for (const Route& r : to_) {
    const std::string what = fmt::format("{}, to rank {}", describe(), r.peer);
    const std::string told = store.get(key_of(name_, r.peer), deadline.remaining());
    const auto words = split(told, ' ');
    TD_CHECK(words.size() == 3, "{}: '{}' found in the store, host, port and secret wanted", what,
             told);
    Fd fd =
        connect_to(std::string(words[0]),
                   static_cast<std::uint16_t>(std::stoi(std::string(words[1]))), deadline, what);
    const std::string hello = fmt::format("{} {} {}\n", words[2], process_, r.number);
    TD_CHECK(write_bytes(fd.get(), hello, deadline) == PipeState::ok, "{}: it closed at once",
             what);
    set_limits(fd.get(), timeout_seconds_);
    sending_.push_back(std::move(fd));
  }
  for (std::size_t missing = from_.size(); missing > 0;) {
    Fd fd = accept_from(
        listener, deadline,
        fmt::format("{}: {} of {} connections missing", describe(), missing, from_.size()));
    std::string hello;
    if (read_line(fd.get(), hello, 64, deadline.within(5)) != PipeState::ok) continue;
    set_limits(fd.get(), timeout_seconds_);
    for (std::size_t i = 0; i < from_.size(); ++i)
      if (!receiving_[i] &&
          hello == fmt::format("{} {} {}", secret, from_[i].peer, from_[i].number)) {
        receiving_[i] = std::move(fd);
        --missing;
        break;
      }
  }
}

std::string ByteStreams::describe() const {
  return fmt::format("streams '{}' of rank {}, limit {:.1f} s", name_, process_, timeout_seconds_);
}

void ByteStreams::fail(const std::string& what) {
  failure_ = what;
  throw Error(fmt::format("{}: {}", describe(), what));
}

// One step of a route; whether anything moved. alone: no other route waits, so this one may block.
bool ByteStreams::advance(End& end, bool alone) {
  if (end.done) return false;
  if (!end.has_piece()) return end.ask();
  const int flags = MSG_NOSIGNAL | (alone ? 0 : MSG_DONTWAIT);
  const ssize_t moved = end.source ? ::send(end.fd, end.to_send.data(), end.to_send.size(), flags)
                                   : ::recv(end.fd, end.to_fill.data(), end.to_fill.size(),
                                            flags | (alone ? MSG_WAITALL : 0));
  if (moved < 0 && errno == EINTR) return true;
  if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
  if (moved <= 0)
    fail(fmt::format("rank {} closed its connection ({})", end.peer,
                     moved < 0 ? errno_text(errno) : "in the middle of a piece"));
  if (end.source)
    end.to_send = end.to_send.subspan(static_cast<std::size_t>(moved));
  else
    end.to_fill = end.to_fill.subspan(static_cast<std::size_t>(moved));
  return true;
}

void ByteStreams::run(std::span<const Source> sources, std::span<const Sink> sinks) {
  TD_CHECK(failure_.empty(), "{}: it failed before and must be built anew ({})", describe(),
           failure_);
  failure_ = "an earlier run did not finish";
  std::vector<End> ends;
  for (std::size_t i = 0; i < to_.size(); ++i)
    ends.push_back({.fd = sending_[i].get(), .peer = to_[i].peer, .source = &sources[i]});
  for (std::size_t i = 0; i < from_.size(); ++i)
    ends.push_back({.fd = receiving_[i].get(), .peer = from_[i].peer, .sink = &sinks[i]});
  std::vector<pollfd> waits;
  while (true) {
    const auto left = std::count_if(ends.begin(), ends.end(), [](const End& e) { return !e.done; });
    if (left == 0) break;
    bool moved = false;
    for (End& end : ends) moved = advance(end, left == 1) || moved;
    if (moved) continue;
    waits.clear();
    std::string peers;
    for (const End& end : ends) {
      if (end.done) continue;
      if (end.has_piece())
        waits.push_back({end.fd, static_cast<short>(end.source ? POLLOUT : POLLIN), 0});
      peers += fmt::format("{}{}", peers.empty() ? "" : ", ", end.peer);
    }
    // A blocking call that ended without a byte has waited for the whole limit.
    const int ready = left == 1 ? 0
                                : ::poll(waits.data(), waits.size(),
                                         Deadline::after(timeout_seconds_).poll_milliseconds());
    if (ready == 0)
      fail(fmt::format("nothing moved between this rank and {} {} within the limit",
                       left == 1 ? "rank" : "any of the ranks", peers));
  }
  failure_.clear();
}

}  // namespace tandem
