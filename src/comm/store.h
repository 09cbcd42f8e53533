// The key-value store by which the processes of a run find each other: one server (the driver),
// many clients (the ranks). c10d's TCPStore with its plain socket backend, bound to one address
// only.
//
// Every wait has a limit in seconds and ends in an Error that names the store's address and the
// key.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace c10d {
class Store;
}

namespace tandem {

class Store {
 public:
  // Listens on host:port (port 0: any free one, see port()) and serves until destroyed. The server
  // is a client too. Throws Error if the address cannot be bound.
  static Store serve(const std::string& host, std::uint16_t port, double timeout_seconds);
  // Connects, trying until the limit.
  static Store connect(const std::string& host, std::uint16_t port, double timeout_seconds);

  const std::string& host() const { return host_; }
  std::uint16_t port() const { return port_; }
  std::string address() const;  // "127.0.0.1:29500"

  void set(const std::string& key, const std::string& value);
  // Waits until the key is set.
  std::string get(const std::string& key, double timeout_seconds);
  // Adds to a counter (created at 0) and returns the new value.
  std::int64_t add(const std::string& key, std::int64_t amount);
  bool has(const std::string& key);
  bool remove(const std::string& key);

  const std::shared_ptr<c10d::Store>& c10d() const { return store_; }

 private:
  Store(std::string host, std::uint16_t port, std::shared_ptr<c10d::Store> store)
      : host_(std::move(host)), port_(port), store_(std::move(store)) {}

  std::string host_;
  std::uint16_t port_;
  std::shared_ptr<c10d::Store> store_;
};

}  // namespace tandem
