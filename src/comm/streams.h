// Streams of bytes between the processes of a run: one TCP connection a route, served side by side
// by the thread that calls run(). What is sent next and where received bytes go is asked for piece
// by piece, so that memory is used while it is in cache and no message is ever put together.
//
// A wait ends: if on no route a byte moves for the limit, or a peer closes, run() throws an Error
// that names stream and peer. The connections are of no use after that, since nobody knows what
// part of a piece has gone; the next run() says so.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "comm/group.h"
#include "comm/store.h"

namespace tandem {

class ByteStreams {
 public:
  // A connection to or from a process; `number` tells several between the same two apart and is
  // the same at both ends.
  struct Route {
    int peer = 0;
    int number = 0;
  };
  // The next piece of a route: empty ends it; nullopt: there is none yet, ask again when something
  // else has moved. A receiver's last piece has been filled when it is asked for the next one.
  using Source = std::function<std::optional<std::span<const std::byte>>()>;
  using Sink = std::function<std::optional<std::span<std::byte>>()>;

  // Listens on options.host and connects by way of the store. All processes whose routes meet build
  // theirs under one name. Error naming who is missing within the limit.
  ByteStreams(Store& store, std::string name, int process, std::vector<Route> to,
              std::vector<Route> from, const GroupOptions& options);

  // Serves all routes until each has ended; sources and sinks in the order of the routes.
  void run(std::span<const Source> sources, std::span<const Sink> sinks);

 private:
  struct End;  // of a route while it is served
  bool advance(End& end, bool alone);
  [[noreturn]] void fail(const std::string& what);
  std::string describe() const;

  std::string name_;
  int process_;
  double timeout_seconds_;
  std::vector<Route> to_, from_;
  std::vector<Fd> sending_, receiving_;
  std::string failure_;
};

}  // namespace tandem
