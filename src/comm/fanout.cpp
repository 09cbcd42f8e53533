// Framed messages over one TCP connection a follower.
#include "comm/fanout.h"

#include <unistd.h>

#include <cerrno>

#include "base/check.h"
#include "comm/socket.h"

namespace tandem {
namespace {

std::unique_ptr<FramedPipe> over_socket(Fd socket, std::string peer) {
  Fd other(::dup(socket.get()));
  TD_CHECK(other, "{}: cannot copy its descriptor: {}", peer, errno_text(errno));
  return std::make_unique<FramedPipe>(std::move(socket), std::move(other), std::move(peer));
}

std::string key_of(const std::string& name) { return "fanout/" + name; }

}  // namespace

Fanout::Fanout(Store& store, const std::string& name, const std::string& host, int num_followers,
               Deadline deadline) {
  const Listener listener = listen_on(host, 0, name);
  store.set(key_of(name), fmt::format("{} {}", host, listener.port));
  for (int i = 0; i < num_followers; ++i)
    followers_.push_back(
        over_socket(accept_from(listener, deadline,
                                fmt::format("{}: follower {} of {}", name, i + 1, num_followers)),
                    fmt::format("{}, follower {} of {}", name, i + 1, num_followers)));
}

void Fanout::send(std::string_view message, Deadline deadline) {
  for (auto& follower : followers_) {
    const PipeState state = follower->write(message, deadline);
    TD_CHECK(state == PipeState::ok, "{}", follower->describe(state));
  }
}

FanoutReader::FanoutReader(Store& store, const std::string& name, Deadline deadline) {
  const std::string where = store.get(key_of(name), deadline.remaining());
  const auto space = where.find(' ');
  TD_CHECK(space != where.npos, "{}: '{}' found in the store, 'host port' wanted", name, where);
  pipe_ = over_socket(
      connect_to(where.substr(0, space),
                 static_cast<std::uint16_t>(std::stoi(where.substr(space + 1))), deadline, name),
      name + ", leader");
}

}  // namespace tandem
