// PromptOrder, see prompts.h. The permutation is a Fisher-Yates shuffle of our own over splitmix64,
// so that a seed means the same order with every compiler and standard library.
#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/hash.h"
#include "data/prompts.h"

namespace tandem {
namespace {

// Numbers of one (seed, epoch): the splitmix64 sequence that starts at a mix of both.
class EpochNumbers {
 public:
  EpochNumbers(std::uint64_t seed, std::uint64_t epoch)
      : state_(splitmix64(splitmix64(seed) ^ epoch)) {}

  // Uniform in [0, bound), without bias: products whose low half falls into the uneven rest are
  // drawn again (Lemire, "Fast random integer generation in an interval", 2019).
  std::uint64_t below(std::uint64_t bound) {
    const std::uint64_t uneven = (0 - bound) % bound;
    while (true) {
      const unsigned __int128 product = static_cast<unsigned __int128>(draw()) * bound;
      if (static_cast<std::uint64_t>(product) >= uneven) {
        return static_cast<std::uint64_t>(product >> 64);
      }
    }
  }

 private:
  std::uint64_t draw() {
    const std::uint64_t value = splitmix64(state_);
    state_ += 0x9E3779B97F4A7C15ull;
    return value;
  }

  std::uint64_t state_;
};

}  // namespace

PromptOrder::PromptOrder(std::uint64_t num_prompts, std::uint64_t seed, bool shuffle)
    : num_prompts_(num_prompts), seed_(seed), shuffle_(shuffle) {
  TD_CHECK(num_prompts > 0, "--prompt-data: no prompts to draw from");
}

void PromptOrder::make_epoch(std::uint64_t epoch) {
  permutation_.resize(num_prompts_);
  std::iota(permutation_.begin(), permutation_.end(), std::uint64_t{0});
  made_epoch_ = epoch;
  if (!shuffle_) return;
  EpochNumbers numbers(seed_, epoch);
  for (std::uint64_t i = num_prompts_ - 1; i > 0; --i) {
    std::swap(permutation_[i], permutation_[numbers.below(i + 1)]);
  }
}

std::vector<PromptOrder::Drawn> PromptOrder::next(std::int64_t count) {
  std::vector<Drawn> drawn;
  for (std::int64_t i = 0; i < count; ++i, ++counter_) {
    if (permutation_.empty() || made_epoch_ != epoch()) make_epoch(epoch());
    drawn.push_back({counter_, permutation_[counter_ % num_prompts_]});
  }
  return drawn;
}

Json PromptOrder::save() const {
  return {{"num_drawn", counter_},
          {"num_prompts", num_prompts_},
          {"seed", seed_},
          {"shuffle", shuffle_}};
}

void PromptOrder::restore(const Json& state, std::string_view where) {
  const auto num_prompts = require<std::uint64_t>(state, "num_prompts", where);
  TD_CHECK(
      num_prompts == num_prompts_,
      "--prompt-data: {} prompts, but the saved run ({}) went through {}; resume with the same "
      "file and filters, or begin a new run from its weights",
      num_prompts_, where, num_prompts);
  const auto seed = require<std::uint64_t>(state, "seed", where);
  TD_CHECK(seed == seed_, "--rollout-seed: {}, but the saved run ({}) used {}; give that one",
           seed_, where, seed);
  const auto shuffle = require<bool>(state, "shuffle", where);
  TD_CHECK(shuffle == shuffle_,
           "--rollout-shuffle: {}, but the saved run ({}) had {}; give the same", shuffle_, where,
           shuffle);
  counter_ = require<std::uint64_t>(state, "num_drawn", where);
}

}  // namespace tandem
