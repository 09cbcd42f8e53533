// The sharded step: sum over ranks, norm, AdamW on the own range, gather.
#include "trainer/optimizer.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/check.h"

namespace tandem {
namespace {

std::int64_t shard_size(std::int64_t elements, std::int64_t ranks) {
  return round_up((elements + ranks - 1) / ranks, kSumChunk);
}

std::span<const std::byte> bytes_of(const float* p, std::int64_t n) {
  return {reinterpret_cast<const std::byte*>(p), static_cast<std::size_t>(n) * 4};
}
std::span<std::byte> bytes_of(float* p, std::int64_t n) {
  return {reinterpret_cast<std::byte*>(p), static_cast<std::size_t>(n) * 4};
}

}  // namespace

ShardedAdamW::ShardedAdamW(std::int64_t flat_elements, Group& group, Place place)
    : flat_elements_(flat_elements),
      group_(group),
      shard_(shard_size(flat_elements, group.size())),
      begin_(std::min(flat_elements, group.rank() * shard_)),
      end_(std::min(flat_elements, begin_ + shard_)),
      master_(shard_, place),
      exp_avg_(shard_, place),
      exp_avg_sq_(shard_, place) {
  TD_CHECK((group.size() & (group.size() - 1)) == 0,
           "trainer: {} ranks found, a power of two wanted", group.size());
  TD_CHECK(place == Place::cpu || group.size() == 1,
           "trainer: {} ranks on GPUs are not built yet; use one", group.size());
}

void ShardedAdamW::sum_over_ranks(float* grad) {
  const std::int64_t ranks = group_.size();
  if (ranks == 1) return;
  constexpr std::int64_t kPart = 1 << 20;
  std::vector<float> mine(kPart), all(kPart * ranks);
  for (std::int64_t owner = 0; owner < ranks; ++owner) {
    const std::int64_t first = std::min(flat_elements_, owner * shard_);
    const std::int64_t last = std::min(flat_elements_, first + shard_);
    for (std::int64_t at = first; at < last; at += kPart) {
      const std::int64_t n = std::min(kPart, last - at);
      std::copy_n(grad + at, n, mine.data());
      group_.all_gather(bytes_of(std::as_const(mine).data(), n), bytes_of(all.data(), n * ranks));
      if (owner != group_.rank()) continue;
      for (std::int64_t distance = 1; distance < ranks; distance *= 2)
        for (std::int64_t r = 0; r < ranks; r += 2 * distance)
          kernels().add_f32(all.data() + r * n, all.data() + (r + distance) * n, n);
      std::copy_n(all.data(), n, grad + at);
    }
  }
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

double ShardedAdamW::step(float* grad, AdamWStep settings, double clip_grad) {
  sum_over_ranks(grad);
  const double norm = global_norm(grad);
  if (!std::isfinite(norm)) return norm;
  ++steps_;
  settings.grad_scale =
      clip_grad > 0.0 ? static_cast<float>(std::min(1.0, clip_grad / (norm + 1e-6))) : 1.0f;
  settings.bias_correction1 =
      static_cast<float>(1.0 - std::pow(static_cast<double>(settings.beta1), steps_));
  settings.bias_correction2 =
      static_cast<float>(1.0 - std::pow(static_cast<double>(settings.beta2), steps_));
  kernels(master_.place())
      .adamw(settings, grad + begin_, master_.data(), exp_avg_.data(), exp_avg_sq_.data(),
             end_ - begin_);
  return norm;
}

void ShardedAdamW::gather(std::span<float> flat) {
  TD_CHECK(static_cast<std::int64_t>(flat.size()) == flat_elements_,
           "trainer: {} elements to gather, {} wanted", flat.size(), flat_elements_);
  if (group_.size() == 1) {
    master_.read(0, flat);
    return;
  }
  std::vector<float> all(static_cast<std::size_t>(shard_ * group_.size()));
  group_.all_gather(bytes_of(std::as_const(master_).data(), shard_),
                    bytes_of(all.data(), shard_ * group_.size()));
  std::copy_n(all.data(), flat_elements_, flat.data());
}

void ShardedAdamW::publish(Arena& arena) {
  if (group_.size() == 1) {
    arena.write_flat(0, flat_elements_, master_.data());
  } else {
    std::vector<float> flat(static_cast<std::size_t>(flat_elements_));
    gather(flat);
    arena.write_flat(0, flat_elements_, flat.data());
  }
  arena.set_version(arena.version() + 1);
}

}  // namespace tandem
