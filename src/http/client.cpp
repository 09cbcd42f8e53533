// See client.h. One coroutine, `exchange`, makes a call over a connection for both clients; it
// reports by value, so nothing here throws on what the other side does.
#include "http/client.h"

#include <sys/socket.h>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <cerrno>
#include <deque>
#include <limits>
#include <map>
#include <optional>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/text.h"

namespace tandem::http {
namespace asio = boost::asio;
namespace beast = boost::beast;
namespace bhttp = boost::beast::http;
using asio::ip::tcp;
using beast::error_code;

namespace {

// Well under the server's own limit, so that no call meets a connection the server is closing.
constexpr double kMaxIdleSeconds = 60;

auto into(error_code& error) { return asio::redirect_error(asio::use_awaitable, error); }

std::string bare_host(const std::string& host) {
  return host.size() > 2 && host.front() == '[' ? host.substr(1, host.size() - 2) : host;
}

struct Connection {
  explicit Connection(asio::io_context& io) : stream(io) {}

  // Whether an idle connection can carry another call: still open, nothing unexpected to read.
  bool usable() {
    if (!open || monotonic_seconds() - idle_since > kMaxIdleSeconds) return false;
    char byte;
    const ssize_t n = ::recv(stream.socket().native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
  }

  void close() {
    open = false;
    stream.close();
    buffer.clear();
  }

  beast::tcp_stream stream;
  beast::flat_buffer buffer;
  bool open = false;
  double idle_since = 0;
};

Result failed(const Call& call, Fault fault, const std::string& text) {
  return {{}, fault, call.address.where(call.path) + ": " + text};
}

// The result of a call whose `wait` ("connecting") ended with an error.
Result failed(const Call& call, const error_code& error, Deadline deadline, Fault otherwise,
              const std::string& wait) {
  if (error == beast::error::timeout || deadline.expired()) {
    return failed(call, Fault::timed_out,
                  fmt::format("no answer within {} ({})", deadline.describe(), wait));
  }
  return failed(call, otherwise,
                otherwise == Fault::connect
                    ? fmt::format("cannot connect: {}", error.message())
                    : fmt::format("lost the connection ({}): {}", wait, error.message()));
}

asio::awaitable<error_code> connect(Connection& connection, const Address& address,
                                    Deadline deadline) {
  error_code error;
  std::vector<tcp::endpoint> endpoints;
  const auto numeric = asio::ip::make_address(bare_host(address.host), error);
  if (!error) {
    endpoints.emplace_back(numeric, static_cast<asio::ip::port_type>(address.port));
  } else {
    // The system's resolver has its own time-outs and cannot be cut short.
    tcp::resolver resolver(connection.stream.get_executor());
    const auto found = co_await resolver.async_resolve(bare_host(address.host),
                                                       std::to_string(address.port), into(error));
    if (error) co_return error;
    for (const auto& entry : found) endpoints.push_back(entry.endpoint());
  }
  connection.stream.expires_at(deadline.time_point());
  co_await connection.stream.async_connect(endpoints, into(error));
  if (!error) {
    connection.stream.socket().set_option(tcp::no_delay(true), error);
    connection.open = true;
  }
  co_return error;
}

// Makes the call over `connection`, connecting it first if it is not usable.
asio::awaitable<Result> exchange(Connection& connection, Call& call, Deadline deadline) {
  error_code error;
  if (!connection.usable()) {
    connection.close();
    error = co_await connect(connection, call.address, deadline);
    if (error) {
      connection.close();
      co_return failed(call, error, deadline, Fault::connect, "connecting");
    }
  }
  const bhttp::verb verb = bhttp::string_to_verb(call.method);
  bhttp::request<bhttp::string_body> request(verb, call.path, 11);
  request.set(bhttp::field::host, fmt::format("{}:{}", call.address.host, call.address.port));
  if (!call.address.token.empty()) {
    request.set(bhttp::field::authorization, "Bearer " + call.address.token);
  }
  if (verb != bhttp::verb::get) request.set(bhttp::field::content_type, call.content_type);
  request.body() = std::move(call.body);
  request.prepare_payload();
  const std::size_t body_bytes = request.body().size();

  connection.stream.expires_at(deadline.time_point());
  co_await bhttp::async_write(connection.stream, request, into(error));
  const bool sent = !error;
  if (error == beast::error::timeout) {
    connection.close();
    co_return failed(call, error, deadline, Fault::lost,
                     "sending the request, " + human_bytes(static_cast<double>(body_bytes)));
  }
  // A server may refuse a request and close before it has read all: its answer is worth reading.
  bhttp::response_parser<bhttp::string_body> parser;
  parser.body_limit(std::numeric_limits<std::uint64_t>::max());
  const error_code send_error = error;
  co_await bhttp::async_read_header(connection.stream, connection.buffer, parser, into(error));
  std::string wait = "waiting for the answer";
  if (!error) {
    wait = "reading the answer";
    co_await bhttp::async_read(connection.stream, connection.buffer, parser, into(error));
  } else if (!sent) {
    error = send_error;
    wait = "sending the request, " + human_bytes(static_cast<double>(body_bytes));
  }
  if (error) {
    connection.close();
    co_return failed(call, error, deadline, Fault::lost, wait);
  }
  auto message = parser.release();
  Result result;
  result.response.status = static_cast<int>(message.result_int());
  result.response.content_type = std::string(message[bhttp::field::content_type]);
  result.response.body = std::move(message.body());
  connection.stream.expires_never();
  connection.idle_since = monotonic_seconds();
  if (!message.keep_alive() || !sent) connection.close();
  co_return result;
}

}  // namespace

std::string Address::url(const std::string& path) const {
  const std::string bare = bare_host(host);
  return bare.find(':') == std::string::npos ? fmt::format("http://{}:{}{}", bare, port, path)
                                             : fmt::format("http://[{}]:{}{}", bare, port, path);
}

std::string Address::where(const std::string& path) const {
  return name.empty() ? url(path) : fmt::format("{}: {}", name, path);
}

std::string describe(const Call& call, const Result& result) {
  if (!result.answered()) return result.fault_text;
  if (!call.address.name.empty())
    return fmt::format("{}: {}", call.address.name, error_message(result.response));
  return fmt::format("{}: answered {}: {}", call.address.url(call.path), result.response.status,
                     error_message(result.response));
}

struct Client::Core {
  asio::io_context io{1};
  Connection connection{io};
};

Client::Client(Address address) : address_(std::move(address)), core_(std::make_unique<Core>()) {}
Client::Client(Client&&) noexcept = default;
Client::~Client() = default;

Result Client::try_call(const std::string& method, const std::string& path, std::string body,
                        const std::string& content_type, Deadline deadline) {
  Call call{address_, method, path, std::move(body), content_type};
  Result result;
  core_->io.restart();
  asio::co_spawn(core_->io, exchange(core_->connection, call, deadline),
                 [&result](const std::exception_ptr& thrown, Result outcome) {
                   if (thrown) std::rethrow_exception(thrown);
                   result = std::move(outcome);
                 });
  core_->io.run();
  return result;
}

Response Client::get(const std::string& path, Deadline deadline) {
  Result result = try_call("GET", path, {}, {}, deadline);
  if (!result.answered()) throw Error(result.fault_text);
  return std::move(result.response);
}

Response Client::post(const std::string& path, std::string body, const std::string& content_type,
                      Deadline deadline) {
  Result result = try_call("POST", path, std::move(body), content_type, deadline);
  if (!result.answered()) throw Error(result.fault_text);
  return std::move(result.response);
}

std::string Client::fetch(const std::string& path, Deadline deadline) {
  Result result = try_call("GET", path, {}, {}, deadline);
  if (!result.ok()) throw Error(describe({.address = address_, .path = path}, result));
  return std::move(result.response.body);
}

std::string Client::call(const std::string& path, std::string json_body, Deadline deadline) {
  Result result = try_call("POST", path, std::move(json_body), "application/json", deadline);
  if (!result.ok()) throw Error(describe({.address = address_, .path = path}, result));
  return std::move(result.response.body);
}

// All of it lives on the fetcher's thread.
struct Fetcher::Core {
  struct Job {
    Call call;
    Deadline deadline;
    Callback callback;
  };
  // The calls and connections of one address.
  struct Pool {
    std::deque<Job> waiting;
    std::size_t busy = 0;
    std::vector<std::unique_ptr<Connection>> idle;
  };

