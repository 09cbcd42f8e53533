// The training batch: samples with their advantages, as one safetensors body. The same bytes travel
// from driver to ranks and lie in a run's rollouts/ folder, so a saved rollout can be trained on
// and a batch in flight can be inspected.
//
// Layout, n samples in the batch's order, ragged fields concatenated in that order:
//   ids, prompt_ids            u64 [n]      total_lengths, response_lengths   i64 [n]
//   rewards                    f64 [n]      advantages                        f32 [n]
//   tokens                     i32 [sum of total_lengths]
//   log_probs f32, loss_mask u8, weight_versions i64   [sum of response_lengths]
//   trainer_log_probs          f32 [sum of response_lengths], only where they are known
// Metadata: format = "tandem-batch-1"; samples = JSON array of {response, label, status, finish}
// and error where a sample failed; trainer_version where it is known.
// Floats keep their bits. Invariant: what is encoded or decoded has passed check_batch.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/sample.h"

namespace tandem {

struct TrainBatch {
  std::vector<Sample> samples;
  std::vector<float> advantages;  // one per sample
  // The trainer's log-probabilities, one per response token of each sample; empty: not computed.
  std::vector<std::vector<float>> trainer_log_probs;
  std::int64_t trainer_version = 0;  // of the weights that train on it; 0: not known
};

// The words of the wire: "completed", "stop", …
std::string_view sample_status_name(SampleStatus status);
std::string_view finish_reason_name(FinishReason finish);

// Throws Error naming the sample's id if one of its lengths disagrees with another.
void check_sample(const Sample& sample);
void check_batch(const TrainBatch& batch);

std::string encode_batch(const TrainBatch& batch);

// `source` (a path or "request body") begins every error.
TrainBatch decode_batch(std::span<const std::byte> body, std::string_view source);

}  // namespace tandem
