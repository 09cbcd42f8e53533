// How a global batch is cut for training: first into leaves, then each leaf into micro-batches.
//
// The gradient of the batch is the sum over leaves in a fixed binary tree, a leaf's the sum over
// its micro-batches in order. Leaves are contiguous ranges of sample-id order and their number does
// not depend on the ranks; 1, 2, 4 … ranks own whole subtrees. Invariant: the plan is a function of
// (ids, lengths, number of leaves, cap, sharing) alone: never of ranks, order of arrival or thread
// count. That is what makes gradients equal bit for bit on any number of ranks.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace tandem {

// What packing needs to know of a sample.
struct PackItem {
  std::uint64_t id = 0;
  std::uint64_t prompt_id = 0;
  std::int64_t prompt_tokens = 0;
  std::int64_t response_tokens = 0;
};

struct PackOptions {
  std::int64_t num_leaves = 8;  // --gradient-leaves, a power of two
  std::int64_t max_tokens_per_gpu =
      8192;                  // cap of a micro-batch; a longer sample is alone in its own
  bool share_prompt = true;  // a prompt counts once in each micro-batch
};

struct MicroBatch {
  std::vector<std::int64_t> samples;  // indices into the items given, in id order
  std::int64_t num_tokens = 0;        // rows of the packed forward, shared prompts once
};

struct Leaf {
  std::vector<MicroBatch> micro_batches;  // none if the batch has fewer samples than leaves
  std::int64_t num_samples = 0;
};

// Cuts items (in any order; ids must differ) into exactly num_leaves leaves. Halves are split at
// the border between two prompts that is nearest to the middle while each half has at least as many
// prompts as leaves, otherwise at the middle sample; so leaf sizes are as even as whole groups
// allow.
std::vector<Leaf> plan_leaves(std::span<const PackItem> items, const PackOptions& options);

// The leaves [first, last) of a data rank. num_ranks must be a power of two up to num_leaves.
std::pair<std::int64_t, std::int64_t> leaves_of_rank(std::int64_t num_leaves, std::int64_t rank,
                                                     std::int64_t num_ranks);

}  // namespace tandem
