// See packing.h.
#include "data/packing.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstdlib>
#include <numeric>

#include "base/check.h"

namespace tandem {
namespace {

bool is_power_of_two(std::int64_t n) {
  return n > 0 && std::has_single_bit(static_cast<std::uint64_t>(n));
}

using Order = std::vector<std::int64_t>;  // indices of the items in id order

Order order_by_id(std::span<const PackItem> items) {
  Order order(items.size());
  std::iota(order.begin(), order.end(), std::int64_t{0});
  const auto id = [&](std::int64_t i) { return items[static_cast<std::size_t>(i)].id; };
  std::sort(order.begin(), order.end(), [&](auto a, auto b) { return id(a) < id(b); });
  for (std::size_t i = 1; i < order.size(); ++i) {
    TD_CHECK(id(order[i - 1]) != id(order[i]), "training batch: sample {} stands twice in it",
             id(order[i]));
  }
  return order;
}

// The place in [begin, end) where its two halves of num_leaves / 2 leaves meet. `starts` are the
// places in id order at which a new prompt begins, ascending, place 0 included.
std::size_t split_place(const std::vector<std::size_t>& starts, std::size_t begin, std::size_t end,
                        std::size_t num_leaves) {
  const std::size_t middle = begin + (end - begin) / 2;
  const auto inside_begin = std::upper_bound(starts.begin(), starts.end(), begin);
  const auto inside_end = std::lower_bound(starts.begin(), starts.end(), end);
  // Borders strictly inside: one fewer than the prompts of the range. (An empty range has none.)
  const auto num_borders = inside_end > inside_begin ? inside_end - inside_begin : 0;
  if (num_borders + 1 < static_cast<std::ptrdiff_t>(num_leaves)) return middle;
  // Border i leaves i + 1 prompts on its left; each side keeps at least num_leaves / 2.
  const auto keep = static_cast<std::ptrdiff_t>(num_leaves / 2);
  const auto distance = [middle](std::size_t place) {
    return place > middle ? place - middle : middle - place;
  };
  auto best = inside_begin + (keep - 1);
  for (auto border = best; border < inside_end - (keep - 1); ++border) {
    if (distance(*border) < distance(*best)) best = border;
  }
  return *best;
}

// Ends of all leaves of [begin, end), left to right.
void cut(const std::vector<std::size_t>& starts, std::size_t begin, std::size_t end,
         std::size_t num_leaves, std::vector<std::size_t>& ends) {
  if (num_leaves == 1) {
    ends.push_back(end);
    return;
  }
  const std::size_t place = split_place(starts, begin, end, num_leaves);
  cut(starts, begin, place, num_leaves / 2, ends);
  cut(starts, place, end, num_leaves / 2, ends);
}

Leaf pack_leaf(std::span<const PackItem> items, std::span<const std::int64_t> places,
               const PackOptions& options) {
  Leaf leaf;
  leaf.num_samples = static_cast<std::int64_t>(places.size());
  const PackItem* previous = nullptr;  // the last sample of the open micro-batch
  for (const std::int64_t place : places) {
    const PackItem& item = items[static_cast<std::size_t>(place)];
    const bool shares = options.share_prompt && previous && previous->prompt_id == item.prompt_id;
    std::int64_t cost = item.response_tokens + (shares ? 0 : item.prompt_tokens);
    if (!previous || leaf.micro_batches.back().num_tokens + cost > options.max_tokens_per_gpu) {
      leaf.micro_batches.emplace_back();
      cost = item.prompt_tokens + item.response_tokens;
    }
    leaf.micro_batches.back().samples.push_back(place);
    leaf.micro_batches.back().num_tokens += cost;
    previous = &item;
  }
  return leaf;
}

}  // namespace

std::vector<Leaf> plan_leaves(std::span<const PackItem> items, const PackOptions& options) {
  TD_CHECK(is_power_of_two(options.num_leaves),
           "--gradient-leaves: {} is not a power of two; use 1, 2, 4, 8, 16 …", options.num_leaves);
  TD_CHECK(options.max_tokens_per_gpu > 0, "--max-tokens-per-gpu: {}, wanted at least 1",
           options.max_tokens_per_gpu);
  const Order order = order_by_id(items);
  std::vector<std::size_t> starts;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const auto prompt = [&](std::size_t at) {
      return items[static_cast<std::size_t>(order[at])].prompt_id;
    };
    if (i == 0 || prompt(i) != prompt(i - 1)) starts.push_back(i);
  }
  std::vector<std::size_t> ends;
  cut(starts, 0, order.size(), static_cast<std::size_t>(options.num_leaves), ends);

  std::vector<Leaf> leaves;
  std::size_t begin = 0;
  for (const std::size_t end : ends) {
    leaves.push_back(pack_leaf(items, std::span(order).subspan(begin, end - begin), options));
    begin = end;
  }
  return leaves;
}

std::pair<std::int64_t, std::int64_t> leaves_of_rank(std::int64_t num_leaves, std::int64_t rank,
                                                     std::int64_t num_ranks) {
  TD_CHECK(is_power_of_two(num_leaves) && num_ranks > 0 && num_ranks <= num_leaves,
           "--gradient-leaves: {} leaves over {} data ranks; a power of two wanted, with at least "
           "one leaf a rank",
           num_leaves, num_ranks);
  assert(rank >= 0 && rank < num_ranks);
  return {num_leaves * rank / num_ranks, num_leaves * (rank + 1) / num_ranks};
}

std::vector<TreeNode> tree_nodes(std::int64_t first, std::int64_t last) {
  std::vector<TreeNode> nodes;
  while (first < last) {
    int level = 0;
    while (first % (std::int64_t{2} << level) == 0 && first + (std::int64_t{2} << level) <= last)
      ++level;
    nodes.push_back({level, first >> level});
    first += std::int64_t{1} << level;
  }
  return nodes;
}

}  // namespace tandem
