// See pipe.h.
#include "base/pipe.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>

#include "base/check.h"
#include "base/text.h"

namespace tandem {
namespace {

constexpr std::size_t kLengthBytes = 4;

// Writing to a pipe without a reader raises SIGPIPE in the writing thread. Blocked here and taken
// back afterwards, so that neither the process's handlers nor its disposition are touched.
class SigpipeBlocked {
 public:
  SigpipeBlocked() {
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    sigemptyset(&sigpipe_);
    sigaddset(&sigpipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }
  SigpipeBlocked(const SigpipeBlocked&) = delete;
  ~SigpipeBlocked() {
    const timespec now{};
    if (!was_pending_) sigtimedwait(&sigpipe_, nullptr, &now);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t sigpipe_, before_;
  bool was_pending_ = false;
};

bool wait_for(int fd, short events, Deadline deadline) {
  for (;;) {
    pollfd entry{fd, events, 0};
    const int ready = ::poll(&entry, 1, deadline.poll_milliseconds());
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return true;  // the read or write will say why
    if (deadline.expired()) return false;
  }
}

void set_nonblocking(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags >= 0 && !(flags & O_NONBLOCK)) ::fcntl(fd, F_SETFL, flags | O_NONBLOCK);
}

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

// `written` counts what the peer got, also when the state is not ok.
PipeState write_counted(int fd, std::string_view bytes, Deadline deadline, std::size_t& written) {
  set_nonblocking(fd);
  const SigpipeBlocked guard;
  for (written = 0; written < bytes.size();) {
    const ssize_t n = ::write(fd, bytes.data() + written, bytes.size() - written);
    if (n >= 0) {
      written += static_cast<std::size_t>(n);
    } else if (would_block(errno)) {
      if (!wait_for(fd, POLLOUT, deadline)) return PipeState::timed_out;
    } else if (errno != EINTR) {
      return PipeState::closed;
    }
  }
  return PipeState::ok;
}

}  // namespace

PipeState write_bytes(int fd, std::string_view bytes, Deadline deadline) {
  std::size_t written = 0;
  return write_counted(fd, bytes, deadline, written);
}

PipeState read_line(int fd, std::string& line, std::size_t max_bytes, Deadline deadline) {
  for (line.clear(); line.size() < max_bytes;) {
    if (!wait_for(fd, POLLIN, deadline)) return PipeState::timed_out;
    char c = 0;
    const ssize_t n = ::read(fd, &c, 1);
    if (n < 0 && (errno == EINTR || would_block(errno))) continue;
    if (n <= 0) return PipeState::closed;
    if (c == '\n') return PipeState::ok;
    line += c;
  }
  throw Error(fmt::format("a line longer than {} bytes where one short line was expected: '{}'",
                          max_bytes, one_line(line, 80)));
}

FramedPipe::FramedPipe(Fd read, Fd write, std::string peer, std::size_t max_frame_bytes)
    : read_(std::move(read)),
      write_(std::move(write)),
      peer_(std::move(peer)),
      max_frame_bytes_(std::min<std::size_t>(max_frame_bytes, 0xFFFFFFFFu)) {
  set_nonblocking(read_.get());
}

// Makes buffered_ reach `wanted`.
PipeState FramedPipe::fill(std::size_t wanted, Deadline deadline) {
  if (buffer_.size() < wanted) buffer_.resize(wanted);
  while (buffered_ < wanted) {
    const ssize_t n = ::read(read_.get(), buffer_.data() + buffered_, wanted - buffered_);
    if (n > 0) {
      buffered_ += static_cast<std::size_t>(n);
    } else if (n < 0 && would_block(errno)) {
      if (!wait_for(read_.get(), POLLIN, deadline)) {
        last_fault_ = fmt::format("no answer within {}", deadline.describe());
        return PipeState::timed_out;
      }
    } else if (n == 0 || errno != EINTR) {
      last_fault_ = buffered_ == 0 ? std::string("closed its pipe")
                                   : fmt::format(
                                         "closed its pipe in the middle of a frame ({} of "
                                         "{} bytes)",
                                         buffered_, wanted);
      return PipeState::closed;
    }
  }
  return PipeState::ok;
}

Frame FramedPipe::read(Deadline deadline) {
  Frame frame;
  frame.state = fill(kLengthBytes, deadline);
  if (!frame.ok()) return frame;
  std::size_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    length |= std::size_t{static_cast<unsigned char>(buffer_[i])} << (8 * i);
  }
  TD_CHECK(length <= max_frame_bytes_,
           "{}: sent a frame length of {} bytes, the most allowed is {}; its stream is broken (did "
           "it print on its standard output?)",
           peer_, length, max_frame_bytes_);
  frame.state = fill(kLengthBytes + length, deadline);
  if (!frame.ok()) return frame;
  frame.payload = std::move(buffer_);
  frame.payload.erase(0, kLengthBytes);
  buffer_.clear();
  buffered_ = 0;
  return frame;
}

PipeState FramedPipe::write(std::string_view payload, Deadline deadline) {
  TD_CHECK(payload.size() <= max_frame_bytes_,
           "{}: a frame of {} bytes to send, the most allowed is {}", peer_, payload.size(),
           max_frame_bytes_);
  if (!write_) {
    last_fault_ = "its pipe was closed before";
    return PipeState::closed;
  }
  std::string length(kLengthBytes, '\0');
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    length[i] = static_cast<char>(payload.size() >> (8 * i));
  }
  std::size_t written = 0;
  PipeState state = write_counted(write_.get(), length, deadline, written);
  bool begun = written > 0;
  if (state == PipeState::ok) {
    state = write_counted(write_.get(), payload, deadline, written);
    begun = true;
  }
  if (state == PipeState::timed_out) {
    last_fault_ = fmt::format("did not take a frame of {} bytes within {}", payload.size(),
                              deadline.describe());
    if (begun) write_.close();
  } else if (state == PipeState::closed) {
    last_fault_ = "closed its pipe";
  }
  return state;
}

std::string FramedPipe::describe(PipeState state) const {
  return fmt::format("{}: {}", peer_, state == PipeState::ok ? "answered" : last_fault_);
}

}  // namespace tandem
