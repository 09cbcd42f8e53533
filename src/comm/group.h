// A process group: the ranks that do collective operations together (trainer, engine, transfer).
// All ranks call the same operations in the same order. There is no global default group; a group
// is a value that is passed, built under a name that is fresh in its store.
//
// A wait ends: each operation has a limit in seconds, and a dead peer's closed socket ends it
// sooner. The Error names operation, group and rank. After an error the group is unusable (the
// ranks no longer agree what comes next) and says so; a new one is built under another name. A
// group of size 1 needs no store and no backend. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/store.h"

namespace c10d {
class Backend;
}

namespace tandem {

struct GroupOptions {
  std::string host = "127.0.0.1";  // own address that peers connect to
  std::string interface;           // not empty: this network interface instead of host
  double timeout_seconds = 60.0;   // of building the group and of each operation
};

class Group {
 public:
  // The group of one: operations copy or do nothing.
  static Group alone(std::string name);
  // CPU group over Gloo. `name` must not have been used with this store before.
  static Group gloo(const Store& store, std::string name, int rank, int size,
                    const GroupOptions& options = {});

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  double timeout_seconds() const { return timeout_seconds_; }
  void set_timeout(double seconds) { timeout_seconds_ = seconds; }

  void barrier();
  // The bytes of `root` reach all; equal length on all ranks.
  void broadcast(std::span<std::byte> bytes, int root);
  // out = the parts of rank 0, 1, …; out.size() == size() × mine.size(), mine of equal length on
  // all.
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> out);
  // Parts of any length, in the order of ranks.
  std::vector<std::string> all_gather_text(std::string_view mine);
  // Point to point: all parts are under way together, and the call returns when all have arrived.
  // Between two ranks parts pair up in the order given on both sides; an empty part is skipped.
  struct Send {
    std::span<const std::byte> bytes;
    int to = 0;
  };
  struct Receive {
    std::span<std::byte> bytes;
    int from = 0;
  };
  void exchange(std::span<const Send> sends, std::span<const Receive> receives);
  // In place; every rank gets the same bits. The order of additions is the backend's: where it must
  // not depend on the number of ranks, gather and add in order instead.
  void all_reduce_sum(std::span<float> values);
  void all_reduce_sum(std::span<double> values);
  void all_reduce_sum(std::span<std::int64_t> values);

 private:
  Group(std::string name, int rank, int size, double timeout_seconds,
        std::shared_ptr<c10d::Backend> backend)
      : name_(std::move(name)),
        rank_(rank),
        size_(size),
        timeout_seconds_(timeout_seconds),
        backend_(std::move(backend)) {}

  std::string describe(std::string_view operation) const;
  template <typename Start>
  void run(std::string_view operation, Start&& start);
  template <typename T>
  void reduce(std::span<T> values);

  std::string name_;
  int rank_;
  int size_;
  double timeout_seconds_;
  std::shared_ptr<c10d::Backend> backend_;  // null in a group of one
  std::string failure_;                     // the error that ended the group
  std::vector<int> sent_, received_;        // exchanged parts by peer: their tags
};

}  // namespace tandem
