// How the driver talks to one engine. Generation is asynchronous: every prompt group is one call
// that ends in one callback, with the samples or with the reason why there are none. Control calls
// block. Every wait has a deadline, and every error names the engine's address. No torch here.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "data/sample.h"
#include "engine/request.h"
#include "http/client.h"

namespace tandem {

// A prompt and n samples of it, with ids first_sample_id + i.
struct PromptGroup {
  std::uint64_t prompt_id = 0;
  std::uint64_t first_sample_id = 0;
  std::int64_t n = 1;
  std::vector<TokenId> prompt;
  SamplingParams params;
};

struct GroupResult {
  std::uint64_t prompt_id = 0;
  std::vector<Sample> samples;  // [n] in order of id; empty if the call failed
  std::string error;            // empty if it did not

  bool ok() const { return error.empty(); }
};

class EngineClient {
 public:
  // Engines may share a fetcher; it must outlive the client.
  EngineClient(http::Address address, http::Fetcher& fetcher)
      : control_(std::move(address)), fetcher_(fetcher) {}

  const http::Address& address() const { return control_.address(); }

  // Starts the group and returns; any thread. The callback runs on the fetcher's thread and must
  // not throw. Samples come with tokens, log_probs, versions, loss_mask 1 and status; reward and
  // text are the driver's.
  void generate(const PromptGroup& group, Deadline deadline,
                std::function<void(GroupResult)> on_finish);

  // Control calls throw Error naming the engine when it refuses or the deadline passes.
  void pause(PauseMode mode, Deadline deadline);
  void resume(Deadline deadline);
  void flush_cache(Deadline deadline);
  void abort_all(Deadline deadline);
  void abort(std::uint64_t prompt_id, bool evaluation, Deadline deadline);
  std::int64_t weight_version(Deadline deadline);

  // Whether the engine answers at all; whether it can generate a token.
  bool healthy(Deadline deadline);
  bool generates(Deadline deadline);

  // Waits until healthy; throws Error naming the engine when the deadline passes.
  void wait_healthy(Deadline deadline);

 private:
  http::Client control_;
  http::Fetcher& fetcher_;
};

}  // namespace tandem
