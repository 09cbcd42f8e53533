// The proof that trainer and engine compute the same bits, on any model folder: the same requests
// go through the engine in many ways (batch sizes, chunks of a prompt, known prefixes, preemption,
// tensor parallelism) and their tokens through the trainer's packed forward in several layouts;
// every log-probability is compared bit for bit. What `tandem selftest` prints and the tests
// demand.
//
// The numbers to compare with are the trainer's, of the tokens that the engine sampled in the first
// way. A way that samples another token differs from there on.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/hf_folder.h"
#include "model/arena.h"

namespace tandem {

struct SelftestOptions {
  std::int64_t tokens = 20000;      // to compare, roughly, over all ways
  std::int64_t new_tokens = 48;     // of an answer
  std::int64_t prompt_tokens = 80;  // of the longest prompt
  std::uint64_t seed = 1234;
  bool perturb_engine = false;  // makes the engine wrong by little, to see that it shows
};

struct SelftestRow {
  std::string way;
  std::int64_t tokens = 0;  // compared
  std::int64_t differ = 0;  // of them, those whose token or log-probability is not the same bits
  std::string note = {};         // what made the way special, in counts, or why it could not be tried
};

// One row a way, reported as it is done. Throws Error for a model whose context is too short.
std::vector<SelftestRow> run_selftest(const HfFolder& folder, Arena& arena,
                                      const SelftestOptions& options,
                                      const std::function<void(const SelftestRow&)>& on_row = {});

}  // namespace tandem
