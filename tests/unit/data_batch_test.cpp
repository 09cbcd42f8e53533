// The training batch as bytes: everything comes back bit for bit, and nothing inconsistent passes.
#include "data/batch.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <functional>
#include <limits>

#include "base/check.h"
#include "base/safetensors.h"

namespace tandem {
namespace {

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

Sample make_sample(std::uint64_t id, std::vector<TokenId> tokens, std::int64_t response_length) {
  Sample sample;
  sample.id = id;
  sample.prompt_id = id / 2;
  sample.tokens = std::move(tokens);
  sample.response_length = response_length;
  for (std::int64_t i = 0; i < response_length; ++i) {
    sample.log_probs.push_back(-0.1f * static_cast<float>(i + 1) - static_cast<float>(id));
    sample.loss_mask.push_back(i % 2 == 0);
    sample.weight_versions.push_back(1000000000000 + i);
  }
  sample.response = "text é " + std::to_string(id);
  sample.label = "10254939386542155531";
  sample.reward = 0.1 + static_cast<double>(id);
  sample.status = SampleStatus::truncated;
  sample.finish = FinishReason::length;
  return sample;
}

TrainBatch make_batch() {
  TrainBatch batch;
  batch.samples = {make_sample(6, {1, 2, 3, 4, 5}, 3), make_sample(7, {9, 8}, 0),
                   make_sample(std::numeric_limits<std::uint64_t>::max(), {7}, 1)};
  batch.advantages = {0.1f, -2.5f, 0.0f};
  return batch;
}

std::span<const std::byte> bytes(const std::string& body) {
  return std::as_bytes(std::span(body.data(), body.size()));
}

TEST(TrainBatch, RoundTrip) {
  TrainBatch batch = make_batch();
  batch.samples[0].log_probs[1] = std::numeric_limits<float>::denorm_min();
  batch.samples[0].log_probs[2] = std::bit_cast<float>(0x7fc00123u);  // a NaN keeps its payload
  batch.samples[1].status = SampleStatus::failed;
  batch.samples[1].finish = FinishReason::abort;
  for (const bool with_trainer : {false, true}) {
    if (with_trainer) batch.trainer_log_probs = {{-1, -2, -3}, {}, {-4}};
    const TrainBatch back = decode_batch(bytes(encode_batch(batch)), "body");
    ASSERT_EQ(back.samples.size(), 3u);
    EXPECT_EQ(back.advantages, batch.advantages);
    EXPECT_EQ(back.trainer_log_probs, batch.trainer_log_probs);
    for (std::size_t i = 0; i < 3; ++i) {
      const Sample &a = batch.samples[i], &b = back.samples[i];
      EXPECT_EQ(a.id, b.id);
      EXPECT_EQ(a.prompt_id, b.prompt_id);
      EXPECT_EQ(a.tokens, b.tokens);
      EXPECT_EQ(a.response_length, b.response_length);
      ASSERT_EQ(a.log_probs.size(), b.log_probs.size());
      if (!a.log_probs.empty()) {
        EXPECT_EQ(std::memcmp(a.log_probs.data(), b.log_probs.data(), a.log_probs.size() * 4), 0);
      }
      EXPECT_EQ(a.loss_mask, b.loss_mask);
      EXPECT_EQ(a.weight_versions, b.weight_versions);
      EXPECT_EQ(a.response, b.response);
      EXPECT_EQ(a.label, b.label);
      EXPECT_EQ(a.reward, b.reward);
      EXPECT_EQ(a.status, b.status);
      EXPECT_EQ(a.finish, b.finish);
    }
  }
}

TEST(TrainBatch, Empty) {
  EXPECT_TRUE(decode_batch(bytes(encode_batch({})), "body").samples.empty());
}

TEST(TrainBatch, EqualBatchesGiveEqualBytes) {
  EXPECT_EQ(encode_batch(make_batch()), encode_batch(make_batch()));
}

TEST(TrainBatch, LengthsAreCheckedWithTheSampleId) {
  const std::vector<std::pair<std::function<void(TrainBatch&)>, std::string>> cases = {
      {[](TrainBatch& b) { b.samples[0].log_probs.pop_back(); },
       "sample 6: 2 log_probs for 3 response tokens"},
      {[](TrainBatch& b) { b.samples[0].loss_mask.push_back(1); },
       "sample 6: 4 loss_mask for 3 response tokens"},
      {[](TrainBatch& b) { b.samples[1].weight_versions.push_back(1); },
       "sample 7: 1 weight_versions for 0 response tokens"},
      {[](TrainBatch& b) { b.samples[1].response_length = 3; },
       "sample 7: response length 3 in 2 tokens"},
      {[](TrainBatch& b) { b.samples[1].response_length = -1; },
       "sample 7: response length -1 in 2 tokens"},
      {[](TrainBatch& b) { b.advantages.pop_back(); },
       "training batch: 2 advantages for 3 samples"},
      {[](TrainBatch& b) {
         b.trainer_log_probs = {{1, 2}, {}, {1}};
       },
       "sample 6: 2 trainer log-probabilities for 3 response tokens"}};
  for (const auto& [spoil, wanted] : cases) {
    TrainBatch batch = make_batch();
    spoil(batch);
    EXPECT_EQ(error_of([&] { encode_batch(batch); }), wanted);
  }
}

// What another program might send: a tensor of the body changed, then decoded.
std::string decode_error(
    const std::function<void(std::vector<TensorView>&, SafetensorsMetadata&)>& spoil) {
  const std::string body = encode_batch(make_batch());
  const SafetensorsHeader header = parse_safetensors(bytes(body), "body");
  std::vector<TensorView> tensors;
  for (const SafetensorsEntry& entry : header.entries) {
    tensors.push_back({entry.name, entry.dtype, entry.shape, header.bytes(bytes(body), entry)});
  }
  SafetensorsMetadata metadata = header.metadata;
  spoil(tensors, metadata);
  const std::string changed = encode_safetensors(tensors, metadata);
  return error_of([&] { decode_batch(bytes(changed), "upload"); });
}

TensorView& find(std::vector<TensorView>& tensors, const std::string& name) {
  for (TensorView& tensor : tensors) {
    if (tensor.name == name) return tensor;
  }
  throw Error("no tensor " + name);
}

TEST(TrainBatch, ForeignBodiesAreChecked) {
  EXPECT_EQ(decode_error([](auto&, auto&) {}), "no error");
  EXPECT_EQ(decode_error([](auto& t, auto&) {
              std::erase_if(t, [](auto& v) { return v.name == "tokens"; });
            }),
            "upload: tensor 'tokens' is missing: not a whole training batch");
  EXPECT_EQ(decode_error([](auto& t, auto&) { find(t, "log_probs").dtype = Dtype::i32; }),
            "upload: tensor 'log_probs' is I32 [4], wanted F32 with one dimension");
  EXPECT_EQ(decode_error([](auto& t, auto&) {
              TensorView& tokens = find(t, "tokens");
              tokens.shape = {7};
              tokens.data = tokens.data.first(28);
            }),
            "upload: 'tokens' has 7 values, the lengths add up to 8");
  const std::vector<std::int64_t> negative = {5, -2, 1};
  EXPECT_EQ(
      decode_error([&](auto& t, auto&) { find(t, "total_lengths").data = bytes_of(negative); }),
      "upload: sample 7: response length 0 in -2 tokens");
  EXPECT_EQ(decode_error([](auto&, auto& m) { m["format"] = "other"; }),
            "upload: its format is 'other', wanted 'tandem-batch-1'");
  EXPECT_EQ(decode_error([](auto&, auto& m) { m["samples"] = "[]"; }),
            "upload: 'samples' has 0 values for 3 samples");
}

}  // namespace
}  // namespace tandem
