// Sockets by getaddrinfo, so that names, IPv4 and IPv6 all do.
#include "comm/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

#include "base/check.h"

namespace tandem {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

Addresses resolve_host(const std::string& host, std::uint16_t port, int flags,
                       const std::string& what) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  const int failed = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  TD_CHECK(failed == 0, "{}: cannot resolve the host: {}", what, ::gai_strerror(failed));
  return Addresses(found, &::freeaddrinfo);
}

std::uint16_t bound_port(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

// Whether the descriptor became ready before the deadline.
bool wait_ready(int fd, short events, Deadline deadline) {
  pollfd entry{fd, events, 0};
  for (;;) {
    const int ready = ::poll(&entry, 1, deadline.poll_milliseconds());
    if (ready > 0) return true;
    if (ready == 0 && deadline.expired()) return false;
  }
}

void send_at_once(int fd) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

}  // namespace

Listener listen_on(const std::string& host, std::uint16_t port, const std::string& what) {
  const Addresses addresses = resolve_host(host, port, AI_PASSIVE, what);
  int error = 0;
  for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
    Fd fd(::socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol));
    const int on = 1;
    if (fd) ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (fd && ::bind(fd.get(), at->ai_addr, at->ai_addrlen) == 0 &&
        ::listen(fd.get(), SOMAXCONN) == 0) {
      const std::uint16_t bound = bound_port(fd.get());
      return {std::move(fd), bound};
    }
    error = errno;
  }
  throw Error(fmt::format("{}: cannot listen: {}; choose another port", what, errno_text(error)));
}

Fd accept_from(const Listener& listener, Deadline deadline, const std::string& what) {
  TD_CHECK(wait_ready(listener.fd.get(), POLLIN, deadline), "{}: nobody connected within {}", what,
           deadline.describe());
  Fd fd(::accept4(listener.fd.get(), nullptr, nullptr, SOCK_CLOEXEC));
  TD_CHECK(fd, "{}: cannot accept: {}", what, errno_text(errno));
  send_at_once(fd.get());
  return fd;
}

Fd connect_to(const std::string& host, std::uint16_t port, Deadline deadline,
              const std::string& what) {
  const Addresses addresses = resolve_host(host, port, 0, what);
  int error = 0;
  for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
    Fd fd(::socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, at->ai_protocol));
    if (!fd) continue;
    if (::connect(fd.get(), at->ai_addr, at->ai_addrlen) != 0 && errno != EINPROGRESS) {
      error = errno;
      continue;
    }
    TD_CHECK(wait_ready(fd.get(), POLLOUT, deadline), "{}: no connection within {}", what,
             deadline.describe());
    socklen_t length = sizeof(error);
    ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) continue;
    ::fcntl(fd.get(), F_SETFL, ::fcntl(fd.get(), F_GETFL) & ~O_NONBLOCK);
    send_at_once(fd.get());
    return fd;
  }
  throw Error(fmt::format("{}: cannot connect: {}", what, errno_text(error)));
}

}  // namespace tandem
