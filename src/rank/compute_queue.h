// Work for a rank's compute thread, posted from any thread and run in order between engine steps.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <vector>

#include "base/clock.h"

namespace tandem {

class ComputeQueue {
 public:
  void post(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      work_.push_back(std::move(work));
    }
    posted_.notify_one();
  }
  // Something for the compute thread lies elsewhere (the engine's mailbox).
  void wake() { post({}); }

  bool waiting() {
    const std::lock_guard lock(mutex_);
    return !work_.empty();
  }

  // Runs what was posted; returns whether there was anything.
  bool run() {
    std::vector<std::function<void()>> taken;
    {
      const std::lock_guard lock(mutex_);
      taken.swap(work_);
    }
    for (auto& work : taken)
      if (work) work();
    return !taken.empty();
  }

  // Until something is posted or the deadline passes.
  void wait(Deadline deadline) {
    std::unique_lock lock(mutex_);
    posted_.wait_until(lock, deadline.time_point(), [&] { return !work_.empty(); });
  }

 private:
  std::mutex mutex_;
  std::condition_variable posted_;
  std::vector<std::function<void()>> work_;
};

}  // namespace tandem
