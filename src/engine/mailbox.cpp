// The engine's door; see the header.
#include "engine/mailbox.h"

#include <cassert>

namespace tandem {

void Mailbox::post(Command command) {
  {
    const std::lock_guard lock(mutex_);
    commands_.push_back(std::move(command));
  }
  posted_.notify_one();
  if (wake_) wake_();
}

void Mailbox::take(std::vector<Command>& taken) {
  assert(taken.empty());
  const std::lock_guard lock(mutex_);
  commands_.swap(taken);
}

bool Mailbox::waiting() const {
  const std::lock_guard lock(mutex_);
  return !commands_.empty();
}

bool Mailbox::wait(const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  return posted_.wait_until(lock, deadline.time_point(), [&] { return !commands_.empty(); });
}

void Mailbox::publish(const EngineStats& stats) {
  const std::lock_guard lock(mutex_);
  stats_ = stats;
}

EngineStats Mailbox::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace tandem
