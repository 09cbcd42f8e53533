// Store over c10d::TCPStore. The listening socket is ours, so that it is bound to the one address
// that was asked for (TCPStore itself would listen on all of them) and port 0 can be told.
#include "comm/store.h"

#include <dlfcn.h>
#include <netdb.h>

#include "comm/c10d.h"
#include "comm/socket.h"

// c10d asks the resolver for the name of each peer that it connects with, to describe the socket:
// seconds where no name server answers. In this program, which never needs a peer's name, addresses
// are told as numbers; libtorch finds this function before the C library's.
extern "C" int getnameinfo(const sockaddr* address, socklen_t length, char* host,
                           socklen_t host_length, char* service, socklen_t service_length,
                           int flags) {
  static const auto own = reinterpret_cast<decltype(&getnameinfo)>(dlsym(RTLD_NEXT, "getnameinfo"));
  return own(address, length, host, host_length, service, service_length, flags | NI_NUMERICHOST);
}

namespace tandem {
namespace {

std::string where(const std::string& host, std::uint16_t port) {
  return fmt::format("store at {}:{}", host, port);
}

c10d::TCPStoreOptions options_of(std::uint16_t port, double timeout_seconds) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.waitWorkers = false;
  options.timeout = milliseconds_of(timeout_seconds);
  options.useLibUV = false;
  return options;
}

std::shared_ptr<c10d::Store> open_store(const std::string& host,
                                        const c10d::TCPStoreOptions& options) {
  quiet_c10d_log();
  return share(c10::intrusive_ptr<c10d::Store>(c10::make_intrusive<c10d::TCPStore>(host, options)));
}

}  // namespace

Store Store::serve(const std::string& host, std::uint16_t port, double timeout_seconds) {
  Listener listener = listen_on(host, port, where(host, port));
  c10d::TCPStoreOptions options = options_of(listener.port, timeout_seconds);
  options.isServer = true;
  options.masterListenFd = listener.fd.release();  // the server closes it
  return Store(host, listener.port,
               call_c10d(where(host, listener.port), [&] { return open_store(host, options); }));
}

Store Store::connect(const std::string& host, std::uint16_t port, double timeout_seconds) {
  return Store(host, port,
               call_c10d(fmt::format("{}: cannot connect within {:.1f} s", where(host, port),
                                     timeout_seconds),
                         [&] { return open_store(host, options_of(port, timeout_seconds)); }));
}

std::string Store::address() const { return fmt::format("{}:{}", host_, port_); }

void Store::set(const std::string& key, const std::string& value) {
  call_c10d(fmt::format("{}: set '{}'", where(host_, port_), key),
            [&] { store_->set(key, value); });
}

std::string Store::get(const std::string& key, double timeout_seconds) {
  return call_c10d(fmt::format("{}: key '{}' was not set within {:.1f} s", where(host_, port_), key,
                               timeout_seconds),
                   [&] {
                     store_->wait({key}, milliseconds_of(timeout_seconds));
                     return store_->get_to_str(key);
                   });
}

std::int64_t Store::add(const std::string& key, std::int64_t amount) {
  return call_c10d(fmt::format("{}: add to '{}'", where(host_, port_), key),
                   [&] { return store_->add(key, amount); });
}

bool Store::has(const std::string& key) {
  return call_c10d(fmt::format("{}: look for '{}'", where(host_, port_), key),
                   [&] { return store_->check({key}); });
}

bool Store::remove(const std::string& key) {
  return call_c10d(fmt::format("{}: remove '{}'", where(host_, port_), key),
                   [&] { return store_->deleteKey(key); });
}

}  // namespace tandem
