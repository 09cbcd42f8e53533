// The 64-bit mixing function of checksums and seeds: splitmix64 (Steele, Lea, Flood 2014), whose
// finaliser is a bijection, so equal results mean equal inputs. No state, no dependency: usable in
// kernels.
#pragma once

#include <cstdint>

#ifndef TD_HOST_DEVICE
#ifdef __CUDACC__
#define TD_HOST_DEVICE __host__ __device__
#else
#define TD_HOST_DEVICE
#endif
#endif

namespace tandem {

// The n-th output of splitmix64 seeded with `state` is splitmix64(state + n * 0x9E3779B97F4A7C15).
TD_HOST_DEVICE constexpr std::uint64_t splitmix64(std::uint64_t state) {
  std::uint64_t z = state + 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// One term of an additive checksum: depends on the element's index and its bits. `lane` makes
// independent sums of the same elements. Terms are added modulo 2^64, so parts of a tensor may be
// summed in any order and by any rank.
TD_HOST_DEVICE constexpr std::uint64_t checksum_term(std::uint64_t index, std::uint64_t bits,
                                                     std::uint64_t lane = 0) {
  return splitmix64(splitmix64(index + (lane << 62)) ^ bits);
}

}  // namespace tandem
