// The CUDA kernels behind the model's operations against slow references in double over odd shapes,
// forward and backward, in f32 and bf16. f32 must agree to rounding; bf16 as its 8 bits let it, by
// the norm of the difference.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <iostream>
#include <numeric>
#include <random>

#include "base/check.h"
#include "gpu/gpu.h"
#include "ops/functions.h"

namespace tandem {
namespace {

at::Device gpu() { return device_of(Place::cuda); }

// Random values, rounded to the element type, on the CPU in double.
at::Tensor values(at::IntArrayRef shape, Element e, double scale = 1.0) {
  return (at::randn(shape) * scale).to(scalar_type(e)).to(at::kDouble);
}
at::Tensor on_gpu(const at::Tensor& x, Element e) { return x.to(scalar_type(e)).to(gpu()); }
at::Tensor back(const at::Tensor& x) { return x.to(at::kCPU).to(at::kDouble); }

double difference(const at::Tensor& got, const at::Tensor& want) {
  const double norm = want.norm().item<double>();
  return (got - want).norm().item<double>() / (norm > 0 ? norm : 1.0);
}
double tolerance(Element e) { return e == Element::f32 ? 3e-6 : 6e-3; }

#define EXPECT_CLOSE(got, want, e)                       \
  do {                                                   \
    const at::Tensor g_ = back(got), w_ = (want);        \
    ASSERT_EQ(g_.sizes(), w_.sizes());                   \
    EXPECT_LT(difference(g_, w_), tolerance(e)) << #got; \
  } while (false)

// A weight on the GPU with its gradient buffer, whose old content must not matter.
struct Weight {
  Weight(const at::Tensor& w, Element e)
      : data(on_gpu(w, e)), grad(at::full(w.sizes(), 7.0, at::dtype(at::kFloat).device(gpu()))) {
    view = {.name = "w",
            .data = data.data_ptr(),
            .element = e,
            .place = Place::cuda,
            .rows = w.dim() == 2 ? w.size(0) : 1,
            .cols = w.size(-1),
            .grad = grad.data_ptr<float>(),
            .fresh = true};
  }
  at::Tensor data, grad;
  WeightView view;
};

class Cuda : public testing::TestWithParam<Element> {
 protected:
  void SetUp() override {
    TD_NEED_GPU();
    at::manual_seed(1);
    e = GetParam();
  }
  Element e = Element::f32;
};

TEST_P(Cuda, Linear) {
  for (auto [rows, n, k] : {std::tuple{1, 1, 1},
                            {5, 17, 7},
                            {33, 48, 64},
                            {130, 1100, 19},
                            {64, 576, 1536},
                            {1, 48, 64},
                            {2, 33, 8},
                            {3, 1100, 264},
                            {4, 100, 2560},
                            {2, 21, 3000},
                            {3, 9, 5000},
                            {2, 66, 72},
                            {33, 576, 1536},
                            {48, 1002, 200}}) {
    for (const bool with_bias : {false, true}) {
      const auto x = values({rows, k}, e), w = values({n, k}, e), b = values({n}, e),
                 dy = values({rows, n}, e);
      Weight weight(w, e), bias(b.view({1, n}), e);
      auto gx = on_gpu(x, e).requires_grad_(true);
      const auto y = linear(gx, weight.view, with_bias ? &bias.view : nullptr);
      EXPECT_CLOSE(y.detach(), at::matmul(x, w.t()) + (with_bias ? b : at::zeros({n})), e);
      y.backward(on_gpu(dy, e));
      EXPECT_CLOSE(gx.grad(), at::matmul(dy, w), e);
      EXPECT_CLOSE(weight.grad, at::matmul(dy.t(), x), e);
      if (with_bias) {
        EXPECT_CLOSE(bias.grad.view({n}), dy.sum(0), e);
      }
      // A second backward adds.
      linear(gx, weight.view, nullptr).backward(on_gpu(dy, e));
      EXPECT_CLOSE(weight.grad, 2 * at::matmul(dy.t(), x), e);
    }
  }
}

// Products whose weights are streamed (stream_gemm.cu), against torch's in f64. The shapes take
// tiles of every width on an H200, alone, shared by two blocks, and in up to three turns; rings
// wrap.
TEST(CudaStream, Linear) {
  TD_NEED_GPU();
  at::manual_seed(1);
  const at::NoGradGuard without_gradients;
  for (auto [n, k] : {std::pair{1024, 2048},
                      {2560, 9728},
                      {3168, 1024},
                      {4000, 8192},
                      {4096, 2304},
                      {6144, 2560},
                      {10560, 2560},
                      {12672, 2560},
                      {20000, 4096},
                      {22000, 1024},
                      {16000, 264},
                      {66, 8},
                      {2, 72}}) {
    const auto w = at::randn({n, k}, at::dtype(at::kBFloat16).device(gpu()));
    const auto b = at::randn({1, n}, w.options());
    const Weight weight(w, Element::bf16), bias(b, Element::bf16);
    for (const std::int64_t rows : {2, 7, 16, 33, 48}) {
      const auto x = at::randn({rows, k}, w.options());
      const auto run = [&] { return linear(x, weight.view, rows % 2 ? &bias.view : nullptr); };
      const auto want =
          at::matmul(x.to(at::kDouble), w.to(at::kDouble).t()) + (rows % 2 ? b : 0 * b);
      const auto y = run();
      EXPECT_LT(difference(back(y), back(want)), tolerance(Element::bf16))
          << rows << " rows, n " << n << ", k " << k;
      EXPECT_TRUE(at::equal(y, run()));
    }
  }
}

TEST(CudaStream, GatedLinear) {
  TD_NEED_GPU();
  at::manual_seed(1);
  const at::NoGradGuard without_gradients;
  for (auto [n, k] : {std::pair{512, 4096},
                      {3072, 576},
                      {6144, 1024},
                      {8000, 1024},
                      {12672, 2560},
                      {19456, 2560},
                      {21504, 512},
                      {1004, 200},
                      {20, 8}})
    for (const std::int64_t rows : {2, 16, 33, 64, 65, 128}) {
      const auto activation = rows % 2 ? Activation::gelu_tanh : Activation::silu;
      const auto w = at::randn({n, k}, at::dtype(at::kBFloat16).device(gpu())) / std::sqrt(k);
      const auto b = at::randn({1, n}, w.options()), x = at::randn({rows, k}, w.options());
      const Weight weight(w, Element::bf16);
      const void* bias = rows % 3 ? b.data_ptr() : nullptr;
      const auto run = [&] {
        auto y = at::full({rows, n / 2}, NAN, w.options());
        EXPECT_TRUE(cuda_part().linear_gated(Element::bf16, activation, x.data_ptr(),
                                             weight.view.data, bias, y.data_ptr(), rows, n, k));
        return y;
      };
      const auto gate_up =
          at::matmul(x.to(at::kDouble), w.to(at::kDouble).t()) + (bias ? b : 0 * b);
      const auto gate = gate_up.narrow(1, 0, n / 2), up = gate_up.narrow(1, n / 2, n / 2);
      const auto act = activation == Activation::silu ? at::silu(gate) : at::gelu(gate, "tanh");
      const auto y = run();
      EXPECT_LT(difference(back(y), back(act * up)), 2 * tolerance(Element::bf16))  // rounded twice
          << rows << " rows, n " << n << ", k " << k;
      EXPECT_TRUE(at::equal(y, run()));
    }
}

// In one pass or in two, with any number of rows.
TEST_P(Cuda, GatedLinear) {
  const at::NoGradGuard without_gradients;
  for (const std::int64_t rows : {1, 2, 64, 65, 129})
    for (auto [n, k] : {std::pair{3072, 576}, {96, 72}, {1004, 200}, {6, 7}}) {
      const auto x = values({rows, k}, e), w = values({n, k}, e), b = values({n}, e);
      const Weight weight(w, e), bias(b.view({1, n}), e);
      const auto gate_up = at::matmul(x, w.t()) + b;
      const auto want = at::silu(gate_up.narrow(1, 0, n / 2)) * gate_up.narrow(1, n / 2, n / 2);
      for (const bool of_rollout : {true, false})
        EXPECT_LT(difference(back(linear_gate_mul(on_gpu(x, e), weight.view, &bias.view,
                                                  Activation::silu, of_rollout)),
                             want),
                  2 * tolerance(e))
            << rows << " rows, n " << n << ", k " << k;
    }
}

TEST_P(Cuda, RmsNorm) {
  for (auto [rows, width] : {std::pair{1, 4},
                             {3, 5},
                             {70, 64},
                             {9, 128},
                             {300, 576},
                             {5, 1000},
                             {11, 2560},
                             {2, 8192}}) {
    const auto x = values({rows, width}, e), w = values({width}, e), dy = values({rows, width}, e);
    Weight weight(w, e);
    auto gx = on_gpu(x, e).requires_grad_(true);
    const auto y = rms_norm(gx, weight.view, 1e-5f, 0.5f);
    const auto wx = x.clone().requires_grad_(true), ww = w.clone().requires_grad_(true);
    const auto want = wx * at::rsqrt(wx.square().mean(1, true) + 1e-5) * (ww + 0.5);
    EXPECT_CLOSE(y.detach(), want.detach(), e);
    y.backward(on_gpu(dy, e));
    want.backward(dy);
    EXPECT_CLOSE(gx.grad(), wx.grad(), e);
    EXPECT_CLOSE(weight.grad, ww.grad(), e);
  }
}

TEST_P(Cuda, AddRmsNorm) {
  for (auto [rows, width] : {std::pair{1, 4}, {3, 5}, {70, 64}, {301, 576}, {11, 2560}}) {
    const auto x = values({rows, width}, e), delta = values({rows, width}, e),
               w = values({width}, e), ds = values({rows, width}, e), dy = values({rows, width}, e);
    Weight weight(w, e);
    auto gx = on_gpu(x, e).requires_grad_(true), gd = on_gpu(delta, e).requires_grad_(true);
    const auto out = add_rms_norm(gx, gd, weight.view, 1e-5f, 0.5f);
    const auto wx = x.clone().requires_grad_(true), ww = w.clone().requires_grad_(true);
    const auto sum = wx + delta;
    const auto normed = sum * at::rsqrt(sum.square().mean(1, true) + 1e-5) * (ww + 0.5);
    EXPECT_CLOSE(out.sum.detach(), sum.detach(), e);
    EXPECT_CLOSE(out.normed.detach(), normed.detach(), e);
    ((out.sum * on_gpu(ds, e)).sum() + (out.normed * on_gpu(dy, e)).sum()).backward();
    ((sum * ds).sum() + (normed * dy).sum()).backward();
    EXPECT_CLOSE(gx.grad(), wx.grad(), e);
    EXPECT_CLOSE(gd.grad(), wx.grad(), e);
    EXPECT_CLOSE(weight.grad, ww.grad(), e);
  }
}

TEST_P(Cuda, NormHeads) {
  for (auto [rows, heads, kv, dim] :
       {std::tuple{1, 1, 1, 4}, {7, 4, 2, 14}, {130, 8, 2, 64}, {65, 3, 1, 128}}) {
    const AttentionShape shape{.num_heads = heads, .num_kv_heads = kv, .head_dim = dim};
    const auto x = values({rows, shape.qkv_width()}, e), wq = values({dim}, e),
               wk = values({dim}, e), dy = values({rows, shape.qkv_width()}, e);
    Weight q(wq, e), k(wk, e);
    auto gx = on_gpu(x, e).requires_grad_(true);
    const auto y = norm_heads(gx, shape, q.view, k.view, 1e-6f, 0.0f);
    const auto wx = x.clone().requires_grad_(true), vq = wq.clone().requires_grad_(true),
               vk = wk.clone().requires_grad_(true);
    const auto by_head = wx.view({rows, heads + 2 * kv, dim});
    const auto scaled = by_head * at::rsqrt(by_head.square().mean(2, true) + 1e-6);
    const auto want = at::cat({scaled.narrow(1, 0, heads) * vq, scaled.narrow(1, heads, kv) * vk,
                               by_head.narrow(1, heads + kv, kv)},
                              1)
                          .view({rows, -1});
    EXPECT_CLOSE(y.detach(), want.detach(), e);
    y.backward(on_gpu(dy, e));
    want.backward(dy);
    EXPECT_CLOSE(gx.grad(), wx.grad(), e);
    EXPECT_CLOSE(q.grad, vq.grad(), e);
    EXPECT_CLOSE(k.grad, vk.grad(), e);
  }
}

TEST_P(Cuda, RotaryTurnsAndTurnsBack) {
  for (auto [heads, kv, dim, rotary_dim] :
       {std::tuple{2, 1, 2, 2}, {4, 2, 64, 64}, {3, 3, 80, 32}, {9, 3, 128, 128}}) {
    for (const bool interleaved : {false, true}) {
      const AttentionShape shape{.num_heads = heads, .num_kv_heads = kv, .head_dim = dim};
      const std::int64_t rows = 13, half = rotary_dim / 2;
      const auto x = values({rows, shape.qkv_width()}, e),
                 angle = at::rand({40, half}).to(at::kDouble);
      std::vector<std::int32_t> positions;
      for (int i = 0; i < rows; ++i) positions.push_back((i * 7) % 40);
      const auto at_positions = ids_tensor("position", positions, 40, Place::cuda);
      const RopeTable table{.cos = angle.cos().to(at::kFloat).to(gpu()),
                            .sin = angle.sin().to(at::kFloat).to(gpu()),
                            .interleaved = interleaved};
      auto leaf = on_gpu(x, e).requires_grad_(true);
      const auto y = rotary(leaf * 1.0, shape, at_positions, table);
      auto want = x.clone().view({rows, heads + 2 * kv, dim});
      const auto index = ids_tensor("position", positions, 40, Place::cpu).to(at::kLong);
      const auto c = back(table.cos).index_select(0, index).unsqueeze(1);
      const auto s = back(table.sin).index_select(0, index).unsqueeze(1);
      // The two halves of the pairs, as views.
      const auto pairs = [&](const at::Tensor& t, std::int64_t which) {
        const auto turned = t.narrow(1, 0, heads + kv).narrow(2, 0, rotary_dim);
        return interleaved ? turned.slice(2, which, rotary_dim, 2)
                           : turned.narrow(2, which * half, half);
      };
      const auto from = x.view_as(want), low = pairs(from, 0), high = pairs(from, 1);
      pairs(want, 0).copy_(low * c - high * s);
      pairs(want, 1).copy_(high * c + low * s);
      EXPECT_CLOSE(y.detach(), want.view({rows, -1}), e);
      // The rotation is orthogonal: backward of the result is the input again.
      y.backward(on_gpu(want.view({rows, -1}), e));
      EXPECT_CLOSE(leaf.grad(), x, e);
    }
  }
}

TEST_P(Cuda, GateMul) {
  for (auto [rows, width] : {std::pair{1, 1}, {7, 33}, {50, 80}, {3, 9728}}) {
    for (const Activation activation : {Activation::silu, Activation::gelu_tanh}) {
      const auto x = values({rows, 2 * width}, e, 2.0), dy = values({rows, width}, e);
      auto gx = on_gpu(x, e).requires_grad_(true);
      const auto y = gate_mul(gx, activation);
      const auto wx = x.clone().requires_grad_(true);
      const auto gate = wx.narrow(1, 0, width), up = wx.narrow(1, width, width);
      const auto want =
          (activation == Activation::silu ? at::silu(gate) : at::gelu(gate, "tanh")) * up;
      EXPECT_CLOSE(y.detach(), want.detach(), e);
      y.backward(on_gpu(dy, e));
      want.backward(dy);
      EXPECT_CLOSE(gx.grad(), wx.grad(), e);
    }
  }
}

TEST_P(Cuda, EmbeddingLooksUpAndAddsByToken) {
  for (auto [vocab, width, rows] : {std::tuple{5, 3, 1}, {40, 64, 300}, {1000, 576, 77}}) {
    const auto w = values({vocab, width}, e), dy = values({rows, width}, e);
    std::vector<std::int32_t> ids;
    for (int i = 0; i < rows; ++i) ids.push_back((i * i) % vocab);
    Weight weight(w, e);
    const auto y = embedding(ids_tensor("id", ids, vocab, Place::cuda), weight.view, 4);
    const auto index = ids_tensor("id", ids, vocab, Place::cpu).to(at::kLong);
    EXPECT_CLOSE(y.detach(), w.index_select(0, index), e);
    y.backward(on_gpu(dy, e));
    auto want = at::zeros({vocab, width}, at::kDouble).index_add(0, index, dy);
    want[4].zero_();
    EXPECT_CLOSE(weight.grad, want, e);
  }
}

TEST_P(Cuda, HeadLogProbsAndEntropy) {
  for (auto [rows, vocab, k] :
       {std::tuple{1, 7, 4}, {9, 1025, 16}, {3, 49152, 64}, {130, 3000, 24}}) {
    const auto x = values({rows, k}, e), w = values({vocab, k}, e);
    const auto dp = values({rows}, Element::f32), dh = values({rows}, Element::f32);
    std::vector<std::int32_t> ids;
    for (int i = 0; i < rows; ++i) ids.push_back((i * 1237 + vocab - 1) % vocab);
    Weight weight(w, e);
    auto gx = on_gpu(x, e).requires_grad_(true);
    const auto out = head_log_probs(gx, ids, weight.view, 0.7f, true);
    const auto wx = x.clone().requires_grad_(true), ww = w.clone().requires_grad_(true);
    const auto log_p = at::log_softmax(at::matmul(wx, ww.t()) / double{0.7f}, 1);
    const auto index = ids_tensor("id", ids, vocab, Place::cpu).to(at::kLong);
    const auto want = log_p.gather(1, index.unsqueeze(1)).squeeze(1);
    const auto entropy = -(log_p.exp() * log_p).sum(1);
    EXPECT_LT((back(out.log_probs.detach()) - want.detach()).abs().max().item<double>(), 2e-4);
    EXPECT_LT((back(out.entropy.detach()) - entropy.detach()).abs().max().item<double>(), 2e-4);
    ((out.log_probs * dp.to(at::kFloat).to(gpu())).sum() +
     (out.entropy * dh.to(at::kFloat).to(gpu())).sum())
        .backward();
    ((want * dp).sum() + (entropy * dh).sum()).backward();
    const double tol = e == Element::f32 ? 2e-5 : 1e-2;
    EXPECT_LT(difference(back(gx.grad()), wx.grad()), tol);
    EXPECT_LT(difference(back(weight.grad), ww.grad()), tol);
    // Without the entropy the same log-probabilities, bit for bit.
    const auto again = head_log_probs(gx.detach(), ids, weight.view, 0.7f, false);
    EXPECT_TRUE(at::equal(again.log_probs, out.log_probs.detach()));
  }
}

// ---- attention

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
TEST_P(Cuda, PackedAttentionForwardAndBackward) {
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

TEST(CudaAttention, WhatLiesBehindTheLastRowStaysThere) {
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
TEST(CudaAttention, BackwardGoesByForwardsWay) {
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
TEST_P(Cuda, PagedAttentionInPieces) {
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
TEST(CudaDecode, APageIsReadAfterTheRowThatFillsIt) {
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

INSTANTIATE_TEST_SUITE_P(Kernels, Cuda, testing::Values(Element::f32, Element::bf16),
                         [](const auto& p) { return p.param == Element::f32 ? "f32" : "bf16"; });

// ---- memory

TEST(CudaMemory, ComesBackAtTheSameAddress) {
  TD_NEED_GPU();
  constexpr std::int64_t kBytes = 100 << 20;
  Memory memory(Place::cuda, kBytes, "test");
  void* const at = memory.data();
  std::vector<char> pattern(1 << 20, 7), found(pattern.size(), 1);
  write_memory(Place::cuda, at, pattern.data(), 1 << 20);
  const std::int64_t free_before = cuda_part().free_bytes();
  memory.give_back();
  memory.give_back();  // once is enough
  EXPECT_GE(cuda_part().free_bytes() - free_before, kBytes);
  memory.take_again("test");
  EXPECT_EQ(memory.data(), at);
  EXPECT_FALSE(memory.given_back());
  read_memory(Place::cuda, found.data(), at, 1 << 20);
  EXPECT_EQ(found, std::vector<char>(found.size(), 0));
  // More than there is: an error that says so, not a crash.
  EXPECT_THROW(Memory(Place::cuda, std::int64_t{1} << 42, "too much"), Error);
}

// ---- sampling and the optimizer, against the CPU table

// Pieces with gaps between them, more than one launch takes, at whole words and at any bytes: each
// arrives, and nothing else is written.
TEST(CudaCopy, PiecesArriveAndNothingElseIsWritten) {
  TD_NEED_GPU();
  for (const std::int64_t unit : {std::int64_t{16}, std::int64_t{1}}) {
    SCOPED_TRACE("unit " + std::to_string(unit));
    const auto bytes = at::dtype(at::kByte);
    std::vector<std::int64_t> begins, sizes;
    std::int64_t total = 0;
    for (int i = 0; i < 400; ++i) {
      begins.push_back(total);
      sizes.push_back(unit * (i % 7 == 3 ? 0 : 1 + i * 37 % 911));
      total += sizes.back() + (i % 3 == 0 ? 0 : 16 * (i % 5));
    }
    const auto source = at::randint(0, 256, {total}, bytes), want = at::full({total}, 7, bytes);
    const auto from = source.to(gpu()), to = want.to(gpu());
    std::vector<BytesCopy> pieces;
    for (std::size_t i = 0; i < begins.size(); ++i) {
      pieces.push_back({.from = from.data_ptr<std::uint8_t>() + begins[i],
                        .to = to.data_ptr<std::uint8_t>() + begins[i],
                        .bytes = sizes[i]});
      want.narrow(0, begins[i], sizes[i]).copy_(source.narrow(0, begins[i], sizes[i]));
    }
    std::vector<std::uint32_t> differ(pieces.size(), 9);
    cuda_part().synchronize();
    cuda_part().copy_and_compare(pieces.data(), std::ssize(pieces), differ.data());
    EXPECT_EQ(differ, std::vector<std::uint32_t>(pieces.size(), 0));
    EXPECT_TRUE(at::equal(to.cpu(), want));
  }
}

// The second look, after a copy that was found to differ: it names the pieces, by a single bit in
// any place, and all of them if it finds nothing.
TEST(CudaCopy, PiecesThatDifferAreNamed) {
  TD_NEED_GPU();
  constexpr std::int64_t kBytes = 1 << 20;
  const auto source = at::randint(0, 256, {kBytes}, at::dtype(at::kByte)), damaged = source.clone();
  const std::int64_t begins[] = {0, 16, 16, 4096, 5000, 5001, 700000, kBytes};
  const std::vector<std::uint32_t> want = {1, 0, 0, 1, 0, 1, 1};
  for (const std::int64_t byte :
       {std::int64_t{15}, std::int64_t{4096}, std::int64_t{350000}, kBytes - 1})
    damaged[byte].bitwise_xor_(1 << byte % 8);
  const auto from = source.to(gpu());
  for (const bool differs : {true, false}) {
    const auto to = (differs ? damaged : source).to(gpu());
    std::vector<BytesCopy> pieces;
    for (std::size_t i = 0; i < want.size(); ++i)
      pieces.push_back({.from = from.data_ptr<std::uint8_t>() + begins[i],
                        .to = to.data_ptr<std::uint8_t>() + begins[i],
                        .bytes = begins[i + 1] - begins[i]});
    std::vector<std::uint32_t> found(want.size(), 9);
    cuda_part().synchronize();
    cuda_part().find_differing(pieces.data(), std::ssize(pieces), found.data());
    EXPECT_EQ(found, differs ? want : std::vector<std::uint32_t>(want.size(), 1));
    EXPECT_TRUE(at::equal(to.cpu(), differs ? damaged : source));
  }
}

TEST(CudaSampling, DrawsTheTokensOfTheCpu) {
  TD_NEED_GPU();
  at::manual_seed(3);
  for (const std::int64_t vocab : {3, 1024, 5000, 49152}) {
    const std::int64_t rows = 40, draws = 400;
    const auto logits = at::randn({rows, vocab}) * 2;
    std::vector<SampleRow> params;
    for (std::int64_t i = 0; i < draws; ++i)
      params.push_back({.row = i % rows,
                        .temperature = i % 5 == 0 ? 0.0 : 0.5 + 0.1 * static_cast<double>(i % 9),
                        .seed = 11,
                        .sample_id = static_cast<std::uint64_t>(i),
                        .position = static_cast<std::uint64_t>(i % 3),
                        .evaluation = i % 2 == 0});
    std::vector<std::int32_t> cpu_ids(draws), gpu_ids(draws);
    std::vector<float> cpu_p(draws), gpu_p(draws);
    kernels().sample(logits.data_ptr<float>(), vocab, params.data(), draws, cpu_ids.data(),
                     cpu_p.data());
    const auto on_device = logits.to(gpu());
    kernels(Place::cuda)
        .sample(on_device.data_ptr<float>(), vocab, params.data(), draws, gpu_ids.data(),
                gpu_p.data());
    // A draw within rounding of a border may fall on the other side.
    std::int64_t different = 0;
    for (std::int64_t i = 0; i < draws; ++i) {
      different += cpu_ids[i] != gpu_ids[i];
      if (params[i].temperature == 0.0) {
        EXPECT_EQ(cpu_ids[i], gpu_ids[i]);
      }
      if (cpu_ids[i] == gpu_ids[i]) {
        EXPECT_NEAR(cpu_p[i], gpu_p[i], 1e-4);
      }
    }
    EXPECT_LE(different, 2) << "vocabulary " << vocab;
    // The log-probability is the trainer's, bit for bit.
    for (std::int64_t i = 0; i < draws; i += 37) {
      const auto id = at::full({1}, gpu_ids[i], at::dtype(at::kInt).device(gpu()));
      auto p = at::empty({1}, at::dtype(at::kFloat).device(gpu()));
      const double t = params[i].temperature;
      kernels(Place::cuda)
          .log_softmax_gather(on_device[i % rows].data_ptr<float>(), id.data_ptr<std::int32_t>(),
                              t == 0.0 ? 1.0f : static_cast<float>(t), p.data_ptr<float>(), nullptr,
                              nullptr, 1, vocab);
      EXPECT_EQ(p.item<float>(), gpu_p[i]);
    }
  }
}

TEST(CudaSampling, ABadLogitGivesNoNumber) {
  TD_NEED_GPU();
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    auto logits = at::randn({1, 3000});
    logits[0][2900] = bad;
    const auto z = logits.to(gpu());
    const SampleRow row{.row = 0, .temperature = 1.0};
    std::int32_t id;
    float p;
    kernels(Place::cuda).sample(z.data_ptr<float>(), 3000, &row, 1, &id, &p);
    EXPECT_TRUE(std::isnan(p)) << bad;
  }
}

TEST(CudaOptimizer, AdamWNormAndSumsAreTheCpus) {
  TD_NEED_GPU();
  at::manual_seed(5);
  for (const std::int64_t n : {1, 5, 4096, 200003}) {
    const auto grad = at::randn({n}), other = at::randn({n});
    auto master = at::randn({n}), m = at::randn({n}) * 0.1, v = at::rand({n}) * 0.1;
    auto gm = master.to(gpu()), gmm = m.to(gpu()), gv = v.to(gpu());
    const at::Tensor before[] = {master.clone(), m.clone(), v.clone()};
    auto ggrad = grad.to(gpu());
    const AdamWStep step{.lr = 1e-3f,
                         .weight_decay = 0.1f,
                         .bias_correction1 = 0.3f,
                         .bias_correction2 = 0.2f,
                         .grad_scale = 0.7f};
    kernels().adamw(step, grad.data_ptr<float>(), master.data_ptr<float>(), m.data_ptr<float>(),
                    v.data_ptr<float>(), n);
    kernels(Place::cuda)
        .adamw(step, ggrad.data_ptr<float>(), gm.data_ptr<float>(), gmm.data_ptr<float>(),
               gv.data_ptr<float>(), n);
    // With the arena's part in the same pass: the same bits, and the masters rounded. Pieces that
    // do and do not begin at a multiple of four elements.
    for (const std::int64_t first : {n / 8 * 4, n / 3}) {
      auto hm = before[0].to(gpu()), hmm = before[1].to(gpu()), hv = before[2].to(gpu());
      auto left = at::full({first}, 7, at::dtype(at::kBFloat16).device(gpu()));
      auto right = at::full({n - first}, 7, left.options());
      const ArenaPiece pieces[] = {{0, first, static_cast<bf16*>(left.data_ptr())},
                                   {first, n - first, static_cast<bf16*>(right.data_ptr())}};
      cuda_part().adamw_into(step, ggrad.data_ptr<float>(), hm.data_ptr<float>(),
                             hmm.data_ptr<float>(), hv.data_ptr<float>(), pieces, 2);
      EXPECT_TRUE(at::equal(hm, gm) && at::equal(hmm, gmm) && at::equal(hv, gv)) << n;
      EXPECT_TRUE(at::equal(at::cat({left, right}), gm.to(at::kBFloat16))) << n;
    }
    for (const auto& [got, want] : {std::pair{gm, master}, {gmm, m}, {gv, v}})
      EXPECT_LT(difference(back(got), want.to(at::kDouble)), 1e-6) << n;
    const std::int64_t chunks = (n + kSumChunk - 1) / kSumChunk;
    std::vector<double> a(chunks), b(chunks);
    kernels().sum_squares(grad.data_ptr<float>(), n, a.data());
    kernels(Place::cuda).sum_squares(ggrad.data_ptr<float>(), n, b.data());
    for (std::int64_t c = 0; c < chunks; ++c) EXPECT_NEAR(a[c], b[c], 1e-10 * a[c]);
    auto sum = ggrad.clone();
    kernels(Place::cuda).add_f32(sum.data_ptr<float>(), other.to(gpu()).data_ptr<float>(), n);
    EXPECT_TRUE(at::equal(sum.to(at::kCPU), grad + other));
    auto narrow = at::empty({n}, at::dtype(at::kBFloat16).device(gpu()));
    kernels(Place::cuda).to_bf16(ggrad.data_ptr<float>(), static_cast<bf16*>(narrow.data_ptr()), n);
    EXPECT_TRUE(at::equal(narrow.to(at::kCPU), grad.to(at::kBFloat16)));
  }
}

}  // namespace
}  // namespace tandem
