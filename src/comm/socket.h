// Listening and connecting TCP sockets for the store and for streams between ranks. One address
// only is listened on, and port 0 can be told. `what` names the wait in errors.
#pragma once

#include <cstdint>
#include <string>

#include "base/clock.h"
#include "base/file.h"

namespace tandem {

struct Listener {
  Fd fd;
  std::uint16_t port = 0;
};

// Port 0: any free one. Error if the address cannot be bound.
Listener listen_on(const std::string& host, std::uint16_t port, const std::string& what);
// The next connection. Error when the deadline passes.
Fd accept_from(const Listener& listener, Deadline deadline, const std::string& what);
// Error when the deadline passes or nobody listens there.
Fd connect_to(const std::string& host, std::uint16_t port, Deadline deadline,
              const std::string& what);

}  // namespace tandem
