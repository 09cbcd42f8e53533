// Frames over a pair of descriptors (a helper's standard streams, a socket): a 32-bit little-endian
// length, then that many bytes. Waits take a deadline; a closed peer and a time-out are values,
// told apart; a length over the maximum is an Error, since the stream cannot be trusted after it
// (most often a helper that printed on its standard output).
//
// A read that times out keeps what came, so the next read goes on. A write that times out part-way
// leaves the peer in the middle of a frame: the pipe is then closed for writing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/file.h"

namespace tandem {

enum class PipeState { ok, closed, timed_out };

struct Frame {
  PipeState state = PipeState::ok;
  std::string payload;  // if ok

  bool ok() const { return state == PipeState::ok; }
};

class FramedPipe {
 public:
  // `peer` names the other side in errors: "reward helper (pid 12)".
  FramedPipe(Fd read, Fd write, std::string peer, std::size_t max_frame_bytes = 1u << 30);

  Frame read(Deadline deadline);
  PipeState write(std::string_view payload, Deadline deadline);

  // "reward helper (pid 12): closed its pipe in the middle of a frame (10 of 4096 bytes)" or
  // "… no answer within 2.0 s": for a state that read or write just returned.
  std::string describe(PipeState state) const;

  void close_write() { write_.close(); }
  int read_fd() const { return read_.get(); }
  const std::string& peer() const { return peer_; }

 private:
  PipeState fill(std::size_t wanted, Deadline deadline);

  Fd read_;
  Fd write_;
  std::string peer_;
  std::size_t max_frame_bytes_;
  std::string buffer_;        // bytes of the frame being read, its length first
  std::size_t buffered_ = 0;  // how many of them are there
  std::string last_fault_;
};

// Raw bytes with a deadline, for the places that speak lines instead of frames. A peer that closed
// is a value here too, never SIGPIPE.
PipeState write_bytes(int fd, std::string_view bytes, Deadline deadline);

// Reads up to and including the next '\n' (returned without it), at most max_bytes; bytes after it
// stay in the descriptor. Slow (a byte at a time): for announcements, not for data.
PipeState read_line(int fd, std::string& line, std::size_t max_bytes, Deadline deadline);

}  // namespace tandem
