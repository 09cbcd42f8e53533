// POST /generate from body to answer, whole or as server-sent events. Three threads share it: the
// server's checks and posts requests of token ids at once; prompts of text are encoded, and all
// answers decoded and written, on a thread of their own (`texts`), so that neither the server nor
// the compute thread waits for a tokenizer; the compute thread only hands results over. A client
// that goes away before its answer ends its requests, and so their KV is free for others.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/work_thread.h"
#include "engine/mailbox.h"
#include "engine/wire.h"
#include "http/server.h"

namespace tandem {

class GenerateRoute {
 public:
  // The mailbox must outlive the route, and the route the engine's last step.
  GenerateRoute(Mailbox& mailbox, EngineLimits limits, TextHooks text, std::uint64_t default_seed);

  // On the server's thread. Throws Error for a body that it refuses.
  void serve(const http::Request& request, const http::Respond& respond);

 private:
  struct Pending;

  void start(const Json& body, const http::Respond& respond);
  GenerateCommand command(std::shared_ptr<Pending> pending, std::size_t i, std::uint64_t ticket);
  void finish(const std::shared_ptr<Pending>& pending, std::size_t i, GenerateResult result);
  void show_token(Pending& pending, std::size_t i, std::int64_t index, TokenId token,
                  float log_prob, std::int64_t version);

  Mailbox& mailbox_;
  EngineLimits limits_;
  TextHooks text_;
  RequestNames names_;
  std::atomic<std::uint64_t> next_ticket_{1};
  WorkThread texts_;
};

}  // namespace tandem
