// What attention's backward takes on a GPU, worked out by hand for the Qwen3-4B shape, and its part
// in a trainer's estimate.
#include "trainer/memory.h"

#include <gtest/gtest.h>

#include "ops/cuda/workspace.h"

namespace tandem {
namespace {

const AttentionShape kQwen3{.num_heads = 32, .num_kv_heads = 8, .head_dim = 128};

TEST(AttentionWorkspace, TotalsAreRoundedUpByLessThanAnEighth) {
  for (const auto& [n, want] : {std::pair<std::int64_t, std::int64_t>{1, 128},
                                {128, 128},
                                {129, 144},
                                {8192, 8192},
                                {8193, 9216},
                                {16383, 16384},
                                {140000, 147456}})
    EXPECT_EQ(rounded_total(n), want) << n;
  for (std::int64_t n = 128; n < 5000; ++n) {
    EXPECT_GE(rounded_total(n), n);
    EXPECT_LT(8 * (rounded_total(n) - n), n) << n;
  }
}

TEST(AttentionWorkspace, IsThatOfTheAccumulators) {
  // 4 · 8192 · (6144 + 32) and 4 · 2 · 8192 · 4096.
  EXPECT_EQ(cudnn_workspace(kQwen3, 8192, 8192), 202375168 + 268435456);
  // 4 · 8192 · 32 · 129 and 2 · 2 · 8192 · 4096.
  EXPECT_EQ(flash_workspace(kQwen3, 8192, 8192), 135266304 + 134217728);
  // 140,000 keys of shared prompts: 4.8 GB of accumulators, so FlashAttention takes the call.
  EXPECT_EQ(cudnn_workspace(kQwen3, 8192, 140000), 202375168 + std::int64_t{8} * 147456 * 4096);
  EXPECT_GT(cudnn_workspace(kQwen3, 8192, 140000), kMaxCudnnWorkspace);
  EXPECT_LT(cudnn_workspace(kQwen3, 8192, 110000), kMaxCudnnWorkspace);
  // As many key heads as query heads: their gradients are added up where they go.
  const AttentionShape equal{.num_heads = 4, .num_kv_heads = 4, .head_dim = 64};
  EXPECT_EQ(cudnn_workspace(equal, 256, 100000), 4 * 256 * (768 + 4));
}

TEST(TrainerMemory, CountsAttentionOnAGpuInBf16) {
  ModelConfig model;
  model.hidden_size = 2560;
  model.intermediate_size = 9728;
  model.num_layers = 36;
  model.num_heads = 32;
  model.num_kv_heads = 8;
  model.head_dim = 128;
  model.vocab_size = 151936;
  TrainConfig train;
  train.gradient_leaves = 1;
  train.max_tokens_per_gpu = 8192;
  TrainerLoad load{.flat_elements = 1000, .samples = 64, .sample_tokens = 4096};
  const auto activations = [&] {
    return estimate_trainer_memory(model, train, load).activation_bytes;
  };
  const std::int64_t without = activations();
  load.on_gpu = true;
  const std::int64_t own = activations() - without;
  // And keys, values and their gradients: 2 · 4 · 8192 · 1024.
  EXPECT_EQ(own, cudnn_workspace(kQwen3, 8192, 8192) + 67108864);
  // 64 samples' prompts and answers as keys at most; cuDNN's part stops at its limit.
  load.shares_prompts = true;
  EXPECT_EQ(activations() - without, kMaxCudnnWorkspace + std::int64_t{8} * 64 * 4096 * 1024);
  // One sample alone beyond the limit: FlashAttention's.
  load.shares_prompts = false;
  load.sample_tokens = 300000;
  const std::int64_t with = activations();
  load.on_gpu = false;
  EXPECT_EQ(with - activations(), flash_workspace(kQwen3, 300000, 300000) + 300000ll * 8 * 1024);
  load.element_bytes = 4;
  const std::int64_t f32 = activations();
  load.on_gpu = true;
  EXPECT_EQ(activations(), f32);
}

}  // namespace
}  // namespace tandem
