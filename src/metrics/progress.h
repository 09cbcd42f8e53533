// The live display of a step's phases. On a terminal one line is redrawn in place:
//   rollout  [#########---------------]  24/64 samples  3.1 s, about 5.2 s left
// elsewhere a phase that lasts says so in a plain line every few seconds, a short one says nothing.
// Thread-safe: advance() is called by the fetcher's callbacks while the driver owns the phase.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "base/clock.h"

namespace tandem {

class Progress {
 public:
  // Seconds between plain lines where the console is no terminal. Not shown: only times are kept.
  explicit Progress(double line_seconds = 5.0, bool shown = true)
      : line_seconds_(line_seconds), shown_(shown) {}
  Progress(const Progress&) = delete;
  ~Progress();

  // Starts a phase; one still running ends. `total` 0: not known. `unit`: "samples".
  void begin(std::string phase, std::int64_t total, std::string unit);

  // The phase's total, when it is known only later.
  void set_total(std::int64_t total);
  // `count` more are done.
  void advance(std::int64_t count = 1);

  // Ends the phase and returns its seconds (0 if none ran).
  double end();

  // The line for a phase's state, `bar` with the bar.
  static std::string line(const std::string& phase, std::int64_t done, std::int64_t total,
                          const std::string& unit, double seconds, bool bar);

 private:
  void draw(double now);  // under mutex_

  const double line_seconds_;
  const bool shown_;
  std::mutex mutex_;
  bool running_ = false;
  std::string phase_, unit_;
  std::int64_t done_ = 0, total_ = 0;
  double started_ = 0, drawn_ = 0;
};

}  // namespace tandem
