// A stream of messages from the leader of some ranks to each of its followers: how an engine's
// leader tells the others what batch comes next. A follower waits here, not inside a collective,
// for as long as there is nothing to do; a leader that dies closes the stream.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/pipe.h"
#include "comm/store.h"

namespace tandem {

class Fanout {
 public:
  // Listens on `host`, tells the followers where under `name` in the store and waits for
  // `num_followers` of them. Error naming how many are missing when the deadline passes.
  Fanout(Store& store, const std::string& name, const std::string& host, int num_followers,
         Deadline deadline);

  // The same bytes to every follower, in order. Error naming the follower that is gone or does not
  // read within the limit.
  void send(std::string_view message, Deadline deadline);

 private:
  std::vector<std::unique_ptr<FramedPipe>> followers_;
};

// The other end. Used from one thread.
class FanoutReader {
 public:
  FanoutReader(Store& store, const std::string& name, Deadline deadline);
  // The next message; state timed_out when none came, closed when the leader is gone.
  Frame read(Deadline deadline) { return pipe_->read(deadline); }
  std::string describe(PipeState state) const { return pipe_->describe(state); }

 private:
  std::unique_ptr<FramedPipe> pipe_;
};

}  // namespace tandem
