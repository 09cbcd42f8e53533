// The server and both clients against each other, and the server against raw sockets.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "base/pipe.h"
#include "http/client.h"
#include "http/server.h"

namespace tandem::http {
namespace {

std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "(no error)";
}

Deadline soon() { return Deadline::after(20); }

void echo(Request request, const Respond& respond) {
  respond({200, request.method + " " + request.path + "?" + request.query + " " + request.body,
           "text/plain"});
}

// A listener of one IP version, as another program would hold it.
Fd listen_on(int family, int port, bool everywhere) {
  Fd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  int result = -1;
  if (family == AF_INET) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(everywhere ? INADDR_ANY : INADDR_LOOPBACK);
    result = ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address);
  } else {
    const int only = 1;
    ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof only);
    sockaddr_in6 address{};
    address.sin6_family = AF_INET6;
    address.sin6_port = htons(static_cast<std::uint16_t>(port));
    address.sin6_addr = everywhere ? in6addr_any : in6addr_loopback;
    result = ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address);
  }
  if (result != 0 || ::listen(fd.get(), 8) != 0) return {};
  return fd;
}

int port_of(const Fd& fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(reinterpret_cast<sockaddr_in*>(&address)->sin_port);  // same place in both versions
}

bool has_ipv6() { return static_cast<bool>(listen_on(AF_INET6, 0, false)); }

// A TCP connection to the server for hand-written requests.
Fd dial(int port) {
  Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  return fd;
}

std::string status_line(const Fd& fd) {
  std::string line;
  EXPECT_EQ(read_line(fd.get(), line, 1000, soon()), PipeState::ok);
  return line;
}

TEST(Http, CarriesMethodPathQueryAndBody) {
  Server server({});
  server.route("POST", "/echo", echo);
  server.route("GET", "/echo", echo);
  server.start();
  Client client("127.0.0.1", server.port());
  EXPECT_EQ(client.post("/echo?a=b%20c", "body", "text/plain", soon()).body,
            "POST /echo?a=b%20c body");
  EXPECT_EQ(client.get("/echo", soon()).body, "GET /echo? ");
  const std::string big(20 << 20, 'x');
  EXPECT_EQ(client.post("/echo", big, "application/octet-stream", soon()).body,
            "POST /echo? " + big);
}

// A stream arrives part by part over one kept connection; a dropped one cuts it.
TEST(Http, StreamsPartsAndTheirEnd) {
  Server server({});
  std::optional<Respond> held;
  std::mutex mutex;
  std::condition_variable came;
  server.route("GET", "/stream", [&](const Request&, const Respond& respond) {
    const std::lock_guard lock(mutex);
    held = respond;
    came.notify_all();
  });
  server.route("POST", "/echo", echo);
  server.start();
  const Fd fd = dial(server.port());
  const auto ask = [&] {
    write_bytes(fd.get(), "GET /stream HTTP/1.1\r\nHost: x\r\n\r\n", soon());
    std::unique_lock lock(mutex);
    came.wait_for(lock, std::chrono::seconds(20), [&] { return held.has_value(); });
    Respond respond = *held;
    held.reset();
    return respond;
  };
  const auto read_to = [&](const std::string& wanted) {
    std::string line, all;
    while (line != wanted && read_line(fd.get(), line, 1000, soon()) == PipeState::ok) {
      all += line + "\n";
    }
    return all;
  };
  {
    const Respond respond = ask();
    respond.write("one", "text/event-stream");
    const std::string header = read_to("\r");
    EXPECT_NE(header.find("HTTP/1.1 200 OK"), std::string::npos);
    EXPECT_NE(header.find("text/event-stream"), std::string::npos);
    EXPECT_NE(header.find("chunked"), std::string::npos);
    EXPECT_EQ(read_to("one\r"), "3\r\none\r\n") << "before the stream has ended";
    respond({200, "too late"});
    respond.write("", "ignored");
    respond.write("two\nlines", "ignored");
    respond.end();
    respond.write("after the end", "ignored");
    EXPECT_EQ(read_to("lines\r"), "9\r\ntwo\nlines\r\n");
    EXPECT_EQ(read_to("\r"), "0\r\n\r\n");
  }
  write_bytes(fd.get(), "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi", soon());
  EXPECT_EQ(status_line(fd), "HTTP/1.1 200 OK\r") << "the connection serves on";
  read_to("\r");
  std::string line(14, ' ');
  for (char& c : line) ASSERT_EQ(::recv(fd.get(), &c, 1, 0), 1);
  ask().write("only", "text/plain");
  EXPECT_EQ(status_line(fd), "HTTP/1.1 200 OK\r");
  read_to("only\r");
  EXPECT_NE(read_line(fd.get(), line, 1000, soon()), PipeState::ok) << "no end: the socket closes";
}

