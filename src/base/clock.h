// Monotonic time and the deadline that every wait in the program takes. A deadline is a point in
// time made once at the top of an operation and passed down, so that a chain of waits shares one
// budget instead of adding up its parts. There is no "wait for ever": a hang is an error.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>

#include "base/text.h"

namespace tandem {

// Seconds of the monotonic clock; only differences mean anything.
inline double monotonic_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Deadline {
 public:
  // The moment `seconds` from now (0 or less: already expired; a wait then only looks once).
  static Deadline after(double seconds) { return Deadline(monotonic_seconds() + seconds, seconds); }

  // The earlier of this deadline and `seconds` from now: a bound for one part of a longer wait.
  Deadline within(double seconds) const {
    const Deadline part = after(seconds);
    return part.end_ < end_ ? part : *this;
  }

  // Seconds left, never negative.
  double remaining() const { return std::max(0.0, end_ - monotonic_seconds()); }
  bool expired() const { return monotonic_seconds() >= end_; }

  // Milliseconds left for poll(2), rounded up so that a loop does not spin in its last millisecond.
  int poll_milliseconds() const {
    const double left = remaining();
    return left <= 0 ? 0 : static_cast<int>(std::min(left, 86400.0) * 1000.0) + 1;
  }

  std::chrono::steady_clock::time_point time_point() const {
    return std::chrono::steady_clock::time_point(
        std::chrono::duration_cast<std::chrono::steady_clock::duration>(
            std::chrono::duration<double>(end_)));
  }

  // The whole budget the deadline was made with, for messages: "2.0 s".
  double budget_seconds() const { return budget_; }
  std::string describe() const { return human_seconds(budget_); }

 private:
  Deadline(double end, double budget) : end_(end), budget_(budget) {}

  double end_;
  double budget_;
};

}  // namespace tandem
