// Answers are gathered on the fetcher's thread in a box that outlives a caller that gave up.
#include "http/fan.h"

#include <condition_variable>
#include <mutex>

#include "base/check.h"

namespace tandem::http {
namespace {

struct Answers {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Result> results;
  std::vector<char> arrived;
  std::size_t open = 0;
  bool failed = false;
};

}  // namespace

std::vector<std::string> call_all(Fetcher& fetcher, const std::vector<Call>& calls,
                                  Deadline deadline, const std::function<void()>& meanwhile) {
  constexpr double kLookSeconds = 0.2, kAfterFaultSeconds = 2.0;
  auto answers = std::make_shared<Answers>();
  answers->results.resize(calls.size());
  answers->arrived.resize(calls.size());
  answers->open = calls.size();
  for (std::size_t i = 0; i < calls.size(); ++i)
    fetcher.start(calls[i], deadline, [answers, i](Result result) {
      const std::lock_guard lock(answers->mutex);
      answers->failed |= !result.ok();
      answers->results[i] = std::move(result);
      answers->arrived[i] = true;
      --answers->open;
      answers->changed.notify_all();
    });
  // The fetcher ends every call by the deadline; the second more is for its own word on it.
  Deadline end = Deadline::after(deadline.remaining() + 1);
  bool failed = false;
  std::unique_lock lock(answers->mutex);
  while (answers->open > 0 && !end.expired()) {
    answers->changed.wait_until(lock, end.within(kLookSeconds).time_point(),
                                [&] { return answers->open == 0; });
    if (answers->failed && !failed) end = end.within(kAfterFaultSeconds);
    failed = answers->failed;
    if (answers->open == 0 || !meanwhile) continue;
    lock.unlock();
    meanwhile();
    lock.lock();
  }
  std::string faults;
  std::vector<std::string> bodies;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const std::string fault =
        !answers->arrived[i] ? fmt::format("{}: no answer{}", calls[i].address.where(calls[i].path),
                                           failed ? " either" : " within " + deadline.describe())
        : !answers->results[i].ok() ? describe(calls[i], answers->results[i])
                                    : "";
    if (!fault.empty()) faults += (faults.empty() ? "" : "\n") + fault;
    bodies.push_back(std::move(answers->results[i].response.body));
  }
  TD_CHECK(faults.empty(), "{}", faults);
  return bodies;
}

}  // namespace tandem::http
