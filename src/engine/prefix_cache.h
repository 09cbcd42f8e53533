// Which full KV block holds which tokens after which beginning, so that a later sequence with the
// same beginning takes the block instead of computing it again: across prompts that share a system
// prompt, across turns of a conversation, and after a preemption.
//
// An entry is a block, named by (the block before it, its tokens). Names form chains from position
// 0, found through a hash but compared whole, so no collision can give a wrong block. A chain is
// valid for one version of the weights: the owner forgets all of it when they change.
//
// Entries that no sequence references stand in a list, oldest use first, and are evicted from its
// front. Invariant: who references a block references all before it and gives the last up first;
// so a block is evicted before the one it follows, and every entry's chain is whole. Nothing here
// allocates after construction.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "data/sample.h"

namespace tandem {

class PrefixCache {
 public:
  static constexpr std::int32_t kNone = -1;  // no block; as `parent`: the beginning

  PrefixCache(std::int64_t num_blocks, std::int64_t block_tokens);

  // The block that holds `tokens` (block_tokens of them) right after `parent`, or kNone.
  std::int32_t find(std::int32_t parent, std::span<const TokenId> tokens) const;
  bool has(std::int32_t block) const { return entries_[block].used; }

  // Names a referenced block; parent is kNone or has an entry, and find() has said kNone.
  void insert(std::int32_t block, std::int32_t parent, std::span<const TokenId> tokens);

  // The last reference to an entry's block went, or a first one came.
  void retire(std::int32_t block);
  void revive(std::int32_t block);

  std::int64_t num_entries() const { return num_entries_; }
  std::int64_t num_retired() const { return num_retired_; }
  // Ends the entry that has been retired longest and returns its block; there must be one.
  std::int32_t evict();

  // Ends all entries. The blocks that were retired are appended to `freed` (null: they are lost).
  void clear(std::vector<std::int32_t>* freed);

  // Empty text when lists, chains and counts agree; `references` of each block. For tests.
  std::string find_fault(std::span<const std::int32_t> references) const;

 private:
  struct Entry {
    bool used = false;
    bool retired = false;
    std::int32_t parent = kNone;
    std::int32_t next_in_bucket = kNone;
    std::int32_t older = kNone, newer = kNone;  // neighbours in the list of retired entries
  };

  std::size_t bucket(std::int32_t parent, std::span<const TokenId> tokens) const;
  std::span<const TokenId> tokens_of(std::int32_t block) const;
  void unlink(std::int32_t block);
  void end(std::int32_t block);

  std::int64_t block_tokens_;
  std::vector<Entry> entries_;         // [num_blocks]
  std::vector<TokenId> tokens_;        // [num_blocks, block_tokens]
  std::vector<std::int32_t> buckets_;  // first block of each; a power of two of them
  std::int32_t oldest_ = kNone, newest_ = kNone;
  std::int64_t num_entries_ = 0, num_retired_ = 0;
};

}  // namespace tandem
