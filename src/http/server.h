// An HTTP/1.1 server for control calls and batches: routes by exact path, keep-alive, one thread.
//
// A handler runs on the server's thread and must not block: it answers at once, or keeps the
// Respond and lets another thread answer later, whole or as a stream of parts. Every request is
// answered exactly once: a Respond that is dropped unanswered answers 500, a second answer is
// ignored, a stream that is dropped before its end cuts the connection. A client that goes away
// before its answer is noticed. Requests that fit no route, or whose token is wrong, are refused
// before their body is read.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "http/message.h"

namespace tandem::http {

struct ServerCore;  // keeps Boost out of this header

// Answers one request; copies answer the same one. Any thread, any time, also after the server has
// stopped (the answer is then lost with its connection).
class Respond {
 public:
  void operator()(Response response) const;

  // In place of one answer: status 200 with the first part, further parts, the end.
  void write(std::string part, const char* content_type) const;
  void end() const;

  // Calls `act` on the server's thread if the client's connection ends before the answer (or the
  // stream's end) is given, also if it has ended already. One function a request. Not called when
  // the server stops.
  void on_gone(std::function<void()> act) const;

 private:
  friend struct ServerCore;
  struct Slot;
  explicit Respond(std::shared_ptr<Slot> slot) : slot_(std::move(slot)) {}
  std::shared_ptr<Slot> slot_;
};

// A tandem::Error thrown by a handler answers 400 with its text, another exception 500.
using Handler = std::function<void(Request, Respond)>;

struct ServerOptions {
  std::string host = "127.0.0.1";  // an address or a name; "::" and "0.0.0.0" listen everywhere
  int port = 0;                    // 0: any free one
  std::string token = {};          // if not empty: 'Authorization: Bearer <token>' is required
  std::size_t max_body_bytes = std::size_t{1} << 30;
};

// Runs work whose answer is due; what it throws becomes the answer (an Error is the caller's fault,
// 400, anything else ours, 500) instead of the end of the thread it runs on.
void guarded(const Respond& respond, const std::function<void()>& work);

class Server {
 public:
  explicit Server(ServerOptions options);
  Server(const Server&) = delete;
  ~Server();  // stop()

  // Before start() only. Unknown paths answer 404 with the list of paths, others methods 405.
  void route(const std::string& method, const std::string& path, Handler handler);

  // Binds and serves. Throws Error naming host and port if the port is taken; a listener of the
  // other IP version on the same port counts, since clients of "localhost" could reach either.
  void start();

  // The bound port; 0 before start().
  int port() const;

  // Stops accepting, gives answers already made up to `grace_seconds` to be sent, closes all
  // connections, joins the thread and destroys the handlers. Not from a handler.
  void stop(double grace_seconds = 2.0);

 private:
  std::shared_ptr<ServerCore> core_;  // shared with every Respond that is still out
};

}  // namespace tandem::http
