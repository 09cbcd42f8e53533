// How a global batch is cut for training: first into leaves, then each leaf into micro-batches.
//
// The gradient of the batch is the sum over leaves in a fixed binary tree, a leaf's the sum over
// its micro-batches in order. Leaves are contiguous ranges of sample-id order and their number does
// not depend on the ranks; a rank owns consecutive leaves, that is a few whole subtrees (one, where
// the number of ranks is a power of two). Invariant: the plan is a function of (ids, lengths,
// number of leaves, cap, sharing) alone: never of ranks, order of arrival or thread count. That is
// what makes gradients equal bit for bit on any number of ranks.
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

// The leaves [first, last) of a data rank: as even as whole leaves allow. At most num_leaves ranks.
std::pair<std::int64_t, std::int64_t> leaves_of_rank(std::int64_t num_leaves, std::int64_t rank,
                                                     std::int64_t num_ranks);

// A node of the tree over leaves: leaves [index · 2^level, (index + 1) · 2^level).
struct TreeNode {
  int level = 0;
  std::int64_t index = 0;
  bool operator==(const TreeNode&) const = default;
};
// Whether the tree adds b, which comes after a, to a.
constexpr bool are_siblings(const TreeNode& a, const TreeNode& b) {
  return a.level == b.level && a.index % 2 == 0 && b.index == a.index + 1;
}
// The largest nodes that leaves [first, last) consist of, in order; at most two a level.
std::vector<TreeNode> tree_nodes(std::int64_t first, std::int64_t last);

}  // namespace tandem
