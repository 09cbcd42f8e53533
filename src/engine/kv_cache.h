// Which block of the KV pool belongs to whom: reference counts, a free stack, copy on write, and
// the full blocks that the prefix cache still knows.
//
// A block holds `block_tokens` consecutive positions of a sequence. A block table lists a
// sequence's blocks from position 0. Samples of one prompt share its blocks by reference; whoever
// writes into a shared block first gets a copy of it, so full blocks stay shared and only the
// partly filled border block is copied, once a sample, the last holder writing in place.
// Invariant: a block's count is the number of tables that list it; with count 0 it is in the free
// stack, or, if the prefix cache knows it, retired there. Both can be had: num_free counts them.
// Nothing here allocates after construction, tables' own growth aside (reserve them).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/prefix_cache.h"

namespace tandem {

using BlockTable = std::vector<std::int32_t>;

// To be executed by the model for all layers before the rows of the same plan are written.
struct BlockCopy {
  std::int32_t from = 0;
  std::int32_t to = 0;
};

class KvCache {
 public:
  KvCache(std::int64_t num_blocks, std::int64_t block_tokens);

  std::int64_t num_blocks() const { return static_cast<std::int64_t>(references_.size()); }
  std::int64_t num_free() const {
    return static_cast<std::int64_t>(free_.size()) + prefixes_.num_retired();
  }
  std::int64_t num_cached() const { return prefixes_.num_entries(); }
  std::int64_t block_tokens() const { return block_tokens_; }
  std::int64_t blocks_for(std::int64_t positions) const {
    return (positions + block_tokens_ - 1) / block_tokens_;
  }

  // Free blocks that prepare_write(table, begin, end) would take.
  std::int64_t blocks_to_write(const BlockTable& table, std::int64_t begin, std::int64_t end) const;

  // Makes positions [begin, end) of `table` writable: appends blocks, replaces shared ones and
  // appends those copies to `copies`. The caller has asked blocks_to_write() first.
  void prepare_write(BlockTable& table, std::int64_t begin, std::int64_t end,
                     std::vector<BlockCopy>& copies);

  // `to` (empty) shares the blocks of `from` that hold positions [0, positions).
  void share(const BlockTable& from, std::int64_t positions, BlockTable& to);

  // Gives the table's references back and empties it.
  void release(BlockTable& table);

  // Appends the known block that holds `tokens` (block_tokens of them) after `table`; false if
  // there is none. All of `table` is full and was remembered or taken.
  bool take(BlockTable& table, std::span<const TokenId> tokens);
  // The same question without taking: the block after `parent` (kNone: the beginning), or kNone.
  std::int32_t find(std::int32_t parent, std::span<const TokenId> tokens) const {
    return prefixes_.find(parent, tokens);
  }
  bool is_referenced(std::int32_t block) const { return references_[block] > 0; }
  // Lets later sequences take block `index` of the table, which holds `tokens` and is full; the
  // blocks before it were remembered or taken. If another block is known to hold the same, the
  // table takes that one in its place when `replace`, else false.
  bool remember(BlockTable& table, std::int64_t index, std::span<const TokenId> tokens,
                bool replace);
  // No block is known any more (the weights changed).
  void forget();

  // Free list back to its first order; every block must be free. Forgets all.
  void reset();

  // Physical slot of a position: block * block_tokens + offset.
  std::int64_t slot(const BlockTable& table, std::int64_t position) const {
    return std::int64_t{table[position / block_tokens_]} * block_tokens_ + position % block_tokens_;
  }

  // Compares counts and free list with all tables that exist; empty text when they agree, else a
  // sentence naming the first block that does not. Linear in blocks, for tests.
  std::string find_fault(std::span<const BlockTable* const> tables) const;

 private:
  std::int32_t acquire();
  void drop(std::int32_t block);

  std::int64_t block_tokens_;
  std::vector<std::int32_t> references_;  // [num_blocks]
  std::vector<std::int32_t> free_;        // stack; capacity num_blocks from the start
  PrefixCache prefixes_;
};

}  // namespace tandem
