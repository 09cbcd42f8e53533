// The sharded step: sum over ranks, norm, AdamW on the own range, gather.
#include "trainer/optimizer.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <vector>

#include "base/check.h"

namespace tandem {
namespace {

std::int64_t shard_size(std::int64_t elements, std::int64_t ranks) {
  return round_up((elements + ranks - 1) / ranks, kSumChunk);
}

std::span<std::byte> bytes_of(float* p, std::int64_t n) {
  return {reinterpret_cast<std::byte*>(p), static_cast<std::size_t>(n) * 4};
}
std::span<const std::byte> bytes_of(const float* p, std::int64_t n) {
  return {reinterpret_cast<const std::byte*>(p), static_cast<std::size_t>(n) * 4};
}

// The sum of all parts, which together are the whole tree: siblings are added, left to right, as in
// GradientTree. The parts are scratch.
float* finish_tree(const std::vector<GradientTree::Sum>& parts, std::int64_t elements) {
  std::vector<GradientTree::Sum> stack;
  for (const GradientTree::Sum& part : parts) {
    stack.push_back(part);
    while (stack.size() > 1 && are_siblings(stack[stack.size() - 2].node, stack.back().node)) {
      GradientTree::Sum& left = stack[stack.size() - 2];
      kernels().add_f32(left.values, stack.back().values, elements);
      left.node = {left.node.level + 1, left.node.index / 2};
      stack.pop_back();
    }
  }
  assert(stack.size() == 1);
  return stack.front().values;
}

// The arena holds the step's weights from now on, also for engines of other processes, which read
// it from memory.
void finish_write(Arena& arena) {
  if (arena.place() == Place::cuda) cuda_part().synchronize();
  arena.set_version(arena.version() + 1);
}

}  // namespace

ShardedAdamW::ShardedAdamW(std::int64_t flat_elements, Group& group, Place place)
    : flat_elements_(flat_elements),
      group_(group),
      shard_(shard_size(flat_elements, group.size())),
      begin_(range_of(group.rank()).begin),
      end_(range_of(group.rank()).end),
      master_(shard_, place),
      exp_avg_(shard_, place),
      exp_avg_sq_(shard_, place) {}

FlatRange ShardedAdamW::range_of(int rank) const {
  return {std::min(flat_elements_, rank * shard_), std::min(flat_elements_, (rank + 1) * shard_)};
}

float* ShardedAdamW::sum_over_ranks(const std::vector<GradientTree::Sum>& sums,
                                    std::int64_t num_leaves) {
  TD_CHECK(!sums.empty(), "trainer: rank {} of {} has no gradient", group_.rank(), group_.size());
  if (group_.size() == 1) return sums.front().values;
  const Place place = master_.place();
  if (place == Place::cpu) return sum_on_host(sums, num_leaves);
  std::vector<std::vector<float>> memory;
  std::vector<GradientTree::Sum> copies;
  for (const GradientTree::Sum& sum : sums) {
    memory.emplace_back(static_cast<std::size_t>(flat_elements_));
    read_memory(place, memory.back().data(), sum.values, flat_elements_ * 4);
    copies.push_back(sum);
    copies.back().values = memory.back().data();
  }
  const float* total = sum_on_host(copies, num_leaves);
  float* const grad = sums.front().values;
  write_memory(place, grad + begin_, total + begin_, (end_ - begin_) * 4);
  return grad;
}

float* ShardedAdamW::sum_on_host(const std::vector<GradientTree::Sum>& sums,
                                 std::int64_t num_leaves) {
  const int ranks = group_.size(), me = group_.rank();
  constexpr std::int64_t kPart = 1 << 20;
  std::vector<std::vector<TreeNode>> nodes;  // of each rank's sums
  std::size_t received = 0;
  for (int r = 0; r < ranks; ++r) {
    const auto [first, last] = leaves_of_rank(num_leaves, r, ranks);
    nodes.push_back(tree_nodes(first, last));
    if (r != me) received += nodes.back().size();
  }
  std::vector<float> memory(received * static_cast<std::size_t>(std::min(kPart, shard_)));
  // Elements [at, at + part_of(r)) of rank r's range go to r in round `at`.
  for (std::int64_t at = 0; at < shard_; at += kPart) {
    const auto first_of = [&](int r) { return std::min(flat_elements_, r * shard_ + at); };
    const auto part_of = [&](int r) {
      const std::int64_t last = std::min(flat_elements_, (r + 1) * shard_);
      return std::max<std::int64_t>(0, std::min(kPart, last - first_of(r)));
    };
    std::vector<Group::Send> sends;
    std::vector<Group::Receive> receives;
    std::vector<GradientTree::Sum> parts;  // of the own range, in the order of leaves
    float* free = memory.data();
    for (int r = 0; r < ranks; ++r)
      for (std::size_t i = 0; i < nodes[r].size(); ++i) {
        parts.push_back({nodes[r][i], r == me ? sums[i].values + first_of(me) : free});
        if (r == me) continue;
        receives.push_back({bytes_of(free, part_of(me)), r});
        free += part_of(me);
      }
    for (int r = 0; r < ranks; ++r)
      for (const GradientTree::Sum& sum : sums)
        if (r != me) sends.push_back({bytes_of(sum.values + first_of(r), part_of(r)), r});
    group_.exchange(sends, receives);
    const float* total = finish_tree(parts, part_of(me));
    float* own = sums.front().values + first_of(me);
    if (total != own) std::copy_n(total, part_of(me), own);
  }
  return sums.front().values;
}

double ShardedAdamW::global_norm(const float* grad) {
  const std::int64_t chunks = (flat_elements_ + kSumChunk - 1) / kSumChunk;
  std::vector<double> sums(static_cast<std::size_t>(chunks), 0.0);
  if (end_ > begin_)
    kernels(master_.place())
        .sum_squares(grad + begin_, end_ - begin_, sums.data() + begin_ / kSumChunk);
  // Each chunk has one owner, the others add 0: exact.
  if (group_.size() > 1) group_.all_reduce_sum(std::span<double>(sums));
  double total = 0.0;
  for (double s : sums) total += s;
  return std::sqrt(total);
}

double ShardedAdamW::prepare(const float* grad, AdamWStep& settings, double clip_grad) {
  const double norm = global_norm(grad);
  if (!std::isfinite(norm)) return norm;
  ++steps_;
  settings.grad_scale =
      clip_grad > 0.0 ? static_cast<float>(std::min(1.0, clip_grad / (norm + 1e-6))) : 1.0f;
  settings.bias_correction1 =
      static_cast<float>(1.0 - std::pow(static_cast<double>(settings.beta1), steps_));
  settings.bias_correction2 =
      static_cast<float>(1.0 - std::pow(static_cast<double>(settings.beta2), steps_));
  return norm;
}

double ShardedAdamW::step(const std::vector<GradientTree::Sum>& sums, std::int64_t num_leaves,
                          AdamWStep settings, double clip_grad) {
  const float* grad = sum_over_ranks(sums, num_leaves);
  const double norm = prepare(grad, settings, clip_grad);
  if (!std::isfinite(norm)) return norm;
  kernels(master_.place())
      .adamw(settings, grad + begin_, master_.data(), exp_avg_.data(), exp_avg_sq_.data(),
             end_ - begin_);
  return norm;
}

double ShardedAdamW::step_and_publish(const std::vector<GradientTree::Sum>& sums,
                                      std::int64_t num_leaves, const AdamWStep& settings,
                                      double clip_grad, Arena& arena,
                                      std::span<const FlatRange> held) {
  if (group_.size() > 1 || arena.place() != Place::cuda ||
      arena.layout().element != Element::bf16) {
    const double norm = step(sums, num_leaves, settings, clip_grad);
    if (std::isfinite(norm)) publish(arena, held);
    return norm;
  }
  const float* grad = sum_over_ranks(sums, num_leaves);
  AdamWStep numbers = settings;
  const double norm = prepare(grad, numbers, clip_grad);
  if (!std::isfinite(norm)) return norm;
  const auto pieces = arena.gpu_pieces();
  cuda_part().adamw_into(numbers, grad, master_.data(), exp_avg_.data(), exp_avg_sq_.data(),
                         pieces.data(), static_cast<std::int64_t>(pieces.size()));
  finish_write(arena);
  return norm;
}

void ShardedAdamW::gather(std::span<const FlatRange> wanted, std::span<float> mine) {
  const int me = group_.rank();
  TD_CHECK(std::ssize(wanted) == group_.size() && std::ssize(mine) == wanted[me].size(),
           "trainer: {} ranges and {} elements to gather, {} and {} wanted", wanted.size(),
           mine.size(), group_.size(), wanted[me].size());
  std::vector<float> copy;  // of the own masters, where they are not on the host
  const float* own = master_.data();
  if (master_.place() != Place::cpu) {
    copy.resize(static_cast<std::size_t>(end_ - begin_));
    master_.read(0, copy);
    own = copy.data();
  }
  constexpr std::int64_t kPart = 16 << 20;
  std::vector<Group::Send> sends;
  std::vector<Group::Receive> receives;
  // Calls take(begin, elements) for what two ranges share, part by part.
  const auto share = [&](FlatRange a, FlatRange b, auto&& take) {
    const std::int64_t end = std::min(a.end, b.end);
    for (std::int64_t at = std::max(a.begin, b.begin); at < end; at += kPart)
      take(at, std::min(kPart, end - at));
  };
  for (int r = 0; r < group_.size(); ++r) {
    share(wanted[me], range_of(r), [&](std::int64_t at, std::int64_t count) {
      float* const to = mine.data() + (at - wanted[me].begin);
      if (r == me)
        std::copy_n(own + (at - begin_), count, to);
      else
        receives.push_back({bytes_of(to, count), r});
    });
    if (r == me) continue;
    share(wanted[r], range_of(me), [&](std::int64_t at, std::int64_t count) {
      sends.push_back({bytes_of(own + (at - begin_), count), r});
    });
  }
  if (group_.size() > 1) group_.exchange(sends, receives);
}

void ShardedAdamW::publish(Arena& arena, std::span<const FlatRange> held) {
  const std::vector<FlatRange> all(static_cast<std::size_t>(group_.size()), {0, flat_elements_});
  if (held.empty()) held = all;
  const std::int64_t elements = held[group_.rank()].size();
  if (group_.size() == 1) {
    arena.write_flat(0, elements, master_.data());
  } else {
    std::vector<float> flat(static_cast<std::size_t>(elements));
    gather(held, flat);
    if (arena.place() == Place::cpu) {
      arena.write_flat(0, elements, flat.data());
    } else {
      FlatBuffer on_device(elements, arena.place());
      on_device.write(0, flat);
      arena.write_flat(0, elements, on_device.data());
    }
  }
  finish_write(arena);
}

}  // namespace tandem
