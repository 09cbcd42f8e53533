// See server.h. One io_context on one thread; a connection is a coroutine that reads a request,
// waits for its Respond and writes the answer. Everything but `given` and `unsent` is touched by
// that thread only.
#include "http/server.h"

#include <sys/socket.h>

#include <atomic>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ip/v6_only.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <cerrno>
#include <deque>
#include <map>
#include <optional>
#include <thread>

#include "base/check.h"
#include "base/clock.h"
#include "base/json.h"
#include "base/log.h"

namespace tandem::http {
namespace asio = boost::asio;
namespace beast = boost::beast;
namespace bhttp = boost::beast::http;
using asio::ip::tcp;
using beast::error_code;

namespace {

// An idle connection is closed after this; clients drop theirs earlier (client.cpp).
constexpr std::chrono::seconds kIdle{300};
constexpr std::chrono::seconds kBody{120};  // to read one request's body, to write one answer
constexpr std::chrono::seconds kDrain{10};  // to take the rest of a refused request

auto into(error_code& error) { return asio::redirect_error(asio::use_awaitable, error); }

// An answer that may not be there yet; `ready` is cancelled when something of it comes.
struct Pending {
  explicit Pending(asio::io_context& io) : ready(io) {
    ready.expires_at(asio::steady_timer::time_point::max());
  }
  asio::steady_timer ready;
  std::optional<Response> response;
  std::deque<std::string> parts;  // of a stream, not yet written
  std::string stream_type;        // not empty: the answer is a stream
  bool ended = false;             // the stream is whole
  bool cut = false;               // the stream will have no end
  bool heard = false;             // the client sent something or closed while we waited
  bool early = false;             // it sent its next request: a close can no more be seen
  bool gone = false;
  bool closed = false;  // nobody waits for the answer any more
  std::function<void()> act_on_gone;

