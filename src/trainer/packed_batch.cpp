// Rows, segments, block tables and key rows of a packed forward.
#include "trainer/packed_batch.h"

#include <algorithm>

#include "base/check.h"

namespace tandem {

PackedBatch::PackedBatch(std::span<const Sample* const> samples, bool share_prompt) {
  std::int64_t group = 0;
  for (std::size_t i = 0; i < samples.size(); ++group) {
    const Sample& first = *samples[i];
    const std::span<const TokenId> prompt(first.tokens.data(),
                                          static_cast<std::size_t>(first.prompt_length()));
    TD_CHECK(!prompt.empty(), "sample {}: a prompt of at least one token wanted", first.id);
    auto same_prompt = [&](const Sample& s) {
      return s.prompt_id == first.prompt_id && s.prompt_length() == first.prompt_length() &&
             std::equal(prompt.begin(), prompt.end(), s.tokens.begin());
    };
    std::size_t end = i + 1;
    while (share_prompt && end < samples.size() && same_prompt(*samples[end])) ++end;

    const std::int64_t prompt_row = num_rows();
    append(prompt, 0, nullptr, group);
    const Sequence* shared = sequences_.back().get();
    for (; i < end; ++i) {
      const Sample& s = *samples[i];
      const std::int64_t inputs = std::max<std::int64_t>(s.response_length - 1, 0);
      const std::int64_t row = num_rows();
      if (inputs > 0)
        append({s.tokens.data() + prompt.size(), static_cast<std::size_t>(inputs)},
               static_cast<std::int64_t>(prompt.size()), shared, group);
      append_response(s, static_cast<std::int64_t>(i),
                      prompt_row + static_cast<std::int64_t>(prompt.size()) - 1, row);
    }
  }
}

void PackedBatch::append(std::span<const TokenId> ids, std::int64_t position_begin,
                         const Sequence* before, std::int64_t group) {
  auto sequence = std::make_unique<Sequence>();
  const std::int64_t row_begin = num_rows();
  const auto count = static_cast<std::int64_t>(ids.size());
  const std::int64_t end = position_begin + count;
  const std::int64_t whole = position_begin / kBlockTokens;  // shared blocks that are full
  if (before) {
    sequence->blocks.assign(before->blocks.begin(), before->blocks.begin() + whole);
    sequence->key_rows = before->key_rows;
  }
  for (std::int64_t b = whole; b * kBlockTokens < end; ++b)
    sequence->blocks.push_back(static_cast<std::int32_t>(num_blocks_++));
  auto write = [&](std::int64_t row, std::int64_t position) {
    context.writes.push_back(
        {row, sequence->blocks[position / kBlockTokens] * kBlockTokens + position % kBlockTokens});
  };
  // The prompt's keys in the border block, once more for this sequence.
  for (std::int64_t p = whole * kBlockTokens; p < position_begin; ++p)
    write(sequence->key_rows[p], p);
  for (std::int64_t i = 0; i < count; ++i) {
    tokens.push_back(ids[i]);
    positions.push_back(static_cast<std::int32_t>(position_begin + i));
    sequence->key_rows.push_back(static_cast<std::int32_t>(row_begin + i));
    write(row_begin + i, position_begin + i);
  }
  context.segments.push_back({.row_begin = row_begin,
                              .num_rows = count,
                              .position_begin = position_begin,
                              .blocks = sequence->blocks.data(),
                              .num_blocks = static_cast<std::int64_t>(sequence->blocks.size()),
                              .key_rows = sequence->key_rows.data(),
                              .group = group});
  sequences_.push_back(std::move(sequence));
}

void PackedBatch::append_response(const Sample& s, std::int64_t sample,
                                  std::int64_t prompt_last_row, std::int64_t first_row) {
  for (std::int64_t t = 0; t < s.response_length; ++t)
    if (s.loss_mask[t])
      loss.push_back({.row = t == 0 ? prompt_last_row : first_row + t - 1,
                      .sample = sample,
                      .position = t,
                      .id = s.tokens[static_cast<std::size_t>(s.prompt_length() + t)]});
}

std::vector<const Sample*> samples_of(const TrainBatch& batch, const MicroBatch& micro) {
  std::vector<const Sample*> out;
  for (const std::int64_t s : micro.samples) out.push_back(&batch.samples[s]);
  return out;
}

}  // namespace tandem
