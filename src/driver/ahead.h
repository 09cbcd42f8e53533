// One piece of work that runs ahead on a thread of its own while the driver does something else:
// the next rollout during training (--async-steps). The thread lives as long as this object, so
// processes that the work starts live as long as the driver does (base/process.h).
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <utility>

#include "base/work_thread.h"

namespace tandem {

template <class T>
class Ahead {
 public:
  // One at a time. The work must end soon after whatever it asks has told it to stop.
  void start(std::function<T()> work) {
    auto task = std::make_shared<std::packaged_task<T()>>(std::move(work));
    result_ = task->get_future();
    thread_.post([task] { (*task)(); });
  }
  bool running() const { return result_.valid(); }
  bool finished() const {
    return running() && result_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  // Waits for the result; throws what the work threw.
  T take() { return result_.get(); }

 private:
  std::future<T> result_;
  WorkThread thread_;
};

}  // namespace tandem
