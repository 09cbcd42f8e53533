// Samples laid out as one packed forward: a single row of tokens, the segments that say which rows
// are one sequence, and the rows whose next token is trained.
//
// With a shared prompt the prompt's rows stand once and every sample of the group attends to them;
// the KV block at the border between prompt and response is each sample's own, so that key blocks
// count from position 0 of its sequence and the bits equal those of the unshared layout. The last
// response token is predicted but never an input.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "data/batch.h"
#include "data/packing.h"
#include "model/attention.h"

namespace tandem {

struct LossToken {
  std::int64_t row = 0;       // its hidden state predicts the token
  std::int64_t sample = 0;    // index into the samples given
  std::int64_t position = 0;  // index into the sample's response
  TokenId id = 0;
};

class PackedBatch {
 public:
  // Consecutive samples with one prompt_id and equal prompt tokens form a group when share_prompt.
  PackedBatch(std::span<const Sample* const> samples, bool share_prompt);
  PackedBatch(const PackedBatch&) = delete;
  PackedBatch& operator=(const PackedBatch&) = delete;

  std::int64_t num_rows() const { return static_cast<std::int64_t>(tokens.size()); }
  std::int64_t num_blocks() const { return num_blocks_; }

  std::vector<TokenId> tokens;
  std::vector<std::int32_t> positions;
  AttentionContext context;     // pool is the caller's to set
  std::vector<LossToken> loss;  // tokens with loss_mask 1, sample by sample, in order

 private:
  // Appends rows for `ids` at positions from `position_begin`, after the keys `before`.
  struct Sequence {
    std::vector<std::int32_t> blocks, key_rows;
  };
  void append(std::span<const TokenId> ids, std::int64_t position_begin, const Sequence* before,
              std::int64_t group);
  void append_response(const Sample& s, std::int64_t sample, std::int64_t prompt_last_row,
                       std::int64_t first_row);

  std::int64_t num_blocks_ = 0;
  std::vector<std::unique_ptr<Sequence>> sequences_;
};

// The samples of a micro-batch whose indices count in the batch.
std::vector<const Sample*> samples_of(const TrainBatch& batch, const MicroBatch& micro);

}  // namespace tandem
