// HTTP/1.1 clients: `Client` makes one call at a time and blocks; `Fetcher` keeps hundreds of calls
// going over a bounded number of connections and reports each to a callback.
//
// Every call has a deadline that covers all of it, and every fault says address, path and which
// wait ran out. Calls are never repeated silently: a connection that was idle is checked before it
// is used again, and a call that failed half-way is the caller's to judge.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "base/clock.h"
#include "http/message.h"

namespace tandem::http {

struct Address {
  std::string host = {};  // IPv4, IPv6 (with or without brackets) or a name
  int port = 0;
  std::string token = {};  // sent as 'Authorization: Bearer …' if not empty
  std::string name = {};   // whom a user knows there: "rank 3"

  std::string url(const std::string& path) const;  // "http://[::1]:8000/health"
  // For messages: "rank 3: /health", the URL if there is no name.
  std::string where(const std::string& path) const;
};

enum class Fault {
  none,
  connect,    // nobody listens, no route, unknown name
  timed_out,  // the deadline passed in some wait
  lost        // the connection ended or spoke no HTTP
};

// The outcome of a call. Any status is an answer; `fault` is for calls that got none.
struct Result {
  Response response;
  Fault fault = Fault::none;
  std::string fault_text;  // "http://127.0.0.1:8000/generate: no answer within 2.0 s (…)"

  bool answered() const { return fault == Fault::none; }
  // Answered with 2xx; otherwise describe() says why not.
  bool ok() const { return answered() && response.ok(); }
};

struct Call {
  Address address = {};
  std::string method = "POST";
  std::string path = {};
  std::string body = {};
  std::string content_type = "application/json";
};

// "<url>: answered 500: <message>" ("rank 3: <message>" where the address has a name) or the fault;
// for results that are not ok().
std::string describe(const Call& call, const Result& result);

// One connection, kept alive between calls. One thread at a time.
class Client {
 public:
  explicit Client(Address address);
  Client(const std::string& host, int port, const std::string& token = "")
      : Client(Address{host, port, token}) {}
  Client(Client&&) noexcept;
  ~Client();

  // The answer, whatever its status. Throws Error if there is none.
  Response get(const std::string& path, Deadline deadline);
  Response post(const std::string& path, std::string body, const std::string& content_type,
                Deadline deadline);

  // The body of a 2xx answer; anything else throws Error with the server's message.
  std::string fetch(const std::string& path, Deadline deadline);
  std::string call(const std::string& path, std::string json_body, Deadline deadline);

  // Never throws for what the other side does.
  Result try_call(const std::string& method, const std::string& path, std::string body,
                  const std::string& content_type, Deadline deadline);

  const Address& address() const { return address_; }

 private:
  struct Core;
  Address address_;
  std::unique_ptr<Core> core_;
};

// Many calls at once on a thread of its own.
class Fetcher {
 public:
  using Callback = std::function<void(Result)>;

  // At most `max_connections` to each address; further calls wait in order, their deadlines
  // running.
  explicit Fetcher(std::size_t max_connections = 64);
  Fetcher(const Fetcher&) = delete;

  // Ends all calls; callbacks not yet run never run.
  ~Fetcher();

  // Any thread. The callback runs on the fetcher's thread: it must be short and must not throw; it
  // may start further calls.
  void start(Call call, Deadline deadline, Callback callback);

 private:
  struct Core;
  std::unique_ptr<Core> core_;
};

}  // namespace tandem::http
