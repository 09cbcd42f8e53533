// The engine's HTTP face, in SGLang's spelling: /generate, health, pause and continue, flush,
// abort, and what the engine is. It knows the mailbox only, never the engine: handlers run on the
// server's thread and post; the answer comes when the compute thread has it. What asks for state
// only (/health, /get_model_info, …) is answered at once from the engine's last snapshot, so a long
// prefill or a training step on the same rank does not make the engine look dead.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/mailbox.h"
#include "engine/wire.h"
#include "http/server.h"

namespace tandem {

struct ServeOptions {
  EngineLimits limits;
  std::string model_path;  // the Hugging Face folder, as told to clients
  std::string model_type;
  std::vector<std::string> architectures;
  std::string version;             // of this program
  std::uint64_t default_seed = 0;  // for requests without sampling_seed
  TextHooks text;
};

// Adds the engine's routes to a server that has not started. The mailbox must outlive the server.
void add_engine_routes(http::Server& server, Mailbox& mailbox, ServeOptions options);

}  // namespace tandem
