// Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random
// numbers: as easy as 1, 2, 3" (SC 2011): four random words are a pure function of a 128-bit
// counter and a 64-bit key. A draw is therefore named by what it is for (seed, sample, position)
// and does not depend on how many draws came before, on the batch or on the schedule.
// Header only and without dependencies, so that kernels can use it.
#pragma once

#include <array>
#include <cstdint>

#include "base/hash.h"

namespace tandem {

struct Philox4x32 {
  using Counter = std::array<std::uint32_t, 4>;
  using Key = std::array<std::uint32_t, 2>;

  // The four words of (counter, key), ten rounds.
  TD_HOST_DEVICE static constexpr Counter words(Counter counter, Key key) {
    constexpr int kRounds = 10;
    for (int round = 0; round < kRounds; ++round) {
      if (round > 0) {
        key[0] += 0x9E3779B9u;  // golden ratio
        key[1] += 0xBB67AE85u;  // sqrt(3) - 1
      }
      const std::uint64_t product0 = std::uint64_t{0xD2511F53u} * counter[0];
      const std::uint64_t product1 = std::uint64_t{0xCD9E8D57u} * counter[2];
      counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
                 static_cast<std::uint32_t>(product1),
                 static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
                 static_cast<std::uint32_t>(product0)};
    }
    return counter;
  }

  // The same with the counter and the key given as 64-bit numbers, low words first.
  TD_HOST_DEVICE static constexpr Counter words(std::uint64_t counter_low,
                                                std::uint64_t counter_high, std::uint64_t key) {
    return words(
        {static_cast<std::uint32_t>(counter_low), static_cast<std::uint32_t>(counter_low >> 32),
         static_cast<std::uint32_t>(counter_high), static_cast<std::uint32_t>(counter_high >> 32)},
        {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)});
  }
};

// Uniform in [0, 1): 24 bits of one word, or 53 bits of two. Every value is exact, 1 never occurs.
TD_HOST_DEVICE constexpr float uniform_float(std::uint32_t word) {
  return static_cast<float>(word >> 8) * 0x1p-24f;
}
TD_HOST_DEVICE constexpr double uniform_double(std::uint32_t low, std::uint32_t high) {
  return static_cast<double>(((std::uint64_t{high} << 32) | low) >> 11) * 0x1p-53;
}

}  // namespace tandem