TEST(Http, NoticesAClientThatGoesAway) {
  Server server({});
  std::vector<Respond> held;
  std::mutex mutex;
  std::condition_variable changed;
  int gone = 0;
  server.route("POST", "/wait", [&](const Request& request, const Respond& respond) {
    const std::lock_guard lock(mutex);
    respond.on_gone([&] {
      const std::lock_guard again(mutex);
      ++gone;
      changed.notify_all();
    });
    if (request.body == "stream") respond.write("part", "text/plain");
    held.push_back(respond);
    changed.notify_all();
  });
  server.start();
  const auto wait_for = [&](const auto& ready) {
    std::unique_lock lock(mutex);
    EXPECT_TRUE(changed.wait_for(lock, std::chrono::seconds(20), ready));
  };
  const auto post = [&](const Fd& fd, const std::string& body) {
    write_bytes(fd.get(),
                fmt::format("POST /wait HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{}",
                            body.size(), body),
                soon());
  };
  for (const char* body : {"whole", "stream"}) {
    const int before = gone;
    const std::size_t had = held.size();
    {
      const Fd fd = dial(server.port());
      post(fd, body);
      wait_for([&] { return held.size() == had + 1; });
    }
    wait_for([&] { return gone == before + 1; });
  }
  // Also who registers after the client has gone is told; who was answered is not.
  held[0].on_gone([&] {
    const std::lock_guard lock(mutex);
    ++gone;
    changed.notify_all();
  });
  wait_for([&] { return gone == 3; });
  const Fd fd = dial(server.port());
  post(fd, "answered");
  wait_for([&] { return held.size() == 3; });
  held[2]({200, "done"});
  EXPECT_EQ(status_line(fd), "HTTP/1.1 200 OK\r");
  server.stop();
  EXPECT_EQ(gone, 3);
}

TEST(Http, KeepsAConnectionForManyRequests) {
  Server server({});
  server.route("POST", "/echo", echo);
  server.start();
  const Fd fd = dial(server.port());
  for (int i = 0; i < 3; ++i) {
    write_bytes(fd.get(), "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi", soon());
    EXPECT_EQ(status_line(fd), "HTTP/1.1 200 OK\r");
    std::string line;
    while (line != "\r") ASSERT_EQ(read_line(fd.get(), line, 1000, soon()), PipeState::ok);
    char body[14];
    for (char& c : body) ASSERT_EQ(::recv(fd.get(), &c, 1, 0), 1);
    EXPECT_EQ(std::string(body, sizeof body), "POST /echo? hi");
  }
}

TEST(Http, AnswersAHeadWithoutABody) {
  Server server({});
  server.route("GET", "/health", echo);
  server.route("POST", "/echo", echo);
  server.start();
  const Fd fd = dial(server.port());
  for (const auto& [path, status] : {std::pair{"/health", "200 OK"},
                                     {"/echo", "405 Method Not Allowed"},
                                     {"/none", "404 Not Found"}}) {
    write_bytes(fd.get(), fmt::format("HEAD {} HTTP/1.1\r\nHost: x\r\n\r\n", path), soon());
    EXPECT_EQ(status_line(fd), fmt::format("HTTP/1.1 {}\r", status));  // no body stands before it
    std::string line, length;
    while (line != "\r") {
      ASSERT_EQ(read_line(fd.get(), line, 1000, soon()), PipeState::ok);
      if (line.starts_with("Content-Length: ")) length = line.substr(16);
    }
    EXPECT_NE(length, "0\r");
    EXPECT_NE(length, "");
  }
}

