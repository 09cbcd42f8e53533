// Over a Unix socket in Linux's abstract name space, which leaves no file behind.
#include "base/descriptor_passing.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <random>

#include "base/check.h"

namespace tandem {
namespace {

struct Address {
  sockaddr_un socket{};
  socklen_t length = 0;
};
Address address_of(const std::string& name) {
  Address a;
  a.socket.sun_family = AF_UNIX;
  TD_CHECK(name.size() + 1 < sizeof a.socket.sun_path, "socket name '{}': too long", name);
  std::memcpy(a.socket.sun_path + 1, name.data(), name.size());
  a.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return a;
}

Fd make_socket() {
  Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  TD_CHECK(fd, "Unix socket: {}", errno_text(errno));
  return fd;
}

// A message with the number as its bytes and room for one descriptor beside it.
struct Message {
  explicit Message(std::int64_t& number) : part{&number, sizeof number} {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
  }
  iovec part;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
};

bool is_own_user(int socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
         peer.uid == ::geteuid();
}

}  // namespace

DescriptorServer::DescriptorServer(Fd descriptor, std::int64_t number)
    : descriptor_(std::move(descriptor)), listener_(make_socket()), number_(number) {
  std::random_device random;
  name_ = fmt::format("tandem-{}-{:08x}{:08x}", ::getpid(), random(), random());
  const Address address = address_of(name_);
  TD_CHECK(::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address.socket),
                  address.length) == 0 &&
               ::listen(listener_.get(), 64) == 0,
           "Unix socket '{}': {}", name_, errno_text(errno));
  PipeEnds stop = make_pipe();
  stop_read_ = std::move(stop.read);
  stop_write_ = std::move(stop.write);
  thread_ = std::thread([this] { serve(); });
}

DescriptorServer::~DescriptorServer() {
  stop_write_.close();
  thread_.join();
}

void DescriptorServer::serve() const {
  for (;;) {
    pollfd entries[2] = {{listener_.get(), POLLIN, 0}, {stop_read_.get(), POLLIN, 0}};
    if (::poll(entries, 2, -1) < 0 && errno != EINTR) return;
    if (entries[1].revents != 0) return;
    if ((entries[0].revents & POLLIN) == 0) continue;
    const Fd peer(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!peer || !is_own_user(peer.get())) continue;
    std::int64_t number = number_;
    Message message(number);
    cmsghdr* control = CMSG_FIRSTHDR(&message.header);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(sizeof(int));
    const int descriptor = descriptor_.get();
    std::memcpy(CMSG_DATA(control), &descriptor, sizeof descriptor);
    ::sendmsg(peer.get(), &message.header, MSG_NOSIGNAL);
  }
}

TakenDescriptor take_descriptor(const std::string& name, Deadline deadline) {
  const Fd socket = make_socket();
  const Address address = address_of(name);
  TakenDescriptor taken;
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.socket), address.length) !=
      0)
    return taken;
  pollfd entry{socket.get(), POLLIN, 0};
  if (::poll(&entry, 1, deadline.poll_milliseconds()) != 1) return taken;
  Message message(taken.number);
  const ssize_t got = ::recvmsg(socket.get(), &message.header, MSG_CMSG_CLOEXEC);
  const cmsghdr* control = CMSG_FIRSTHDR(&message.header);
  if (got != sizeof taken.number || !control || control->cmsg_type != SCM_RIGHTS) return taken;
  int descriptor = -1;
  std::memcpy(&descriptor, CMSG_DATA(control), sizeof descriptor);
  taken.descriptor = Fd(descriptor);
  return taken;
}

}  // namespace tandem
