// One thread that does what it is given, in order: for work that must neither hold up the thread
// that has it nor run beside itself. Its end waits for the job at hand and drops the rest, so a
// job's captures may refer to whatever outlives the WorkThread. Jobs must not throw.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace tandem {

class WorkThread {
 public:
  WorkThread() : thread_([this] { run(); }) {}
  WorkThread(const WorkThread&) = delete;
  WorkThread& operator=(const WorkThread&) = delete;
  ~WorkThread() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    posted_.notify_one();
    thread_.join();
  }

  void post(std::function<void()> job) {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    posted_.notify_one();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      posted_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
      if (stopping_) return;
      std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
      job = nullptr;  // its captures end outside the lock
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable posted_;
  std::deque<std::function<void()>> jobs_;
  bool stopping_ = false;
  std::thread thread_;  // last: runs from the end of construction
};

}  // namespace tandem