TEST(Http, AnswersWhatItDoesNotServe) {
  Server server({.max_body_bytes = 1000});
  server.route("POST", "/generate", echo);
  server.route("GET", "/health", echo);
  server.route("POST", "/fail", [](const Request&, const Respond&) {
    throw Error("max_new_tokens: found -1, wanted 0 or more");
  });
  server.route("POST", "/drop", [](const Request&, const Respond&) {});
  server.start();
  Client client("127.0.0.1", server.port());

  const Response unknown = client.post("/v1/none", "{}", "application/json", soon());
  EXPECT_EQ(unknown.status, 404);
  const Json error = parse_json(unknown.body, "404").at("error");
  EXPECT_EQ(error.at("paths"), (Json{"/drop", "/fail", "/generate", "/health"}));
  EXPECT_EQ(error.at("message"), "/v1/none: no such path");

  const Response method = client.get("/generate", soon());
  EXPECT_EQ(method.status, 405);
  EXPECT_EQ(error_message(method), "/generate: method GET is not allowed, wanted POST");

  const Response fault = client.post("/fail", "", "", soon());
  EXPECT_EQ(fault.status, 400);
  EXPECT_EQ(error_message(fault), "max_new_tokens: found -1, wanted 0 or more");

  EXPECT_EQ(client.post("/drop", "", "", soon()).status, 500);

  // Much more than the socket buffers hold: the answer must get through all the same.
  for (const std::size_t size : {std::size_t{1001}, std::size_t{8} << 20}) {
    const Response large = client.post("/generate", std::string(size, 'x'), "", soon());
    EXPECT_EQ(large.status, 413) << size;
    EXPECT_EQ(error_message(large), "the body is larger than 1000 bytes");
  }
  EXPECT_EQ(client.post("/generate", std::string(1000, 'x'), "", soon()).status, 200);
  EXPECT_NE(error_of([&] {
              client.call("/fail", "{}", soon());
            }).find("/fail: answered 400: max_new_tokens: found -1"),
            std::string::npos);
}

