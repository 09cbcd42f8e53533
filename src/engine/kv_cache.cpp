// Reference-counted KV blocks; see the header for the rules.
#include "engine/kv_cache.h"

#include <fmt/format.h>

#include <cassert>

#include "base/check.h"

namespace tandem {

namespace {

std::int64_t checked_blocks(std::int64_t num_blocks) {
  TD_CHECK(num_blocks > 0 && num_blocks <= INT32_MAX,
           "KV pool: {} blocks; wanted 1 to {}: give the engine more memory or a smaller model",
           num_blocks, INT32_MAX);
  return num_blocks;
}

}  // namespace

KvCache::KvCache(std::int64_t num_blocks, std::int64_t block_tokens)
    : block_tokens_(block_tokens), prefixes_(checked_blocks(num_blocks), block_tokens) {
  assert(block_tokens > 0);
  references_.assign(num_blocks, 0);
  free_.reserve(num_blocks);
  reset();
}

void KvCache::reset() {
  prefixes_.clear(nullptr);
  free_.clear();
  for (std::int64_t block = num_blocks() - 1; block >= 0; --block) {
    assert(references_[block] == 0);
    free_.push_back(static_cast<std::int32_t>(block));
  }
}

std::int32_t KvCache::acquire() {
  std::int32_t block;
  if (free_.empty()) {
    block = prefixes_.evict();
  } else {
    block = free_.back();
    free_.pop_back();
  }
  assert(references_[block] == 0);
  references_[block] = 1;
  return block;
}

void KvCache::drop(std::int32_t block) {
  assert(references_[block] > 0);
  if (--references_[block] > 0) return;
  if (prefixes_.has(block)) {
    prefixes_.retire(block);
  } else {
    free_.push_back(block);
  }
}

bool KvCache::take(BlockTable& table, std::span<const TokenId> tokens) {
  const std::int32_t block =
      prefixes_.find(table.empty() ? PrefixCache::kNone : table.back(), tokens);
  if (block == PrefixCache::kNone) return false;
  if (references_[block]++ == 0) prefixes_.revive(block);
  table.push_back(block);
  return true;
}

bool KvCache::remember(BlockTable& table, std::int64_t index, std::span<const TokenId> tokens,
                       bool replace) {
  const std::int32_t parent = index == 0 ? PrefixCache::kNone : table[index - 1];
  const std::int32_t known = prefixes_.find(parent, tokens);
  if (known == PrefixCache::kNone) {
    prefixes_.insert(table[index], parent, tokens);
    return true;
  }
  if (known == table[index]) return true;  // a sample that shares it was first
  if (!replace) return false;
  if (references_[known]++ == 0) prefixes_.revive(known);
  drop(table[index]);
  table[index] = known;
  return true;
}

void KvCache::forget() { prefixes_.clear(&free_); }

std::int64_t KvCache::blocks_to_write(const BlockTable& table, std::int64_t begin,
                                      std::int64_t end) const {
  if (begin >= end) return 0;
  const auto held = static_cast<std::int64_t>(table.size());
  std::int64_t needed = std::max<std::int64_t>(0, blocks_for(end) - held);
  for (std::int64_t i = begin / block_tokens_; i < std::min(held, blocks_for(end)); ++i) {
    if (references_[table[i]] > 1) ++needed;
  }
  return needed;
}

void KvCache::prepare_write(BlockTable& table, std::int64_t begin, std::int64_t end,
                            std::vector<BlockCopy>& copies) {
  if (begin >= end) return;
  assert(blocks_for(begin) <= static_cast<std::int64_t>(table.size()));
  for (std::int64_t i = begin / block_tokens_; i < blocks_for(end); ++i) {
    if (i == static_cast<std::int64_t>(table.size())) {
      table.push_back(acquire());
    } else if (references_[table[i]] > 1) {
      const std::int32_t fresh = acquire();
      copies.push_back({table[i], fresh});
      drop(table[i]);
      table[i] = fresh;
    }
  }
}

void KvCache::share(const BlockTable& from, std::int64_t positions, BlockTable& to) {
  assert(to.empty() && blocks_for(positions) <= static_cast<std::int64_t>(from.size()));
  for (std::int64_t i = 0; i < blocks_for(positions); ++i) {
    ++references_[from[i]];
    to.push_back(from[i]);
  }
}

void KvCache::release(BlockTable& table) {
  // Last block first, so that the stack hands a released prompt out again in its own order.
  for (auto block = table.rbegin(); block != table.rend(); ++block) drop(*block);
  table.clear();
}

std::string KvCache::find_fault(std::span<const BlockTable* const> tables) const {
  std::vector<std::int32_t> listed(references_.size(), 0);
  for (const BlockTable* table : tables) {
    for (const std::int32_t block : *table) {
      if (block < 0 || block >= num_blocks()) return fmt::format("a table lists block {}", block);
      ++listed[block];
    }
  }
  std::vector<bool> is_free(references_.size(), false);
  for (const std::int32_t block : free_) {
    if (is_free[block]) return fmt::format("block {} is twice in the free list", block);
    is_free[block] = true;
  }
  for (std::int64_t block = 0; block < num_blocks(); ++block) {
    if (listed[block] != references_[block]) {
      return fmt::format("block {} is in {} tables and has {} references", block, listed[block],
                         references_[block]);
    }
    const bool known = prefixes_.has(static_cast<std::int32_t>(block));
    if (is_free[block] != (references_[block] == 0 && !known)) {
      return fmt::format("block {} has {} references and is {}in the free list", block,
                         references_[block], is_free[block] ? "" : "not ");
    }
  }
  return prefixes_.find_fault(references_);
}

}  // namespace tandem
