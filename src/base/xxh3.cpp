// See xxh3.h. The library is used as a header, so nothing has to be linked.
#include "base/xxh3.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <fmt/format.h>

namespace tandem {

struct Xxh3::State {
  XXH3_state_t xxh3;
};

Xxh3::Xxh3() : state_(std::make_unique<State>()) { XXH3_64bits_reset(&state_->xxh3); }
Xxh3::~Xxh3() = default;

void Xxh3::add(std::span<const std::byte> bytes) {
  XXH3_64bits_update(&state_->xxh3, bytes.data(), bytes.size());
}

std::string Xxh3::hex() const { return fmt::format("{:016x}", XXH3_64bits_digest(&state_->xxh3)); }

std::string xxh3_hex(std::span<const std::byte> bytes) {
  return fmt::format("{:016x}", XXH3_64bits(bytes.data(), bytes.size()));
}

}  // namespace tandem
