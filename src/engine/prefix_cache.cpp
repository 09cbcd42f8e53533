// Hash buckets and the list of retired entries, all in arrays indexed by block.
#include "engine/prefix_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cassert>

namespace tandem {

PrefixCache::PrefixCache(std::int64_t num_blocks, std::int64_t block_tokens)
    : block_tokens_(block_tokens),
      entries_(static_cast<std::size_t>(num_blocks)),
      tokens_(static_cast<std::size_t>(num_blocks * block_tokens)),
      buckets_(std::bit_ceil(static_cast<std::size_t>(2 * num_blocks)), kNone) {}

// FNV-1a over the parent and the tokens, with a last mix since the low bits choose the bucket.
std::size_t PrefixCache::bucket(std::int32_t parent, std::span<const TokenId> tokens) const {
  std::uint64_t hash = 0xCBF29CE484222325ull;
  const auto add = [&](std::int32_t value) {
    hash = (hash ^ static_cast<std::uint32_t>(value)) * 0x100000001B3ull;
  };
  add(parent);
  for (const TokenId token : tokens) add(token);
  hash ^= hash >> 32;
  return static_cast<std::size_t>(hash * 0x9E3779B97F4A7C15ull >> 32) & (buckets_.size() - 1);
}

std::span<const TokenId> PrefixCache::tokens_of(std::int32_t block) const {
  return {tokens_.data() + block * block_tokens_, static_cast<std::size_t>(block_tokens_)};
}

std::int32_t PrefixCache::find(std::int32_t parent, std::span<const TokenId> tokens) const {
  assert(static_cast<std::int64_t>(tokens.size()) == block_tokens_);
  std::int32_t block = buckets_[bucket(parent, tokens)];
  while (block != kNone &&
         !(entries_[block].parent == parent && std::ranges::equal(tokens_of(block), tokens))) {
    block = entries_[block].next_in_bucket;
  }
  return block;
}

void PrefixCache::insert(std::int32_t block, std::int32_t parent, std::span<const TokenId> tokens) {
  Entry& entry = entries_[block];
  assert(!entry.used && (parent == kNone || entries_[parent].used));
  std::int32_t& first = buckets_[bucket(parent, tokens)];
  entry = {.used = true, .parent = parent, .next_in_bucket = first};
  first = block;
  std::ranges::copy(tokens, tokens_.begin() + block * block_tokens_);
  ++num_entries_;
}

void PrefixCache::retire(std::int32_t block) {
  Entry& entry = entries_[block];
  assert(entry.used && !entry.retired);
  entry.retired = true;
  entry.older = newest_;
  entry.newer = kNone;
  (newest_ == kNone ? oldest_ : entries_[newest_].newer) = block;
  newest_ = block;
  ++num_retired_;
}

void PrefixCache::unlink(std::int32_t block) {
  Entry& entry = entries_[block];
  assert(entry.retired);
  (entry.older == kNone ? oldest_ : entries_[entry.older].newer) = entry.newer;
  (entry.newer == kNone ? newest_ : entries_[entry.newer].older) = entry.older;
  entry.retired = false;
  --num_retired_;
}

void PrefixCache::revive(std::int32_t block) { unlink(block); }

std::int32_t PrefixCache::evict() {
  const std::int32_t block = oldest_;
  assert(block != kNone);
  unlink(block);
  end(block);
  return block;
}

void PrefixCache::end(std::int32_t block) {
  std::int32_t* link = &buckets_[bucket(entries_[block].parent, tokens_of(block))];
  while (*link != block) link = &entries_[*link].next_in_bucket;
  *link = entries_[block].next_in_bucket;
  entries_[block] = {};
  --num_entries_;
}

void PrefixCache::clear(std::vector<std::int32_t>* freed) {
  for (std::int32_t block = newest_; block != kNone; block = entries_[block].older) {
    if (freed != nullptr) freed->push_back(block);
  }
  std::ranges::fill(buckets_, kNone);
  std::ranges::fill(entries_, Entry{});
  oldest_ = newest_ = kNone;
  num_entries_ = num_retired_ = 0;
}

std::string PrefixCache::find_fault(std::span<const std::int32_t> references) const {
  std::int64_t used = 0, retired = 0, listed = 0;
  std::int32_t before = kNone;
  std::vector<bool> seen(entries_.size(), false);  // in the list so far
  for (std::int32_t block = oldest_; block != kNone; block = entries_[block].newer) {
    if (++listed > num_retired_) return "the list of retired prefix blocks is longer than counted";
    const Entry& entry = entries_[block];
    if (!entry.retired || entry.older != before) {
      return fmt::format("prefix block {} stands wrongly in the list of retired ones", block);
    }
    if (entry.parent != kNone && seen[entry.parent]) {
      return fmt::format("prefix block {} would be evicted after {}, which it follows", block,
                         entry.parent);
    }
    seen[block] = true;
    before = block;
  }
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const auto block = static_cast<std::int32_t>(i);
    const Entry& entry = entries_[i];
    if (!entry.used) continue;
    ++used;
    retired += entry.retired ? 1 : 0;
    if (entry.retired != (references[i] == 0)) {
      return fmt::format("prefix block {} has {} references and is {}retired", block, references[i],
                         entry.retired ? "" : "not ");
    }
    if (entry.parent != kNone && !entries_[entry.parent].used) {
      return fmt::format("prefix block {} follows {}, which has no entry", block, entry.parent);
    }
    if (entry.parent != kNone && references[entry.parent] < references[i]) {
      return fmt::format("prefix block {} has {} references, {} before it {}", block, references[i],
                         entry.parent, references[entry.parent]);
    }
    if (find(entry.parent, tokens_of(block)) != block) {
      return fmt::format("prefix block {} is not found by its own name", block);
    }
  }
  if (used != num_entries_ || retired != num_retired_ || listed != num_retired_) {
    return fmt::format("{} prefix entries, {} retired, {} listed; counted {} and {}", used, retired,
                       listed, num_entries_, num_retired_);
  }
  return {};
}

}  // namespace tandem
