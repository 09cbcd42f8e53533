// XXH3, 64 bits (Collet, xxHash 0.8): the checksum of stored bytes. It finds damage by accident,
// not by intent, at the speed of memory, and is the same on every machine.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace tandem {

// Bytes given part by part.
class Xxh3 {
 public:
  Xxh3();
  ~Xxh3();
  Xxh3(const Xxh3&) = delete;
  Xxh3& operator=(const Xxh3&) = delete;

  void add(std::span<const std::byte> bytes);
  // Of all that was added, as 16 hexadecimal digits: JSON numbers do not hold 64 bits everywhere.
  std::string hex() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::string xxh3_hex(std::span<const std::byte> bytes);

}  // namespace tandem
