// The attention kernels against a slow reference in double: packed rows forward and backward by
// each of the ways there are, paged rows in pieces, and what must not be read.
#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <cmath>
#include <iostream>
#include <numeric>

#include "base/check.h"
#include "gpu/kernel_test.h"

namespace tandem {
namespace {

class CudaAttention : public InBothElements {};

struct AttentionCase {
  std::int64_t heads, kv_heads, dim, window;
  std::vector<std::int64_t> prompts, responses;  // a response shares the prompt of its number
};

Segment segment(std::int64_t row_begin, std::int64_t num_rows, std::int64_t position_begin) {
  Segment s;
  s.row_begin = row_begin;
  s.num_rows = num_rows;
  s.position_begin = position_begin;
  return s;
}

// Segments of prompts, then responses that see their prompt's rows.
struct Layout {
  explicit Layout(const AttentionCase& c) {
    for (std::size_t i = 0; i < c.prompts.size(); ++i) {
      add(c.prompts[i], 0, {});
      const auto prompt = key_rows.back();
      for (std::size_t j = 0; j < c.responses.size(); ++j)
        if (j % c.prompts.size() == i) add(c.responses[j], c.prompts[i], prompt);
    }
    for (std::size_t i = 0; i < segments.size(); ++i) segments[i].key_rows = key_rows[i].data();
  }
  void add(std::int64_t n, std::int64_t position, std::vector<std::int32_t> keys) {
    segments.push_back(segment(rows, n, position));
    for (std::int64_t i = 0; i < n; ++i) keys.push_back(static_cast<std::int32_t>(rows + i));
    key_rows.push_back(std::move(keys));
    rows += n;
  }
  std::int64_t longest() const {
    std::size_t n = 0;
    for (const auto& keys : key_rows) n = std::max(n, keys.size());
    return static_cast<std::int64_t>(n);
  }
  std::int64_t rows = 0;
  std::vector<Segment> segments;
  std::vector<std::vector<std::int32_t>> key_rows;
};

at::Tensor reference(const at::Tensor& qkv, const AttentionShape& s, const Layout& layout) {
  const auto heads = qkv.view({-1, s.num_heads + 2 * s.num_kv_heads, s.head_dim});
  std::vector<at::Tensor> out;
  for (std::size_t i = 0; i < layout.segments.size(); ++i) {
    const Segment& seg = layout.segments[i];
    const auto rows = at::tensor(at::ArrayRef<std::int32_t>(layout.key_rows[i]), at::kLong);
    const std::int64_t group = s.num_heads / s.num_kv_heads;
    const auto q = heads.narrow(0, seg.row_begin, seg.num_rows).narrow(1, 0, s.num_heads);
    const auto kv = heads.index_select(0, rows);
    const auto k = kv.narrow(1, s.num_heads, s.num_kv_heads).repeat_interleave(group, 1);
    const auto v =
        kv.narrow(1, s.num_heads + s.num_kv_heads, s.num_kv_heads).repeat_interleave(group, 1);
    auto scores = at::einsum("qhd,khd->hqk", {q, k}) * double{s.scale};
    const auto p = at::arange(seg.position_begin, seg.position_begin + seg.num_rows).unsqueeze(1);
    const auto t = at::arange(seg.position_begin + seg.num_rows).unsqueeze(0);
    auto hidden = t > p;
    if (s.window > 0) hidden = hidden.logical_or(t <= p - s.window);
    scores = scores.masked_fill(hidden, -INFINITY);
    out.push_back(at::einsum("hqk,khd->qhd", {at::softmax(scores, 2), v})
                      .reshape({seg.num_rows, s.num_heads * s.head_dim}));
  }
  return at::cat(out, 0);
}

const std::vector<AttentionCase>& attention_cases() {
  static const std::vector<AttentionCase> cases = {
      {1, 1, 2, 0, {1}, {}},
      {3, 1, 5, 0, {7, 33}, {}},
      {4, 2, 64, 0, {1, 100, 17}, {}},
      {9, 3, 64, 0, {40, 5}, {1, 50, 33, 2}},
      {8, 2, 128, 0, {129}, {64, 65, 1}},
      {6, 2, 96, 0, {70, 3}, {20}},
      {4, 4, 64, 9, {50}, {30, 12}},
      {2, 1, 80, 0, {31}, {5}},
      {2, 2, 256, 0, {37}, {9}},
      {16, 2, 64, 0, {21}, {}},
      {7, 1, 128, 0, {21}, {}},
      {32, 8, 128, 0, {1001, 257, 3}, {}},
      {4, 1, 96, 0, {600, 45}, {130, 7}},
      {9, 3, 64, 0, {5, 650}, {50, 33, 2}},
      {4, 2, 64, 40, {601, 17}, {30, 4}},
  };
  return cases;
}

AttentionShape shape_of(const AttentionCase& c) {
  return {.num_heads = c.heads,
          .num_kv_heads = c.kv_heads,
          .head_dim = c.dim,
          .scale = 1.0f / std::sqrt(static_cast<float>(c.dim)),
          .window = c.window};
}

std::string text_of(const AttentionCase& c) {
  return "heads " + std::to_string(c.heads) + " dim " + std::to_string(c.dim) + " prompts " +
         std::to_string(c.prompts.size()) + " window " + std::to_string(c.window);
}

AttentionPlan* plan_of(Element e, const AttentionShape& shape, const Layout& layout) {
  return cuda_part().plan_attention(e, shape,
                                    {.segments = layout.segments.data(),
                                     .num_segments = std::ssize(layout.segments),
                                     .rows = layout.rows});
}

// By another way than cuDNN's all these tests would pass too. Which windows it takes is its own
// affair; which way they went is printed.
void expect_way(const AttentionCase& c, Element e, const Layout& layout,
                const AttentionPlan* plan) {
  if (!cuda_part().has_cudnn_attention) return;
  const bool cudnns = e == Element::bf16 && layout.longest() > 512 && c.dim % 16 == 0 &&
                      c.dim <= 128 && !at::globalContext().deterministicAlgorithms();
  const bool by_cudnn = cuda_part().attention_way(plan, c.window) == AttentionWay::cudnn;
  if (cudnns && c.window > 0)
    std::cout << text_of(c) << ": " << (by_cudnn ? "cuDNN\n" : "not cuDNN\n");
  else
    EXPECT_EQ(by_cudnn, cudnns);
}

void expect_gradients(const at::Tensor& got, const at::Tensor& want, const AttentionCase& c,
                      double tolerance) {
  for (auto [begin, n, what] : {std::tuple{std::int64_t{0}, c.heads, "dq"},
                                {c.heads, c.kv_heads, "dk"},
                                {c.heads + c.kv_heads, c.kv_heads, "dv"}})
    EXPECT_LT(difference(got.narrow(1, begin * c.dim, n * c.dim),
                         want.narrow(1, begin * c.dim, n * c.dim)),
              tolerance)
        << what;
}

void check_packed_attention(const AttentionCase& c, Element e) {
  SCOPED_TRACE(text_of(c));
  const AttentionShape shape = shape_of(c);
  const Layout layout(c);
  const auto x = values({layout.rows, shape.qkv_width()}, e);
  const auto dy = values({layout.rows, c.heads * c.dim}, e);
  AttentionPlan* plan = plan_of(e, shape, layout);
  const LayerKv kv{.k_blocks = nullptr,
                   .v_blocks = nullptr,
                   .writes = {},
                   .segments = layout.segments,
                   .plan = plan};
  auto gx = on_gpu(x, e).requires_grad_(true);
  const auto y = attention(gx, shape, kv);
  expect_way(c, e, layout, plan);
  const auto wx = x.clone().requires_grad_(true);
  const auto want = reference(wx, shape, layout);
  const double tol = e == Element::f32 ? 1e-5 : 1e-2;
  EXPECT_LT(difference(back(y.detach()), want.detach()), tol);
  y.backward(on_gpu(dy, e));
  want.backward(dy);
  expect_gradients(back(gx.grad()), wx.grad(), c, tol);
  cuda_part().free_plan(plan);
}

// By cuDNN where it may add in any order, by FlashAttention-2 where a run must repeat.
TEST_P(CudaAttention, PackedAttentionForwardAndBackward) {
  for (const bool deterministic : {false, true}) {
    at::globalContext().setDeterministicAlgorithms(deterministic, false);
    for (const AttentionCase& c : attention_cases()) check_packed_attention(c, e);
  }
  at::globalContext().setDeterministicAlgorithms(false, false);
}

// Rows, outputs and gradients are the head of longer buffers full of NaN, as is the memory that is
// left for gathered keys: kernels that work in whole tiles let none of it in, and write none of it.
void check_what_lies_behind(const AttentionCase& c) {
  SCOPED_TRACE(text_of(c));
  constexpr std::int64_t kBehind = 300;
  const AttentionShape shape = shape_of(c);
  const Layout layout(c);
  const auto x = values({layout.rows, shape.qkv_width()}, Element::bf16);
  const auto dy = values({layout.rows, c.heads * c.dim}, Element::bf16);
  const auto options = at::dtype(at::kBFloat16).device(gpu());
  const auto longer = [&](std::int64_t width) {
    return at::full({layout.rows + kBehind, width}, NAN, options);
  };
  const auto qkv = longer(x.size(1)), dqkv = longer(x.size(1));
  const auto out = longer(dy.size(1)), dout = longer(dy.size(1));
  const auto lse = at::full({(layout.rows + kBehind) * c.heads}, NAN, options.dtype(at::kFloat));
  const auto head = [&](const at::Tensor& t) { return t.narrow(0, 0, layout.rows); };
  head(qkv).copy_(x);
  head(dout).copy_(dy);
  AttentionPlan* plan = plan_of(Element::bf16, shape, layout);
  at::full({std::int64_t{64} << 20}, NAN, options);  // freed at once
  cuda_part().attention(Element::bf16, shape, plan, qkv.data_ptr(), nullptr, nullptr, false,
                        out.data_ptr(), lse.data_ptr<float>());
  expect_way(c, Element::bf16, layout, plan);
  cuda_part().attention_backward(Element::bf16, shape, plan, qkv.data_ptr(), out.data_ptr(),
                                 dout.data_ptr(), lse.data_ptr<float>(), dqkv.data_ptr());
  const auto wx = x.clone().requires_grad_(true);
  const auto want = reference(wx, shape, layout);
  want.backward(dy);
  EXPECT_LT(difference(back(head(out)), want.detach()), 1e-2);
  expect_gradients(back(head(dqkv)), wx.grad(), c, 1e-2);
  for (const auto& [t, used] :
       {std::pair{out, layout.rows}, {dqkv, layout.rows}, {lse, layout.rows * c.heads}})
    EXPECT_TRUE(t.narrow(0, used, t.size(0) - used).isnan().all().item<bool>());
  cuda_part().free_plan(plan);
}

TEST(CudaAttentionWays, WhatLiesBehindTheLastRowStaysThere) {
  TD_NEED_GPU();
  at::manual_seed(4);
  for (const bool deterministic : {false, true}) {
    at::globalContext().setDeterministicAlgorithms(deterministic, false);
    for (const AttentionCase& c : {AttentionCase{32, 8, 128, 0, {1001, 257, 3}, {}},
                                   {4, 4, 64, 0, {700}, {}},
                                   {9, 3, 64, 0, {5, 650}, {50, 33, 2}},
                                   {4, 2, 64, 40, {601, 17}, {30, 4}}})
      check_what_lies_behind(c);
  }
  at::globalContext().setDeterministicAlgorithms(false, false);
  if (!cuda_part().has_cudnn_attention)
    GTEST_SKIP() << "not run by cuDNN: its front end is not built in (scripts/setup.sh --cuda "
                    "brings it), so training attends by FlashAttention-2, slower";
}

// A backward pass goes by its forward's way, whatever has been asked for in between.
TEST(CudaAttentionWays, BackwardGoesByForwardsWay) {
  TD_NEED_GPU();
  const AttentionCase c{4, 2, 64, 0, {600}, {}};
  const AttentionShape shape = shape_of(c);
  const Layout layout(c);
  const auto x = values({layout.rows, shape.qkv_width()}, Element::bf16);
  const auto dy = values({layout.rows, c.heads * c.dim}, Element::bf16);
  for (const bool deterministic : {false, true}) {
    at::globalContext().setDeterministicAlgorithms(deterministic, false);
    AttentionPlan* plan = plan_of(Element::bf16, shape, layout);
    EXPECT_THROW(cuda_part().attention_way(plan, 0), std::runtime_error);
    auto gx = on_gpu(x, Element::bf16).requires_grad_(true);
    const LayerKv kv{.k_blocks = nullptr,
                     .v_blocks = nullptr,
                     .writes = {},
                     .segments = layout.segments,
                     .plan = plan};
    const auto y = attention(gx, shape, kv);
    at::globalContext().setDeterministicAlgorithms(!deterministic, false);
    y.backward(on_gpu(dy, Element::bf16));
    const auto wx = x.clone().requires_grad_(true);
    reference(wx, shape, layout).backward(dy);
    expect_gradients(back(gx.grad()), wx.grad(), c, 1e-2);
    cuda_part().free_plan(plan);
  }
  at::globalContext().setDeterministicAlgorithms(false, false);
}

// A prefill in two pieces and then single rows over scattered blocks give what one packed call
// gives, whatever else is in the call.
TEST_P(CudaAttention, PagedAttentionInPieces) {
  for (const AttentionCase& base : attention_cases()) {
    AttentionCase c = base;
    c.responses.clear();
    c.prompts = {45, 70, 16, 330};
    SCOPED_TRACE("heads " + std::to_string(c.heads) + " dim " + std::to_string(c.dim) + " window " +
                 std::to_string(c.window));
    const AttentionShape shape = shape_of(c);
    const Layout layout(c);
    const auto x = values({layout.rows, shape.qkv_width()}, e);
    const auto want = reference(x, shape, layout);
    const std::int64_t per_sequence = 21, num_blocks = 4 * per_sequence;
    const auto bytes = at::dtype(scalar_type(e)).device(gpu());
    // Poison: what is read without having been written shows.
    auto k = at::full({num_blocks, 16, c.kv_heads, c.dim}, NAN, bytes), v = k.clone();
    std::vector<std::vector<std::int32_t>> blocks(4);
    for (std::int32_t b = 0; b < num_blocks; ++b) blocks[b % 4].push_back(num_blocks - 1 - b);
    std::vector<std::int64_t> done(4, 0);
    const auto gx = on_gpu(x, e);
    auto got = at::zeros_like(want);
    for (int step = 0;; ++step) {
      std::vector<Segment> segments;
      std::vector<KvWrite> writes;
      std::vector<std::int64_t> rows;
      for (int s = 0; s < 4; ++s) {
        const std::int64_t left = c.prompts[s] - done[s];
        const std::int64_t n = std::min<std::int64_t>(left, step < 2    ? 20 + s
                                                            : left > 60 ? 130
                                                                        : 1);
        if (n == 0) continue;
        segments.push_back({.row_begin = static_cast<std::int64_t>(rows.size()),
                            .num_rows = n,
                            .position_begin = done[s],
                            .blocks = blocks[s].data(),
                            .num_blocks = per_sequence});
        for (std::int64_t i = 0; i < n; ++i, ++done[s]) {
          writes.push_back({static_cast<std::int64_t>(rows.size()),
                            blocks[s][done[s] / 16] * 16 + done[s] % 16});
          rows.push_back(layout.segments[s].row_begin + done[s]);
        }
      }
      if (rows.empty()) break;
      AttentionPlan* plan =
          cuda_part().plan_attention(e, shape,
                                     {.segments = segments.data(),
                                      .num_segments = static_cast<std::int64_t>(segments.size()),
                                      .writes = writes.data(),
                                      .num_writes = static_cast<std::int64_t>(writes.size()),
                                      .rows = static_cast<std::int64_t>(rows.size())});
      const auto index = at::tensor(at::ArrayRef<std::int64_t>(rows), at::kLong);
      const at::NoGradGuard no_grad;
      const auto y = attention(gx.index_select(0, index.to(gpu())), shape,
                               {.k_blocks = k.data_ptr(),
                                .v_blocks = v.data_ptr(),
                                .writes = writes,
                                .segments = segments,
                                .plan = plan});
      got.index_copy_(0, index, back(y));
      cuda_part().free_plan(plan);
    }
    EXPECT_LT(difference(got, want), e == Element::f32 ? 1e-5 : 1e-2);
  }
}

// Of each pair one sequence writes the last key of its second page, and the other, of one row too,
// has both pages as its prefix: it must not read that key before it is written.
TEST(CudaAttentionWays, APageIsReadAfterTheRowThatFillsIt) {
  TD_NEED_GPU();
  at::manual_seed(1);
  const at::NoGradGuard without_gradients;
  constexpr std::int64_t kPairs = 12, kRows = 2 * kPairs, kBlocks = 3 * kPairs, kWidth = 2048;
  const AttentionShape shape{.num_heads = 32, .num_kv_heads = 8, .head_dim = 128, .scale = 0.1f};
  const auto bf16_there = at::dtype(at::kBFloat16).device(gpu());
  const auto w = at::randn({shape.qkv_width(), kWidth}, bf16_there) / 45;
  const Weight weight(w, Element::bf16);
  const auto x = at::randn({kRows, kWidth}, bf16_there);
  const auto before = at::randn({kBlocks, 16, shape.num_kv_heads, shape.head_dim}, bf16_there);
  std::vector<Segment> segments;
  std::vector<KvWrite> writes;
  std::vector<std::int32_t> blocks(kBlocks), positions;
  std::iota(blocks.begin(), blocks.end(), 0);
  for (std::int64_t row = 0; row < kRows; ++row) {
    const std::int64_t first = row / 2 * 3, position = row % 2 ? 32 : 31;
    segments.push_back({.row_begin = row,
                        .num_rows = 1,
                        .position_begin = position,
                        .blocks = blocks.data() + first,
                        .num_blocks = 3});
    writes.push_back({row, (first + position / 16) * 16 + position % 16});
    positions.push_back(static_cast<std::int32_t>(position));
  }
  const auto positions_there = at::tensor(positions, at::kInt).to(gpu());
  // Rows of the given remainder by 2, or all (-1); k is poisoned where they write, if all do.
  const auto run = [&](int remainder, const at::Tensor& k, const at::Tensor& v) {
    std::vector<Segment> s;
    std::vector<KvWrite> u;
    std::vector<std::int64_t> rows;
    for (std::int64_t row = 0; row < kRows; ++row) {
      if (remainder >= 0 && row % 2 != remainder) continue;
      s.push_back(segments[row]);
      s.back().row_begin = std::ssize(rows);
      u.push_back({std::ssize(rows), writes[row].slot});
      rows.push_back(row);
    }
    const auto index = at::tensor(at::ArrayRef<std::int64_t>(rows), at::kLong).to(gpu());
    AttentionPlan* plan = cuda_part().plan_attention(Element::bf16, shape,
                                                     {.segments = s.data(),
                                                      .num_segments = std::ssize(s),
                                                      .writes = u.data(),
                                                      .num_writes = std::ssize(u),
                                                      .rows = std::ssize(rows)});
    const auto qkv = linear(x.index_select(0, index), weight.view, nullptr);
    const auto y = finish_qkv_and_attend(qkv, shape,
                                         {.k_blocks = k.data_ptr(),
                                          .v_blocks = v.data_ptr(),
                                          .writes = u,
                                          .segments = s,
                                          .plan = plan},
                                         {}, positions_there.index_select(0, index), nullptr);
    cuda_part().synchronize();
    cuda_part().free_plan(plan);
    return back(y);
  };
  const auto k = before.clone(), v = before.clone();
  const auto writers = run(0, k, v), readers = run(1, k, v);
  for (int round = 0; round < 50; ++round) {
    auto fresh_k = before.clone(), fresh_v = before.clone();
    for (const KvWrite& write : writes)
      for (auto* blocks_of : {&fresh_k, &fresh_v})
        blocks_of->view({kBlocks * 16, -1})[write.slot].fill_(NAN);
    const auto all = run(-1, fresh_k, fresh_v);
    ASSERT_LT(difference(all.slice(0, 0, kRows, 2), writers), 1e-2) << "round " << round;
    ASSERT_LT(difference(all.slice(0, 1, kRows, 2), readers), 1e-2) << "round " << round;
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, CudaAttention, testing::Values(Element::f32, Element::bf16),
                         element_name);

}  // namespace
}  // namespace tandem
