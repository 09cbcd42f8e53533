// See progress.h.
#include "metrics/progress.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/log.h"
#include "base/text.h"

namespace tandem {
namespace {
constexpr double kRedrawSeconds = 0.1;
constexpr std::int64_t kBarWidth = 24;
}  // namespace

std::string Progress::line(const std::string& phase, std::int64_t done, std::int64_t total,
                           const std::string& unit, double seconds, bool bar) {
  std::string text = bar ? fmt::format("{:<9}", phase) : phase + ":";
  if (bar && total > 0) {
    const auto filled = static_cast<std::size_t>(kBarWidth * std::min(done, total) / total);
    text += "[" + std::string(filled, '#') + std::string(kBarWidth - filled, '-') + "] ";
  }
  text += total > 0 ? fmt::format(" {}/{} {}", done, total, unit)
                    : (done > 0 ? fmt::format(" {} {}", done, unit) : "");
  text += "  " + human_seconds(seconds);
  if (done * 10 >= total && done < total && seconds > 1) {  // a guess from less would mislead
    const double left = seconds * static_cast<double>(total - done) / static_cast<double>(done);
    text += fmt::format(", about {} left", human_seconds(left));
  }
  return text;
}

Progress::~Progress() { end(); }

void Progress::begin(std::string phase, std::int64_t total, std::string unit) {
  end();
  const std::lock_guard lock(mutex_);
  running_ = true;
  phase_ = std::move(phase);
  unit_ = std::move(unit);
  done_ = 0;
  total_ = total;
  started_ = drawn_ = monotonic_seconds();
  if (console_is_terminal()) draw(started_);
}

void Progress::set_total(std::int64_t total) {
  const std::lock_guard lock(mutex_);
  total_ = total;
}

void Progress::advance(std::int64_t count) {
  const std::lock_guard lock(mutex_);
  if (!running_) return;  // a callback that comes after the phase was given up
  done_ += count;
  const double now = monotonic_seconds();
  if (now - drawn_ >= (console_is_terminal() ? kRedrawSeconds : line_seconds_)) draw(now);
}

double Progress::end() {
  const std::lock_guard lock(mutex_);
  if (!running_) return 0;
  running_ = false;
  console_status("");
  return monotonic_seconds() - started_;
}

void Progress::draw(double now) {
  if (!shown_) return;
  drawn_ = now;
  const bool terminal = console_is_terminal();
  const std::string text = line(phase_, done_, total_, unit_, now - started_, terminal);
  if (terminal) {
    console_status(text);
  } else {
    console_line(text);
  }
}

}  // namespace tandem