// A client that writes its whole request before it reads (most do) must not be cut off.
TEST(Http, TakesTheRestOfARefusedRequest) {
  Server server({.max_body_bytes = 1000});
  server.route("POST", "/echo", echo);
  server.start();
  const Fd fd = dial(server.port());
  const std::string body(8 << 20, 'x');
  write_bytes(
      fd.get(),
      fmt::format("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.size()),
      soon());
  EXPECT_EQ(write_bytes(fd.get(), body, soon()), PipeState::ok);
  EXPECT_EQ(status_line(fd), "HTTP/1.1 413 Payload Too Large\r");
}

TEST(Http, RefusesWithoutTheToken) {
  Server server({.token = "secret"});
  server.route("GET", "/health", echo);
  server.start();
  EXPECT_EQ(Client("127.0.0.1", server.port()).get("/health", soon()).status, 401);
  EXPECT_EQ(Client("127.0.0.1", server.port(), "secreT").get("/health", soon()).status, 401);
  EXPECT_EQ(Client("127.0.0.1", server.port(), "secret").get("/health", soon()).status, 200);
  // Not even the list of paths.
  EXPECT_EQ(Client("127.0.0.1", server.port()).get("/none", soon()).status, 401);
}

TEST(Http, SurvivesPeersThatSpeakOtherLanguages) {
  Server server({});
  server.route("GET", "/health", echo);
  server.start();
  const Fd fd = dial(server.port());
  write_bytes(fd.get(), "\x16\x03\x01 this is no HTTP\r\n\r\n", soon());
  EXPECT_EQ(status_line(fd), "HTTP/1.1 400 Bad Request\r");
  { const Fd silent = dial(server.port()); }
  const Fd half = dial(server.port());
  write_bytes(half.get(), "GET /health HT", soon());
  EXPECT_EQ(Client("127.0.0.1", server.port()).get("/health", soon()).status, 200);
}

TEST(Http, WaitsForExpectContinue) {
  Server server({});
  server.route("POST", "/echo", echo);
  server.start();
  const Fd fd = dial(server.port());
  write_bytes(fd.get(),
              "POST /echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n",
              soon());
  EXPECT_EQ(status_line(fd), "HTTP/1.1 100 Continue\r");
  EXPECT_EQ(status_line(fd), "\r");
  write_bytes(fd.get(), "hi", soon());
  EXPECT_EQ(status_line(fd), "HTTP/1.1 200 OK\r");
}

// Responds kept by the test and answered by another thread, in the reverse order.
TEST(Http, AnswersLateFromAnotherThread) {
  constexpr int kCalls = 200;
  std::mutex mutex;
  std::condition_variable all_here;
  std::vector<std::pair<std::string, Respond>> held;
  Server server({});
  server.route("POST", "/late", [&](const Request& request, const Respond& respond) {
    const std::lock_guard lock(mutex);
    held.emplace_back(request.body, respond);
    all_here.notify_one();
  });
  server.start();
  Fetcher fetcher(kCalls);
  std::vector<Result> results(kCalls);
  std::atomic<int> done{0};
  for (int i = 0; i < kCalls; ++i) {
    fetcher.start(
        {.address = {"127.0.0.1", server.port()}, .path = "/late", .body = std::to_string(i)},
        Deadline::after(60), [&, i](Result result) {
          results[static_cast<std::size_t>(i)] = std::move(result);
          if (++done == kCalls) {
            const std::lock_guard lock(mutex);
            all_here.notify_one();
          }
        });
  }
  std::thread answerer([&] {
    std::unique_lock lock(mutex);
    ASSERT_TRUE(
        all_here.wait_for(lock, std::chrono::seconds(60), [&] { return held.size() == kCalls; }));
    for (auto it = held.rbegin(); it != held.rend(); ++it) {
      it->second({200, "answer " + it->first});
      it->second({500, "a second answer"});
    }
    held.clear();
  });
  answerer.join();
  std::unique_lock lock(mutex);
  ASSERT_TRUE(all_here.wait_for(lock, std::chrono::seconds(60), [&] { return done == kCalls; }));
  for (int i = 0; i < kCalls; ++i) {
    EXPECT_EQ(results[static_cast<std::size_t>(i)].response.body, "answer " + std::to_string(i));
  }
}

TEST(Http, FetcherKeepsItsCapAndItsOrder) {
  constexpr int kCalls = 50;
  constexpr int kCap = 4;
  std::atomic<int> inside{0}, most{0}, done{0};
  std::mutex mutex;
  std::vector<Respond> held;
  Server server({});
  server.route("POST", "/x", [&](const Request&, const Respond& respond) {
    most = std::max(most.load(), ++inside);
    const std::lock_guard lock(mutex);
    held.push_back(respond);
  });
  server.start();
  Fetcher fetcher(kCap);
  for (int i = 0; i < kCalls; ++i) {
    fetcher.start({.address = {"127.0.0.1", server.port()}, .path = "/x"}, Deadline::after(60),
                  [&](const Result& result) { done += result.ok() ? 1 : 1000; });
  }
  for (const Deadline deadline = Deadline::after(60); done < kCalls && !deadline.expired();) {
    ::usleep(1000);
    const std::lock_guard lock(mutex);
    for (Respond& respond : held) {
      --inside;
      respond({});
    }
    held.clear();
  }
  EXPECT_EQ(done, kCalls);
  EXPECT_LE(most, kCap);
  EXPECT_GT(most, 1);
}

TEST(Http, TimeOutsNameTheirWait) {
  std::vector<Respond> held;  // the server's thread alone touches it
  Server server({});
  server.route("POST", "/never",
               [&](const Request&, const Respond& respond) { held.push_back(respond); });
  server.start();
  Client client("127.0.0.1", server.port());
  EXPECT_EQ(error_of([&] { client.post("/never", "", "", Deadline::after(0.1)); }),
            fmt::format("http://127.0.0.1:{}/never: no answer within 100 ms (waiting for the "
                        "answer)",
                        server.port()));

  // A listener that never reads.
  const Fd deaf = listen_on(AF_INET, 0, false);
  Client sender("127.0.0.1", port_of(deaf));
  EXPECT_NE(error_of([&] {
              sender.post("/x", std::string(64 << 20, 'x'), "", Deadline::after(0.3));
            }).find("(sending the request, 64.0 MiB)"),
            std::string::npos);

  Fetcher fetcher(1);
  std::mutex mutex;
  std::condition_variable came;
  std::vector<std::string> texts;
  for (const double seconds : {1.0, 0.2}) {
    fetcher.start({.address = {"127.0.0.1", server.port()}, .path = "/never"},
                  Deadline::after(seconds), [&](const Result& result) {
                    const std::lock_guard lock(mutex);
                    EXPECT_EQ(result.fault, Fault::timed_out);
                    texts.push_back(result.fault_text);
                    came.notify_one();
                  });
  }
  std::unique_lock lock(mutex);
  ASSERT_TRUE(came.wait_for(lock, std::chrono::seconds(20), [&] { return texts.size() == 2; }));
  EXPECT_NE(texts[0].find("within 200 ms (waiting for one of 1 connections)"), std::string::npos)
      << texts[0];
  lock.unlock();
  server.stop(0);
}

TEST(Http, SaysThatNobodyListens) {
  int port = 0;
  { port = port_of(listen_on(AF_INET, 0, false)); }
  Client client("127.0.0.1", port);
  const Result result = client.try_call("GET", "/health", "", "", soon());
  EXPECT_EQ(result.fault, Fault::connect);
  EXPECT_EQ(result.fault_text,
            fmt::format("http://127.0.0.1:{}/health: cannot connect: Connection refused", port));
  // An address with a name is called by it.
  const Address named{"127.0.0.1", port, {}, "rank 3"};
  EXPECT_EQ(Client(named).try_call("GET", "/health", "", "", soon()).fault_text,
            "rank 3: /health: cannot connect: Connection refused");
  Result refused;
  refused.response = error_response(500, "no room");
  EXPECT_EQ(describe({.address = named, .path = "/x"}, refused), "rank 3: no room");
}

TEST(Http, SeesALostServerAndConnectsAgain) {
  auto server = std::make_optional<Server>(ServerOptions{});
  server->route("GET", "/health", echo);
  server->start();
  const int port = server->port();
  Client client("127.0.0.1", port);
  EXPECT_EQ(client.get("/health", soon()).status, 200);
  server.reset();
  EXPECT_EQ(client.try_call("GET", "/health", "", "", soon()).fault, Fault::connect);
  server.emplace(ServerOptions{.port = port});
  server->route("GET", "/health", echo);
  server->start();
  EXPECT_EQ(client.get("/health", soon()).status, 200);

  // A server that dies while it owes an answer.
  const Fd listener = listen_on(AF_INET, 0, false);
  std::thread dying([&] { Fd(::accept(listener.get(), nullptr, nullptr)); });
  const Result result =
      Client("127.0.0.1", port_of(listener)).try_call("GET", "/x", "", "", soon());
  dying.join();
  EXPECT_EQ(result.fault, Fault::lost) << result.fault_text;
}

TEST(Http, StopSendsAnswersAlreadyMade) {
  for (int round = 0; round < 20; ++round) {
    Server server({});
    std::mutex mutex;
    std::condition_variable asked;
    bool answered = false;
    server.route("POST", "/exit", [&](const Request&, const Respond& respond) {
      respond({200, "bye"});
      const std::lock_guard lock(mutex);
      answered = true;
      asked.notify_one();
    });
    server.start();
    std::thread stopper([&] {
      std::unique_lock lock(mutex);
      asked.wait_for(lock, std::chrono::seconds(20), [&] { return answered; });
      server.stop(10);
    });
    Client client("127.0.0.1", server.port());
    const Result result = client.try_call("POST", "/exit", "", "", soon());
    stopper.join();
    EXPECT_EQ(result.response.body, "bye") << result.fault_text;
  }
}

TEST(Http, TakenPortIsAnErrorThatNamesIt) {
  for (const int family : {AF_INET, AF_INET6}) {
    if (family == AF_INET6 && !has_ipv6()) continue;
    for (const bool everywhere : {false, true}) {
      const Fd other = listen_on(family, 0, everywhere);
      ASSERT_TRUE(static_cast<bool>(other));
      const int port = port_of(other);
      for (const char* host : {"127.0.0.1", "0.0.0.0", "::1", "::"}) {
        if (std::string(host).find(':') != std::string::npos && !has_ipv6()) continue;
        Server server({.host = host, .port = port});
        const std::string text = error_of([&] { server.start(); });
        EXPECT_NE(text.find(fmt::format("port {}: cannot listen on {}: Address already in use",
                                        port, host)),
                  std::string::npos)
            << text << " family " << family << " everywhere " << everywhere << " host " << host;
      }
    }
  }
}

TEST(Http, AutomaticPortsDiffer) {
  std::vector<std::unique_ptr<Server>> servers;
  std::set<int> ports;
  for (int i = 0; i < 20; ++i) {
    servers.push_back(std::make_unique<Server>(ServerOptions{}));
    servers.back()->start();
    ports.insert(servers.back()->port());
  }
  EXPECT_EQ(ports.size(), 20u);
}

TEST(Http, SpeaksIpv6) {
  if (!has_ipv6()) GTEST_SKIP() << "no IPv6 on this machine";
  Server server({.host = "::1"});
  server.route("GET", "/health", echo);
  server.start();
  for (const char* host : {"::1", "[::1]"}) {
    EXPECT_EQ(Client(host, server.port()).get("/health", soon()).status, 200) << host;
  }
  EXPECT_EQ(Address({"::1", 80}).url("/x"), "http://[::1]:80/x");
}

// Answers given while and after the server goes away, from a thread that does not know it.
TEST(Http, RespondOutlivesItsServer) {
  std::vector<Respond> held;
  std::atomic<int> num_held{0};
  {
    Server server({});
    server.route("POST", "/x", [&](const Request&, const Respond& respond) {
      held.push_back(respond);
      ++num_held;
    });
    server.start();
    Fetcher fetcher(8);
    for (int i = 0; i < 8; ++i) {
      fetcher.start({.address = {"127.0.0.1", server.port()}, .path = "/x"}, soon(),
                    [](const Result&) {});
    }
    for (const Deadline deadline = soon(); num_held < 8 && !deadline.expired();) ::usleep(1000);
  }
  ASSERT_EQ(held.size(), 8u);
  held[0]({200, "too late"});
  held.clear();
}

}  // namespace
}  // namespace tandem::http
