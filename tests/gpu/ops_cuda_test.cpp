// The CUDA kernels behind the model's operations against slow references in double over odd shapes,
// forward and backward, in f32 and bf16; attention has a file of its own.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <random>

#include "base/check.h"
#include "gpu/kernel_test.h"

namespace tandem {
namespace {

class Cuda : public InBothElements {};

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
INSTANTIATE_TEST_SUITE_P(Kernels, Cuda, testing::Values(Element::f32, Element::bf16), element_name);

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
