// How long a part of a rank has been at work: written by the compute thread, read by any.
#pragma once

#include <atomic>

#include "base/clock.h"

namespace tandem {

class BusyClock {
 public:
  // Runs the work and adds its time; returns what it returns. Time up to now of work that still
  // runs counts too.
  template <class Work>
  auto during(Work&& work) {
    struct Stop {
      BusyClock& clock;
      ~Stop() {
        const double began = clock.began_.exchange(0);
        clock.seconds_.store(clock.seconds_.load() + monotonic_seconds() - began);
      }
    } stop{*this};
    began_.store(monotonic_seconds());
    return work();
  }
  double seconds() const {
    const double began = began_.load();
    return seconds_.load() + (began > 0 ? monotonic_seconds() - began : 0);
  }

 private:
  std::atomic<double> seconds_{0}, began_{0};
};

}  // namespace tandem
