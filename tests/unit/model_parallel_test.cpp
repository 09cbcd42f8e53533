// Arena tables and tensor parallelism: several ranks over Gloo (as threads) give the logits of one
// rank bit for bit, or to rounding where they cut sums (row-parallel), and every Hugging Face row
// lies where the table says.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <cmath>
#include <cstring>
#include <map>
#include <numeric>

#include "base/check.h"
#include "model/model.h"
#include "model/parameters.h"
#include "unit/rank_threads.h"

namespace tandem {
namespace {

ModelConfig tiny(bool tied) {
  ModelConfig c;
  c.family = "qwen3";
  c.architecture = "Qwen3ForCausalLM";
  c.vocab_size = 66;
  c.hidden_size = 28;
  c.intermediate_size = 44;
  c.num_layers = 3;
  c.num_heads = 4;
  c.num_kv_heads = 2;
  c.head_dim = 6;
  c.max_position_embeddings = 64;
  c.tie_word_embeddings = tied;
  c.qkv_bias = true;
  c.qk_norm = QkNorm::head;
  c.ropes.resize(1);
  c.layers.resize(3);
  c.layers[1].window = 5;
  return c;
}

// What families add to that layer: fused tensors of the files, norms after attention and MLP, over
// whole projections, layers that are not turned.
std::vector<ModelConfig> variants() {
  ModelConfig plain = tiny(false), tied = tiny(true), fused = tiny(false), after = tiny(true);
  fused.fused_qkv = fused.fused_gate_up = true;
  fused.qk_norm = QkNorm::none;
  fused.norms.after_attention = "post_self_attn_layernorm";
  fused.norms.after_mlp = "post_mlp_layernorm";
  fused.ropes[0].rotary_dim = 4;
  fused.ropes[0].interleaved = true;
  after.norms = {.before_attention = "",
                 .after_attention = "post_attention_layernorm",
                 .before_mlp = "",
                 .after_mlp = "post_feedforward_layernorm"};
  after.qk_norm = QkNorm::projection;
  after.layers[2].rope = kNoRope;
  after.activation = Activation::gelu_tanh;
  after.embedding_scale = 5.3;
  return {plain, tied, fused, after};
}

// A value for each row and column of a Hugging Face tensor, the same on every rank.
float value(const std::string& name, std::int64_t row, std::int64_t col) {
  const auto h = std::hash<std::string>{}(name) % 1000;
  return static_cast<float>(static_cast<int>((h * 31 + row * 131 + col * 17) % 201) - 100) / 400.0f;
}

void fill(Arena& arena) {
  for (const ArenaEntry& e : arena.layout().entries) {
    const std::int64_t cols = arena.layout().storages[e.storage].cols;
    std::vector<float> rows(static_cast<std::size_t>(e.rows * cols));
    for (std::int64_t r = 0; r < e.rows; ++r)
      for (std::int64_t c = 0; c < cols; ++c)
        rows[r * cols + c] = value(e.hf_name, e.global_row + r, e.global_col + c);
    arena.write_rows(e, 0, e.rows, rows.data());
  }
}

std::vector<float> logits(const ModelConfig& config, Element element, Group& group,
                          ShardRule rule = ShardRule::exact) {
  Arena arena(make_arena_layout(config, element, group.rank(), group.size(), Place::cpu, rule));
  fill(arena);
  Model model(config, arena, &group, nullptr);
  const c10::AutoGradMode no_grad(false);
  const std::vector<TokenId> tokens{3, 65, 0, 33, 32, 8, 7, 6, 5, 4, 3, 2, 1, 60, 61, 62, 63, 64};
  const auto n = static_cast<std::int64_t>(tokens.size());
  KvPool pool(model.attention_shape(), element, config.num_layers, 2);
  const std::vector<std::int32_t> blocks{1, 0};
  AttentionContext context{.pool = &pool, .segments = {}, .writes = {}, .plan = {}};
  context.segments.push_back({.row_begin = 0,
                              .num_rows = n,
                              .position_begin = 0,
                              .blocks = blocks.data(),
                              .num_blocks = 2});
  std::vector<std::int32_t> positions;
  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < n; ++i) {
    positions.push_back(static_cast<std::int32_t>(i));
    rows.push_back(i);
    context.writes.push_back({i, blocks[i / 16] * 16 + i % 16});
  }
  const auto z = model.logits(model.forward(tokens, positions, context), rows).contiguous();
  return {z.data_ptr<float>(), z.data_ptr<float>() + z.numel()};
}

// The logits of every rank of `size` over Gloo, as threads.
std::vector<std::vector<float>> on_ranks(const ModelConfig& config, Element e, int size,
                                         ShardRule rule = ShardRule::exact) {
  std::vector<std::vector<float>> out(static_cast<std::size_t>(size));
  on_rank_threads(size, [&](int r, const Store& store) {
    Group group = Group::gloo(store, "tp", r, size);
    out[r] = logits(config, e, group, rule);
  });
  return out;
}

TEST(TensorParallel, SeveralRanksGiveTheLogitsOfOne) {
  for (ModelConfig config : variants())
    for (Element e : {Element::f32, Element::bf16})
      for (const auto& [ranks, kv_heads] : {std::pair(2, 2), {4, 2}, {4, 1}, {4, 4}}) {
        config.num_kv_heads = kv_heads;
        config.vocab_size = ranks == 2 ? 66 : 68;
        Group alone = Group::alone("tp");
        const auto one = logits(config, e, alone);
        EXPECT_EQ(one.size(), 18u * static_cast<std::size_t>(config.vocab_size));
        for (const auto& rank : on_ranks(config, e, ranks)) {
          ASSERT_EQ(one.size(), rank.size());
          EXPECT_EQ(0, std::memcmp(one.data(), rank.data(), one.size() * 4))
              << ranks << " ranks, " << kv_heads << " key/value heads";
        }
      }
}

// Row-parallel ranks cut two sums of a layer: near to one rank, not equal to it, equal to each
// other and the same each time. 4 ranks have 11 columns of down and, with heads of 7, 7 of o.
TEST(TensorParallel, RowParallelRanksAgreeToRounding) {
  for (ModelConfig config : variants())
    for (Element e : {Element::f32, Element::bf16})
      for (const auto& [ranks, kv_heads, head_dim] :
           {std::tuple(2, 2, 6), {2, 1, 6}, {4, 2, 6}, {4, 1, 7}, {4, 4, 6}}) {
        // Odd heads: where a part is turned. In bf16 one layout says enough.
        if (head_dim == 7 && config.ropes[0].rotary_dim == 0) continue;
        if (e == Element::bf16 && (ranks != 4 || kv_heads != 2)) continue;
        config.num_kv_heads = kv_heads;
        config.head_dim = head_dim;
        config.vocab_size = 68;
        Group alone = Group::alone("tp");
        const auto one = logits(config, e, alone);
        const auto several = on_ranks(config, e, ranks, ShardRule::row_parallel);
        double largest = 0, scale = 0;
        for (std::size_t i = 0; i < one.size(); ++i) {
          scale = std::max<double>(scale, std::abs(one[i]));
          largest = std::max<double>(largest, std::abs(one[i] - several[0][i]));
        }
        EXPECT_LT(largest, (e == Element::f32 ? 1e-5 : 0.02) * scale)
            << ranks << " ranks, " << kv_heads << " key/value heads";
        if (e == Element::f32) {
          EXPECT_GT(largest, 0.0);
        }
        for (const auto& rank : several) EXPECT_EQ(several[0], rank);
      }
  const auto once = on_ranks(tiny(false), Element::f32, 2, ShardRule::row_parallel);
  EXPECT_EQ(once, on_ranks(tiny(false), Element::f32, 2, ShardRule::row_parallel));
}

TEST(TensorParallel, RowParallelCutsTheColumnsOfTwoMatrices) {
  ModelConfig c = tiny(false);
  c.o_bias = c.mlp_bias = true;
  c.vocab_size = 64;
  std::map<std::string, std::int64_t> cut;
  for (std::int64_t rank = 0; rank < 4; ++rank) {
    const auto layout =
        make_arena_layout(c, Element::f32, rank, 4, Place::cpu, ShardRule::row_parallel);
    for (const ArenaEntry& e : layout.entries) {
      if (!e.hf_name.starts_with("model.layers.1.")) continue;
      const ArenaStorage& s = layout.storages[e.storage];
      if (e.hf_name.ends_with("o_proj.weight") || e.hf_name.ends_with("down_proj.weight")) {
        EXPECT_EQ(e.rows, c.hidden_size);
        EXPECT_EQ(e.global_col, rank * s.cols);
        EXPECT_EQ(s.cols * 4, e.hf_shape[1]);
        ++cut[e.hf_name];
      } else {
        EXPECT_EQ(e.global_col, 0) << e.hf_name;
      }
      if (e.hf_name.ends_with("o_proj.bias") || e.hf_name.ends_with("down_proj.bias")) {
        EXPECT_EQ(e.rows, c.hidden_size) << e.hf_name;
      }
    }
  }
  EXPECT_EQ(cut.size(), 2u);
  // No rank has a part of the hidden elements, so any number of them will do.
  c.hidden_size = 30;
  c.vocab_size = 66;
  EXPECT_EQ(
      tensor_parallel_fault(c, 4, ShardRule::row_parallel),
      "4 tensor-parallel ranks found, but vocab_size 66 cannot be shared evenly by them; 1, 2 "
      "fit");
  c.vocab_size = 64;
  EXPECT_EQ(tensor_parallel_fault(c, 4, ShardRule::row_parallel), "");
  EXPECT_NE(tensor_parallel_fault(c, 4, ShardRule::exact), "");
}

TEST(TensorParallel, WidthsThatDoNotFitAreRefusedWithThoseThatDo) {
  ModelConfig smol;  // SmolLM2-135M
  smol.num_heads = 9;
  smol.num_kv_heads = 3;
  smol.head_dim = 64;
  smol.hidden_size = 576;
  smol.intermediate_size = 1536;
  smol.vocab_size = 49152;
  for (const int ranks : {1, 3}) EXPECT_EQ(tensor_parallel_fault(smol, ranks), "");
  const std::string two = tensor_parallel_fault(smol, 2);
  EXPECT_NE(two.find("num_attention_heads 9, num_key_value_heads 3"), two.npos) << two;
  EXPECT_NE(two.find("1, 3 fit"), two.npos) << two;
  ModelConfig wide = smol;  // 16 heads that share 4
  wide.num_heads = 16;
  wide.num_kv_heads = 4;
  wide.hidden_size = 1024;
  for (const int ranks : {1, 2, 4, 8, 16}) EXPECT_EQ(tensor_parallel_fault(wide, ranks), "");
  wide.num_kv_heads = 16;
  EXPECT_NE(tensor_parallel_fault(wide, 32), "");
}

// Rotary tables grow while sequences do: 4,200 positions in one call, and in two with the border of
// the first tables between them.
TEST(Model, TablesThatGrowChangeNoBit) {
  ModelConfig config = tiny(true);
  config.max_position_embeddings = 16384;
  for (LayerConfig& layer : config.layers) layer.window = 5;
  constexpr std::int64_t kTokens = 4200;
  std::vector<std::int32_t> blocks(kTokens / 16 + 1);
  std::iota(blocks.begin(), blocks.end(), 0);
  const auto run = [&](std::vector<std::int64_t> cuts) {
    Arena arena(make_arena_layout(config, Element::f32));
    fill(arena);
    Model model(config, arena, nullptr, nullptr);
    KvPool pool(model.attention_shape(), Element::f32, config.num_layers,
                static_cast<std::int64_t>(blocks.size()), Place::cpu);
    const c10::AutoGradMode no_grad(false);
    at::Tensor hidden;
    std::int64_t begin = 0;
    for (const std::int64_t end : cuts) {
      AttentionContext context{.pool = &pool, .segments = {}, .writes = {}, .plan = {}};
      context.segments.push_back({.row_begin = 0,
                                  .num_rows = end - begin,
                                  .position_begin = begin,
                                  .blocks = blocks.data(),
                                  .num_blocks = static_cast<std::int64_t>(blocks.size())});
      std::vector<TokenId> tokens;
      std::vector<std::int32_t> positions;
      for (std::int64_t p = begin; p < end; ++p) {
        tokens.push_back(static_cast<TokenId>(p * 7 % config.vocab_size));
        positions.push_back(static_cast<std::int32_t>(p));
        context.writes.push_back({p - begin, p});
      }
      hidden = model.forward(tokens, positions, context);
      begin = end;
    }
    const auto last = hidden[hidden.size(0) - 1].contiguous();
    return std::vector<float>(last.data_ptr<float>(), last.data_ptr<float>() + last.numel());
  };
  EXPECT_EQ(run({kTokens}), run({4000, kTokens}));
  EXPECT_EQ(run({kTokens}), run({4095, 4097, kTokens}));
}

TEST(Arena, FusedStoragesHoldEachTensorInItsPlace) {
  for (Element e : {Element::f32, Element::bf16}) {
    Arena arena(make_arena_layout(tiny(false), e));
    fill(arena);
    std::vector<float> flat(static_cast<std::size_t>(arena.layout().flat_elements));
    arena.read_flat(flat.data());
    std::int64_t end = 0;
    for (const ArenaEntry& entry : arena.layout().entries) {
      const std::int64_t cols = arena.layout().storages[entry.storage].cols;
      EXPECT_EQ(entry.flat_begin, end);
      end += entry.rows * cols;
      for (std::int64_t r = 0; r < entry.rows; ++r)
        for (std::int64_t c = 0; c < cols; ++c)
          ASSERT_NEAR(flat[entry.flat_begin + r * cols + c], value(entry.hf_name, r, c), 2e-3)
              << entry.hf_name;
    }
    EXPECT_EQ(end, arena.layout().flat_elements);
    // Back through the optimizer's door.
    std::vector<float> again(flat.size());
    Arena copy(make_arena_layout(tiny(false), e));
    copy.write_flat(0, end, flat.data());
    copy.read_flat(again.data());
    EXPECT_EQ(flat, again);
  }
}

TEST(Arena, ACutThatDoesNotDivideIsRefusedByName) {
  ModelConfig c = tiny(false);
  c.num_heads = c.num_kv_heads = 3;
  EXPECT_THROW(make_arena_layout(c, Element::f32, 0, 2), Error);
  c = tiny(false);
  c.vocab_size = 65;
  try {
    make_arena_layout(c, Element::f32, 0, 2);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("vocab_size 65"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace tandem