  bool has_news() const { return response || !parts.empty() || ended || cut; }
};

// Whether the peer of a readable socket has closed it (or shut down its sending side).
bool has_closed(tcp::socket& socket) {
  char byte;
  const auto size = ::recv(socket.native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return size == 0 || (size < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

// Compares in a time that depends on the lengths only.
bool equal_secret(std::string_view a, std::string_view b) {
  unsigned char difference = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < a.size() && i < b.size(); ++i) {
    difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  }
  return difference == 0;
}

}  // namespace

struct ServerCore : std::enable_shared_from_this<ServerCore> {
  explicit ServerCore(ServerOptions opts) : options(std::move(opts)) {}

  asio::awaitable<void> accept_loop();
  asio::awaitable<void> session(tcp::socket socket);
  asio::awaitable<bool> answer(beast::tcp_stream& stream, Response response, bool keep_alive,
                               unsigned version, bool head = false);
  std::optional<Response> refusal(const bhttp::request_header<>& header) const;
  void handle(const Handler& handler, Request request, const Respond& respond);
  asio::awaitable<void> wait_for_news(tcp::socket& socket, std::shared_ptr<Pending> pending);
  asio::awaitable<bool> answer_stream(beast::tcp_stream& stream, std::shared_ptr<Pending> pending,
                                      bool keep_alive, unsigned version);

  ServerOptions options;
  std::map<std::string, std::map<std::string, Handler>> routes;  // path -> method -> handler
  asio::io_context io{1};
  tcp::acceptor acceptor{io};
  int port = 0;
  std::atomic<int> unsent{0};  // answers given and not yet written
  std::thread thread;
};

struct Respond::Slot {
  Slot(std::shared_ptr<ServerCore> server, std::shared_ptr<Pending> waiting)
      : core(std::move(server)), pending(std::move(waiting)) {}
  Slot(const Slot&) = delete;
  ~Slot() {
    if (streams) {
      tell([](Pending& p) { p.cut = !p.ended; });
    } else {
      give(error_response(500, "the request was dropped without an answer"));
    }
  }

  void give(Response response) {
    if (given.exchange(true)) return;
    ++core->unsent;
    asio::post(core->io,
               [server = core.get(), waiting = pending, answer = std::move(response)]() mutable {
                 if (waiting->closed) --server->unsent;
                 waiting->response = std::move(answer);
                 waiting->ready.cancel();
               });
  }

  // Changes the pending answer on the server's thread.
  template <class Change>
  void tell(Change change) {
    asio::post(core->io, [waiting = pending, change = std::move(change)]() mutable {
      change(*waiting);
      waiting->ready.cancel();
    });
  }

  std::shared_ptr<ServerCore> core;  // before `pending`: a timer must not outlive its context
  std::shared_ptr<Pending> pending;
  std::atomic<bool> given{false};    // an answer, or a stream's first part
  std::atomic<bool> streams{false};  // it is a stream
};

void Respond::operator()(Response response) const { slot_->give(std::move(response)); }

void Respond::write(std::string part, const char* content_type) const {
  if (!slot_->given.exchange(true)) slot_->streams = true;
  if (!slot_->streams) return;
  slot_->tell([part = std::move(part), type = std::string(content_type)](Pending& p) mutable {
    if (p.ended) return;
    if (p.stream_type.empty()) p.stream_type = std::move(type);
    if (!part.empty()) p.parts.push_back(std::move(part));
  });
}

void Respond::end() const {
  if (slot_->streams) slot_->tell([](Pending& p) { p.ended = true; });
}

void Respond::on_gone(std::function<void()> act) const {
  slot_->tell([act = std::move(act)](Pending& p) {
    if (p.gone) return act();
    if (!p.closed) p.act_on_gone = act;
  });
}

// The method whose handler answers: a HEAD is a GET whose body is not sent.
std::string handled_as(std::string_view method) {
  return std::string(method == "HEAD" ? "GET" : method);
}

// What a request is refused with before its body is read, or nothing.
std::optional<Response> ServerCore::refusal(const bhttp::request_header<>& header) const {
  if (!options.token.empty() &&
      !equal_secret(std::string(header[bhttp::field::authorization]), "Bearer " + options.token)) {
    return error_response(401, "the token is missing or wrong: send 'Authorization: Bearer TOKEN'");
  }
  const std::string target(header.target());
  const std::string path = target.substr(0, target.find('?'));
  const auto route = routes.find(path);
  if (route == routes.end()) {
    Json error{{"message", fmt::format("{}: no such path", path)}, {"paths", Json::array()}};
    for (const auto& [known, methods] : routes) error["paths"].push_back(known);
    return Response{404, dump_json(Json{{"error", error}})};
  }
  if (!route->second.contains(handled_as(header.method_string()))) {
    std::string allowed;
    for (const auto& [method, handler] : route->second) {
      allowed += (allowed.empty() ? "" : ", ") + method;
    }
    return error_response(405, fmt::format("{}: method {} is not allowed, wanted {}", path,
                                           std::string(header.method_string()), allowed));
  }
  return std::nullopt;
}

void guarded(const Respond& respond, const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    respond(error_response(400, error.what()));
  } catch (const std::exception& error) {
    respond(error_response(500, error.what()));
  }
}

void ServerCore::handle(const Handler& handler, Request request, const Respond& respond) {
  guarded(respond, [&] { handler(std::move(request), respond); });
}

// Writes one answer, without its body to a HEAD; false if the connection is of no more use.
asio::awaitable<bool> ServerCore::answer(beast::tcp_stream& stream, Response response,
                                         bool keep_alive, unsigned version, bool head) {
  bhttp::response<bhttp::string_body> message;
  message.version(version);
  message.result(static_cast<unsigned>(response.status));
  message.set(bhttp::field::content_type, response.content_type);
  message.keep_alive(keep_alive);
  message.body() = std::move(response.body);
  message.prepare_payload();  // the length stands in the header either way
  if (head) message.body().clear();
  error_code error;
  stream.expires_after(kBody);
  co_await bhttp::async_write(stream, message, into(error));
  co_return !error && keep_alive;
}

// Until something of the answer is there or the client has gone.
asio::awaitable<void> ServerCore::wait_for_news(tcp::socket& socket,
                                                std::shared_ptr<Pending> pending) {
  error_code ignored;
  bool listens = false;
  while (!pending->has_news()) {
    if (pending->heard) {
      pending->heard = listens = false;
      pending->gone = has_closed(socket);
      if (pending->gone) co_return;
      pending->early = true;
    }
    if (!listens && !pending->early) {
      listens = true;
      socket.async_wait(tcp::socket::wait_read, [pending](const error_code& error) {
        if (error == asio::error::operation_aborted) return;
        pending->heard = true;
        pending->ready.cancel();
      });
    }
    co_await pending->ready.async_wait(into(ignored));
  }
  if (listens) socket.cancel(ignored);
}

// Writes a stream's parts as they come; false if the connection is of no more use.
asio::awaitable<bool> ServerCore::answer_stream(beast::tcp_stream& stream,
                                                std::shared_ptr<Pending> pending, bool keep_alive,
                                                unsigned version) {
  bhttp::response<bhttp::empty_body> header;
  header.version(version);
  header.result(bhttp::status::ok);
  header.set(bhttp::field::content_type, pending->stream_type);
  header.set(bhttp::field::cache_control, "no-cache");
  header.keep_alive(keep_alive);
  header.chunked(true);
  bhttp::response_serializer<bhttp::empty_body> serializer(header);
  error_code error;
  stream.expires_after(kBody);
  co_await bhttp::async_write_header(stream, serializer, into(error));
  while (!error && !pending->gone && !pending->cut) {
    if (!pending->parts.empty()) {
      const std::string part = std::move(pending->parts.front());
      pending->parts.pop_front();
      stream.expires_after(kBody);
      co_await asio::async_write(stream, bhttp::make_chunk(asio::buffer(part)), into(error));
    } else if (pending->ended) {
      stream.expires_after(kBody);
      co_await asio::async_write(stream, bhttp::make_chunk_last(), into(error));
      co_return !error && keep_alive;
    } else {
      stream.expires_never();
      co_await wait_for_news(stream.socket(), pending);
    }
  }
  pending->gone = pending->gone || (error && !pending->ended);
  co_return false;
}

asio::awaitable<void> ServerCore::session(tcp::socket socket) {
  error_code error;
  socket.set_option(tcp::no_delay(true), error);
  beast::tcp_stream stream(std::move(socket));
  beast::flat_buffer buffer;
  bool unread = false;  // the peer may still be sending what we do not want
  for (bool keep = true; keep && !unread;) {
    bhttp::request_parser<bhttp::string_body> parser;
    parser.body_limit(options.max_body_bytes);
    stream.expires_after(kIdle);
    co_await bhttp::async_read_header(stream, buffer, parser, into(error));
    const bool head = !error && parser.get().method() == bhttp::verb::head;
    if (!error) {
      if (auto refused = refusal(parser.get())) {
        unread = !parser.is_done();
        keep = co_await answer(stream, std::move(*refused), parser.get().keep_alive() && !unread,
                               parser.get().version(), head);
        continue;
      }
      stream.expires_after(kBody);
      if (beast::iequals(parser.get()[bhttp::field::expect], "100-continue")) {
        bhttp::response<bhttp::empty_body> go_on(bhttp::status::continue_, 11);
        co_await bhttp::async_write(stream, go_on, into(error));
      }
      if (!error) co_await bhttp::async_read(stream, buffer, parser, into(error));
    }
    if (error == bhttp::error::body_limit) {
      unread = true;
      co_await answer(stream,
                      error_response(413, fmt::format("the body is larger than {} bytes",
                                                      options.max_body_bytes)),
                      false, 11);
      continue;
    }
    if (error) {
      unread = error.category() == bhttp::make_error_code(bhttp::error::bad_method).category() &&
               error != bhttp::error::end_of_stream && error != bhttp::error::partial_message;
      if (unread) {
        co_await answer(stream, error_response(400, "not HTTP/1.1: " + error.message()), false, 11);
      }
      break;
    }

    bhttp::request<bhttp::string_body> message = parser.release();
    const bool keep_alive = message.keep_alive();
    const unsigned version = message.version();
    const auto pending = std::make_shared<Pending>(io);
    {
      const std::string target(message.target());
      const std::size_t mark = target.find('?');
      Request request{std::string(message.method_string()), target.substr(0, mark),
                      mark == std::string::npos ? "" : target.substr(mark + 1),
                      std::string(message[bhttp::field::content_type]), std::move(message.body())};
      const Handler& handler = routes.at(request.path).at(handled_as(request.method));
      stream.expires_never();
      handle(handler, std::move(request),
             Respond(std::make_shared<Respond::Slot>(shared_from_this(), pending)));
    }
    while (!pending->response && pending->stream_type.empty() && !pending->gone) {
      co_await wait_for_news(stream.socket(), pending);
    }
    if (pending->response) {
      keep = co_await answer(stream, std::move(*pending->response), keep_alive, version, head);
      --unsent;
    } else if (!pending->gone) {
      keep = co_await answer_stream(stream, pending, keep_alive, version);
    }
    pending->closed = true;
    if (pending->gone) {
      keep = false;
      if (pending->act_on_gone) pending->act_on_gone();
    }
    pending->act_on_gone = nullptr;
  }

  // Closing with unread bytes would reset the connection and take the answer with it.
  stream.socket().shutdown(tcp::socket::shutdown_send, error);
  stream.expires_after(kDrain);
  while (unread && !error) {
    buffer.clear();
    co_await stream.async_read_some(buffer.prepare(1 << 16), into(error));
  }
}

asio::awaitable<void> ServerCore::accept_loop() {
  while (acceptor.is_open()) {
    error_code error;
    tcp::socket socket = co_await acceptor.async_accept(into(error));
    if (!error) {
      asio::co_spawn(io, session(std::move(socket)), asio::detached);
    } else if (error != asio::error::operation_aborted) {
      TD_LOG(warn, "http: cannot accept a connection: {}", error.message());
      asio::steady_timer pause(io, std::chrono::milliseconds(100));
      co_await pause.async_wait(into(error));
    }
  }
}

namespace {

// Whether somebody listens on the same port of the other IP version.
bool other_version_taken(asio::io_context& io, const tcp::endpoint& bound) {
  const asio::ip::address address = bound.address();
  const bool everywhere = address.is_unspecified();
  if (!everywhere && !address.is_loopback()) return false;
  tcp::endpoint other;
  if (address.is_v4()) {
    other = {everywhere ? asio::ip::address_v6::any() : asio::ip::address_v6::loopback(),
             bound.port()};
  } else {
    if (everywhere) return false;  // bound to both versions already
    other = {asio::ip::address_v4::loopback(), bound.port()};
  }
  error_code error;
  tcp::acceptor probe(io);
  probe.open(other.protocol(), error);
  if (error) return false;  // a machine without that version
  probe.set_option(tcp::acceptor::reuse_address(true), error);
  if (other.protocol() == tcp::v6()) probe.set_option(asio::ip::v6_only(true), error);
  probe.bind(other, error);
  return error == asio::error::address_in_use;
}

// Opens, binds and listens; the error of the step that failed.
error_code listen_at(tcp::acceptor& acceptor, const tcp::endpoint& endpoint) {
  error_code error;
  acceptor.open(endpoint.protocol(), error);
  if (!error) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
  if (!error && endpoint.protocol() == tcp::v6()) {
    acceptor.set_option(asio::ip::v6_only(!endpoint.address().is_unspecified()), error);
  }
  if (!error) acceptor.bind(endpoint, error);
  if (!error) acceptor.listen(asio::socket_base::max_listen_connections, error);
  return error;
}

tcp::endpoint resolve_own(asio::io_context& io, const std::string& host, int port) {
  TD_CHECK(port >= 0 && port <= 65535, "port: found {}, wanted 0 to 65535", port);
  std::string bare = host;
  if (bare.size() > 2 && bare.front() == '[') bare = bare.substr(1, bare.size() - 2);
  error_code error;
  const asio::ip::address address = asio::ip::make_address(bare, error);
  if (!error) return {address, static_cast<asio::ip::port_type>(port)};
  const auto found = tcp::resolver(io).resolve(bare, std::to_string(port), error);
  TD_CHECK(!error && !found.empty(), "host '{}': cannot find its address: {}", host,
           error.message());
  return found.begin()->endpoint();
}

}  // namespace

Server::Server(ServerOptions options) : core_(std::make_shared<ServerCore>(std::move(options))) {}

Server::~Server() { stop(); }

void Server::route(const std::string& method, const std::string& path, Handler handler) {
  core_->routes[path][method] = std::move(handler);
}

int Server::port() const { return core_->port; }

void Server::start() {
  constexpr int kAutomaticTries = 50;
  const ServerOptions& options = core_->options;
  const tcp::endpoint wanted = resolve_own(core_->io, options.host, options.port);
  error_code error;
  for (int attempt = 0;; ++attempt) {
    error = listen_at(core_->acceptor, wanted);
    if (!error && other_version_taken(core_->io, core_->acceptor.local_endpoint())) {
      error = asio::error::address_in_use;
    }
    if (!error) break;
    core_->acceptor.close();
    if (options.port == 0 && error == asio::error::address_in_use && attempt < kAutomaticTries) {
      continue;
    }
    throw Error(fmt::format("port {}: cannot listen on {}: {}; {}", options.port, options.host,
                            error.message(),
                            error == asio::error::address_in_use
                                ? "end the program that listens there or choose another port"
                                : "choose an address of this machine"));
  }
  core_->port = core_->acceptor.local_endpoint().port();
  asio::co_spawn(core_->io, core_->accept_loop(), asio::detached);
  core_->thread = std::thread([core = core_.get()] { core->io.run(); });
}

void Server::stop(double grace_seconds) {
  if (!core_->thread.joinable()) return;
  asio::post(core_->io, [core = core_.get()] {
    error_code ignored;
    core->acceptor.close(ignored);
  });
  const Deadline deadline = Deadline::after(grace_seconds);
  while (core_->unsent > 0 && !deadline.expired()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  core_->io.stop();
  core_->thread.join();
  core_->routes.clear();  // what handlers hold ends here, although Responds may keep the core
}

}  // namespace tandem::http