  explicit Core(std::size_t max) : max_connections(max), sweep_timer(io) {}

  void add(Job job);
  asio::awaitable<void> work(Pool& pool);
  asio::awaitable<void> sweep();

  asio::io_context io{1};
  asio::executor_work_guard<asio::io_context::executor_type> guard = asio::make_work_guard(io);
  std::size_t max_connections;
  asio::steady_timer sweep_timer;
  bool sweeping = false;
  std::map<std::pair<std::string, int>, Pool> pools;  // entries stay: coroutines refer to them
  std::thread thread;
};

void Fetcher::Core::add(Job job) {
  Pool& pool = pools[{job.call.address.host, job.call.address.port}];
  pool.waiting.push_back(std::move(job));
  if (pool.busy < max_connections) {
    ++pool.busy;
    asio::co_spawn(io, work(pool), asio::detached);
  } else if (!sweeping) {
    sweeping = true;
    asio::co_spawn(io, sweep(), asio::detached);
  }
}

// One connection's life: calls until none waits.
asio::awaitable<void> Fetcher::Core::work(Pool& pool) {
  std::unique_ptr<Connection> connection;
  if (pool.idle.empty()) {
    connection = std::make_unique<Connection>(io);
  } else {
    connection = std::move(pool.idle.back());
    pool.idle.pop_back();
  }
  while (!pool.waiting.empty()) {
    Job job = std::move(pool.waiting.front());
    pool.waiting.pop_front();
    Result result = co_await exchange(*connection, job.call, job.deadline);
    job.callback(std::move(result));
  }
  --pool.busy;
  if (connection->open) pool.idle.push_back(std::move(connection));
}

// Ends calls whose deadline passes while they wait for a connection.
asio::awaitable<void> Fetcher::Core::sweep() {
  for (bool any = true; any;) {
    error_code error;
    sweep_timer.expires_after(std::chrono::milliseconds(50));
    co_await sweep_timer.async_wait(into(error));
    any = false;
    std::vector<Job> late;
    for (auto& [key, pool] : pools) {
      std::deque<Job> kept;
      for (Job& job : pool.waiting) {
        (job.deadline.expired() ? late.emplace_back(std::move(job))
                                : kept.emplace_back(std::move(job)));
      }
      pool.waiting = std::move(kept);
      any = any || !pool.waiting.empty();
    }
    sweeping = any;
    for (Job& job : late) {
      job.callback(failed(job.call, Fault::timed_out,
                          fmt::format("no answer within {} (waiting for one of {} connections)",
                                      job.deadline.describe(), max_connections)));
    }
  }
}

Fetcher::Fetcher(std::size_t max_connections) : core_(std::make_unique<Core>(max_connections)) {
  TD_CHECK(max_connections > 0, "max_connections: found 0, wanted at least 1");
  core_->thread = std::thread([core = core_.get()] { core->io.run(); });
}

Fetcher::~Fetcher() {
  core_->io.stop();
  core_->thread.join();
}

void Fetcher::start(Call call, Deadline deadline, Callback callback) {
  asio::post(core_->io, [core = core_.get(), job = Core::Job{std::move(call), deadline,
                                                             std::move(callback)}]() mutable {
    core->add(std::move(job));
  });
}

}  // namespace tandem::http
