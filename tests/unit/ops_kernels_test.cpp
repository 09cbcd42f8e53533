// Every kernel table that runs here against slow references in double, and the properties that
// exactness stands on: rows do not see each other, threads and chunk sizes change no bit.
#include "ops/kernels/kernels.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace tandem {
namespace {

std::vector<float> random_floats(std::size_t n, unsigned seed, float scale = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> v(n);
  for (float& x : v) x = normal(generator);
  return v;
}

// A matrix or activation in the element type, its values rounded to it.
struct Typed {
  Typed(const Kernels& k, Element element, std::vector<float> wide)
      : e(element), values(std::move(wide)) {
    if (e == Element::bf16) {
      narrow.resize(values.size());
      k.to_bf16(values.data(), narrow.data(), static_cast<std::int64_t>(values.size()));
      k.to_f32(narrow.data(), values.data(), static_cast<std::int64_t>(values.size()));
    }
  }
  const void* data() const {
    return e == Element::f32 ? static_cast<const void*>(values.data()) : narrow.data();
  }
  Element e;
  std::vector<float> values;
  std::vector<bf16> narrow;
};

struct Out {
  Out(const Kernels& k, Element element, std::size_t n) : kernels(k), e(element), f(n), b(n) {}
  void* data() { return e == Element::f32 ? static_cast<void*>(f.data()) : b.data(); }
  std::vector<float> values() {
    if (e == Element::bf16) kernels.to_f32(b.data(), f.data(), static_cast<std::int64_t>(f.size()));
    return f;
  }
  const Kernels& kernels;
  Element e;
  std::vector<float> f;
  std::vector<bf16> b;
};

std::vector<char> panels(const Kernels& k, Element e, const std::vector<float>& w, std::int64_t n,
                         std::int64_t cols) {
  std::vector<char> p(static_cast<std::size_t>(round_up(n, 16) * round_up(cols, 2) * 4), 0);
  k.write_panels(e, p.data(), cols, 0, n, w.data());
  return p;
}

double tolerance(Element e) { return e == Element::f32 ? 2e-5 : 1.2e-2; }

void expect_near(const std::vector<float>& got, const std::vector<double>& want, double tol) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i)
    ASSERT_NEAR(got[i], want[i], tol * (1.0 + std::abs(want[i]))) << "at " << i;
}

class EachTable : public testing::TestWithParam<std::tuple<const char*, Element>> {
 protected:
  void SetUp() override {
    k = kernels_by_name(std::get<0>(GetParam()));
    e = std::get<1>(GetParam());
    if (!k) GTEST_SKIP() << "not run: no " << std::get<0>(GetParam()) << " on this processor";
  }
  const Kernels* k = nullptr;
  Element e = Element::f32;
};

TEST_P(EachTable, PanelsKeepEveryValueInPlace) {
  for (auto [n, cols] : {std::pair{1, 1}, {16, 8}, {17, 5}, {40, 33}}) {
    const Typed w(*k, e, random_floats(n * cols, 1));
    auto p = panels(*k, e, w.values, n, cols);
    std::vector<float> back(w.values.size());
    k->read_panels(e, p.data(), cols, 0, n, back.data());
    EXPECT_EQ(back, w.values);
    // Rows in the middle, and one embedding row.
    k->read_panels(e, p.data(), cols, n / 2, n - n / 2, back.data());
    EXPECT_EQ(0, std::memcmp(back.data(), w.values.data() + n / 2 * cols, (n - n / 2) * cols * 4));
    Out row(*k, e, cols);
    const std::int32_t id = n - 1;
    k->gather_rows(e, p.data(), cols, &id, 1, row.data());
    EXPECT_EQ(0, std::memcmp(row.values().data(), w.values.data() + id * cols, cols * 4));
  }
}

// One tensor's checksum is that of its parts, in panels and row-major alike, and does not see what
// pads them.
TEST_P(EachTable, ChecksumsAgreeAcrossLayouts) {
  using Sums = std::array<std::uint32_t, 2>;
  for (auto [n, cols] : {std::pair{1, 1}, {16, 8}, {17, 5}, {40, 33}, {64, 24}}) {
    const Typed w(*k, e, random_floats(n * cols, 1));
    auto p = panels(*k, e, w.values, n, cols);
    constexpr std::int64_t kFirst = 1000;  // row of the whole tensor
    Sums flat{}, whole{}, parts{}, copied{};
    k->checksum_flat(e, w.data(), n, cols, kFirst, flat.data());
    k->checksum_panels(e, p.data(), cols, 0, n, kFirst, whole.data());
    for (std::int64_t row = 0; row < n; row += 7)
      k->checksum_panels(e, p.data(), cols, row, std::min<std::int64_t>(7, n - row), kFirst + row,
                         parts.data());
    std::vector<char> room(p.size() + 32);
    char* to = room.data() + (32 - reinterpret_cast<std::uintptr_t>(room.data()) % 32) % 32;
    k->copy_panels(e, p.data(), to, cols, n, kFirst, copied.data());
    EXPECT_EQ(whole, flat);
    EXPECT_EQ(parts, flat);
    EXPECT_EQ(copied, flat);
    std::vector<float> back(w.values.size());
    k->read_panels(e, to, cols, 0, n, back.data());
    EXPECT_EQ(back, w.values);
    // Another place, or one changed bit, shows.
    Sums moved{}, changed{};
    k->checksum_flat(e, w.data(), n, cols, kFirst + 1, moved.data());
    EXPECT_NE(moved, flat);
    const std::size_t last = static_cast<std::size_t>(n) * cols * (e == Element::f32 ? 4 : 2) - 1;
    std::vector<char> bytes(last + 1);
    std::memcpy(bytes.data(), w.data(), bytes.size());
    bytes[last] = static_cast<char>(bytes[last] ^ 1);
    k->checksum_flat(e, bytes.data(), n, cols, kFirst, changed.data());
    EXPECT_NE(changed, flat);
  }
}

TEST_P(EachTable, LinearAndItsGradients) {
  for (auto [m, n, cols] : {std::tuple{1, 1, 1}, {5, 17, 7}, {33, 48, 64}, {13, 1100, 19}}) {
    const Typed x(*k, e, random_floats(m * cols, 2)), w(*k, e, random_floats(n * cols, 3)),
        dy(*k, e, random_floats(m * n, 4)), bias(*k, e, random_floats(n, 5));
    auto p = panels(*k, e, w.values, n, cols);
    std::vector<double> y(m * n), dx(m * cols), dw(n * cols), db(n);
    for (int i = 0; i < m; ++i)
      for (int j = 0; j < n; ++j) {
        y[i * n + j] = bias.values[j];
        db[j] += dy.values[i * n + j];
        for (int c = 0; c < cols; ++c) {
          y[i * n + j] += double{x.values[i * cols + c]} * w.values[j * cols + c];
          dx[i * cols + c] += double{dy.values[i * n + j]} * w.values[j * cols + c];
          dw[j * cols + c] += double{dy.values[i * n + j]} * x.values[i * cols + c];
        }
      }
    Out out(*k, e, m * n), out_dx(*k, e, m * cols);
    k->linear(e, x.data(), p.data(), bias.data(), out.data(), false, m, n, cols);
    expect_near(out.values(), y, tolerance(e) * 4);
    k->linear_dx(e, dy.data(), false, p.data(), out_dx.data(), m, n, cols);
    expect_near(out_dx.values(), dx, tolerance(e) * 8);
    std::vector<float> grad(n * cols, 1.0f), grad_b(n, 1.0f);
    k->linear_dw(e, dy.data(), false, x.data(), grad.data(), false, m, n, cols);
    expect_near(grad, dw, 1e-4);
    k->linear_dw(e, dy.data(), false, x.data(), grad.data(), true, m, n, cols);
    for (double& v : dw) v *= 2;
    expect_near(grad, dw, 1e-4);
    k->bias_dw(e, dy.data(), grad_b.data(), m, n);
    for (double& v : db) v += 1;
    expect_near(grad_b, db, 1e-4);
  }
}

TEST_P(EachTable, ARowDoesNotSeeHowManyRowsOrThreadsThereAre) {
  constexpr int rows = 64, n = 100, cols = 73;
  const Typed x(*k, e, random_floats(rows * cols, 6)), w(*k, e, random_floats(n * cols, 7));
  auto p = panels(*k, e, w.values, n, cols);
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  Out whole(*k, e, rows * n);
  k->linear(e, x.data(), p.data(), nullptr, whole.data(), false, rows, n, cols);
  omp_set_num_threads(2);
  const std::size_t size = e == Element::f32 ? 4 : 2;
  for (int m = 1; m <= rows; ++m) {
    Out part(*k, e, m * n);
    const int first = rows - m;
    k->linear(e, static_cast<const char*>(x.data()) + first * cols * size, p.data(), nullptr,
              part.data(), false, m, n, cols);
    ASSERT_EQ(0, std::memcmp(part.data(), static_cast<char*>(whole.data()) + first * n * size,
                             m * n * size))
        << m << " rows";
  }
  omp_set_num_threads(threads);
}

TEST_P(EachTable, RmsNormAndItsGradients) {
  constexpr int rows = 3, width = 37;
  const Typed x(*k, e, random_floats(rows * width, 8)), w(*k, e, random_floats(width, 9)),
      dy(*k, e, random_floats(rows * width, 10));
  std::vector<double> y, dx(rows * width), dw(width);
  for (int r = 0; r < rows; ++r) {
    double square = 0;
    for (int i = 0; i < width; ++i) square += std::pow(double{x.values[r * width + i]}, 2);
    const double rstd = 1 / std::sqrt(square / width + 1e-5);
    double dot = 0;
    for (int i = 0; i < width; ++i) {
      const double hat = x.values[r * width + i] * rstd;
      y.push_back(hat * w.values[i]);
      dot += dy.values[r * width + i] * w.values[i] * hat;
      dw[i] += dy.values[r * width + i] * hat;
    }
    for (int i = 0; i < width; ++i)
      dx[r * width + i] = rstd * (dy.values[r * width + i] * w.values[i] -
                                  x.values[r * width + i] * rstd * dot / width);
  }
  Out out(*k, e, rows * width), out_dx(*k, e, rows * width);
  std::vector<float> rstd(rows), grad(width);
  k->rms_norm(e, x.data(), w.data(), 1e-5f, 0.0f, out.data(), rstd.data(), rows, width);
  expect_near(out.values(), y, tolerance(e));
  k->rms_norm_dx(e, dy.data(), x.data(), w.data(), 0.0f, rstd.data(), out_dx.data(), rows, width);
  expect_near(out_dx.values(), dx, tolerance(e));
  k->rms_norm_dw(e, dy.data(), x.data(), rstd.data(), grad.data(), rows, width);
  expect_near(grad, dw, 1e-5);
}

// Both activations against their textbook forms: silu by the logistic function, gelu by tanh.
TEST_P(EachTable, GateMulAndItsGradient) {
  constexpr int rows = 2, width = 19;
  const Typed x(*k, e, random_floats(rows * 2 * width, 11, 3.0f)),
      dy(*k, e, random_floats(rows * width, 12));
  const double root = std::sqrt(2 / M_PI);
  for (const Activation act : {Activation::silu, Activation::gelu_tanh}) {
    std::vector<double> y, dx(rows * 2 * width);
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < width; ++i) {
        const double g = x.values[r * 2 * width + i], u = x.values[r * 2 * width + width + i];
        const double s = 1 / (1 + std::exp(-g)), d = dy.values[r * width + i];
        const double t = std::tanh(root * (g + 0.044715 * g * g * g));
        const bool silu = act == Activation::silu;
        const double value = silu ? g * s : 0.5 * g * (1 + t);
        const double slope =
            silu ? s + g * s * (1 - s)
                 : 0.5 * (1 + t) + 0.5 * g * (1 - t * t) * root * (1 + 3 * 0.044715 * g * g);
        y.push_back(value * u);
        dx[r * 2 * width + i] = d * u * slope;
        dx[r * 2 * width + width + i] = d * value;
      }
    Out out(*k, e, rows * width), out_dx(*k, e, rows * 2 * width);
    k->gate_mul(e, act, x.data(), out.data(), rows, width);
    expect_near(out.values(), y, tolerance(e));
    k->gate_mul_dx(e, act, dy.data(), x.data(), out_dx.data(), rows, width);
    expect_near(out_dx.values(), dx, tolerance(e));
  }
}

// Whole heads and their first 6 of 10 elements, both ways of pairing; the third head stays.
TEST_P(EachTable, RotaryTurnsPairsAndBack) {
  constexpr int heads = 3, dim = 10, rows = 4, stride = heads * dim + 5;
  const Typed x(*k, e, random_floats(rows * stride, 13));
  const std::int32_t positions[rows] = {0, 7, 2, 5};
  for (auto [turned_dim, interleaved] : {std::pair{10, false}, {10, true}, {6, false}, {6, true}}) {
    const int half = turned_dim / 2;
    std::vector<float> cos(8 * half), sin(8 * half);
    for (int p = 0; p < 8; ++p)
      for (int i = 0; i < half; ++i) {
        cos[p * half + i] = std::cos(p * 0.3f * (i + 1));
        sin[p * half + i] = std::sin(p * 0.3f * (i + 1));
      }
    std::vector<double> want(x.values.begin(), x.values.end());
    for (int r = 0; r < rows; ++r)
      for (int h = 0; h < heads - 1; ++h)
        for (int i = 0; i < half; ++i) {
          const int head = r * stride + h * dim;
          const int low = head + (interleaved ? 2 * i : i),
                    high = interleaved ? low + 1 : low + half;
          const double a = x.values[low], b = x.values[high];
          const double c = cos[positions[r] * half + i], s = sin[positions[r] * half + i];
          want[low] = a * c - b * s;
          want[high] = b * c + a * s;
        }
    Out out(*k, e, rows * stride);
    std::memcpy(out.data(), x.data(), rows * stride * (e == Element::f32 ? 4 : 2));
    const auto rotate = [&](int direction) {
      k->rotary(e, out.data(), stride, heads - 1, dim, turned_dim, interleaved, positions,
                cos.data(), sin.data(), direction, rows);
    };
    rotate(1);
    expect_near(out.values(), want, tolerance(e) * 2);
    rotate(-1);
    const std::vector<double> before(x.values.begin(), x.values.end());
    expect_near(out.values(), before, tolerance(e) * 4);
  }
}

// Two sequences with scattered blocks; the second is longer than two blocks.
struct AttentionCase {
  AttentionCase(std::int64_t heads, std::int64_t kv_heads, std::int64_t dim, std::int64_t window)
      : shape{heads, kv_heads, dim, 1.0f / std::sqrt(static_cast<float>(dim)), window} {
    for (std::size_t s = 0; s < lengths.size(); ++s) {
      for (std::int64_t b = 0; b * 16 < lengths[s]; ++b)
        blocks[s].push_back(
            static_cast<std::int32_t>((b * 7 + static_cast<std::int64_t>(s) * 3) % 11));
      for (std::int64_t i = 0; i < lengths[s]; ++i)
        key_rows[s].push_back(static_cast<std::int32_t>(rows + i));
      segments.push_back({rows, lengths[s], 0, blocks[s].data(),
                          static_cast<std::int64_t>(blocks[s].size()), key_rows[s].data(),
                          static_cast<std::int64_t>(s)});
      rows += lengths[s];
    }
  }
  std::vector<KvWrite> writes(const Segment& s) const {
    std::vector<KvWrite> w;
    for (std::int64_t i = 0; i < s.num_rows; ++i) {
      const std::int64_t p = s.position_begin + i;
      w.push_back({s.row_begin + i, s.blocks[p / 16] * 16 + p % 16});
    }
    return w;
  }
  AttentionShape shape;
  std::vector<std::int64_t> lengths{5, 41};
  std::vector<std::int32_t> blocks[2], key_rows[2];
  std::vector<Segment> segments;
  std::int64_t rows = 0;
};

// Output and gradient of the loss sum(out · dout), in double.
void reference_attention(const AttentionCase& c, const std::vector<float>& qkv,
                         const std::vector<float>& dout, std::vector<double>& out,
                         std::vector<double>& grad) {
  const auto& s = c.shape;
  const std::int64_t width = s.qkv_width(), dim = s.head_dim, group = s.num_heads / s.num_kv_heads;
  out.assign(c.rows * s.num_heads * dim, 0);
  grad.assign(c.rows * width, 0);
  for (const Segment& seg : c.segments)
    for (std::int64_t p = 0; p < seg.num_rows; ++p)
      for (std::int64_t h = 0; h < s.num_heads; ++h) {
        const std::int64_t row = seg.row_begin + p, q = row * width + h * dim;
        const std::int64_t first = s.window > 0 ? std::max<std::int64_t>(0, p - s.window + 1) : 0;
        std::vector<double> pr, dp;
        double sum = 0, top = -1e300, mean = 0;
        auto key = [&](std::int64_t j) {
          return (seg.row_begin + j) * width + (s.num_heads + h / group) * dim;
        };
        for (std::int64_t j = first; j <= p; ++j) {
          double dot = 0, dv = 0;
          for (std::int64_t d = 0; d < dim; ++d) {
            dot += double{qkv[q + d]} * qkv[key(j) + d];
            dv += double{dout[(row * s.num_heads + h) * dim + d]} *
                  qkv[key(j) + s.num_kv_heads * dim + d];
          }
          pr.push_back(dot * s.scale);
          dp.push_back(dv);
          top = std::max(top, pr.back());
        }
        for (double& v : pr) sum += v = std::exp(v - top);
        for (std::size_t j = 0; j < pr.size(); ++j) mean += (pr[j] /= sum) * dp[j];
        for (std::int64_t j = first; j <= p; ++j)
          for (std::int64_t d = 0; d < dim; ++d) {
            const double pj = pr[j - first], ds = pj * (dp[j - first] - mean) * s.scale;
            out[(row * s.num_heads + h) * dim + d] += pj * qkv[key(j) + s.num_kv_heads * dim + d];
            grad[key(j) + s.num_kv_heads * dim + d] += pj * dout[(row * s.num_heads + h) * dim + d];
            grad[q + d] += ds * qkv[key(j) + d];
            grad[key(j) + d] += ds * qkv[q + d];
          }
      }
}

TEST_P(EachTable, AttentionAndItsGradient) {
  for (const auto& c :
       {AttentionCase(4, 2, 8, 0), AttentionCase(3, 1, 20, 0), AttentionCase(2, 2, 17, 9)}) {
    const Typed qkv(*k, e, random_floats(c.rows * c.shape.qkv_width(), 14)),
        dout(*k, e, random_floats(c.rows * c.shape.num_heads * c.shape.head_dim, 15));
    // Blocks start as garbage: what no row wrote must not be read.
    std::vector<float> kb(11 * c.shape.k_block_elements(), NAN),
        vb(11 * c.shape.v_block_elements(), NAN);
    std::vector<double> want, want_grad;
    reference_attention(c, qkv.values, dout.values, want, want_grad);
    Out out(*k, e, want.size()), grad(*k, e, want_grad.size());
    for (const Segment& s : c.segments) {
      const auto w = c.writes(s);
      k->write_kv(e, c.shape, qkv.data(), w.data(), static_cast<std::int64_t>(w.size()), kb.data(),
                  vb.data());
    }
    k->attention(e, c.shape, qkv.data(), c.segments.data(), 2, kb.data(), vb.data(), out.data());
    expect_near(out.values(), want, tolerance(e));
    k->attention_backward(e, c.shape, qkv.data(), dout.data(), c.segments.data(), 2, grad.data(),
                          c.rows);
    expect_near(grad.values(), want_grad, tolerance(e) * 3);
  }
}

// Weights that are not finite must show in the answers, not be swallowed by a maximum.
TEST_P(EachTable, AttentionKeepsWhatIsNotFinite) {
  const AttentionCase c(4, 2, 8, 0);
  const std::int64_t last = c.rows - 1, width = c.shape.qkv_width();
  for (const float bad : {NAN, INFINITY}) {
    auto values = random_floats(c.rows * width, 14);
    values[static_cast<std::size_t>(last * width)] = bad;  // the first head's query of one row
    const Typed qkv(*k, e, values);
    std::vector<float> kb(11 * c.shape.k_block_elements(), NAN),
        vb(11 * c.shape.v_block_elements(), NAN);
    Out out(*k, e, static_cast<std::size_t>(c.rows * c.shape.num_heads * c.shape.head_dim));
    for (const Segment& s : c.segments) {
      const auto w = c.writes(s);
      k->write_kv(e, c.shape, qkv.data(), w.data(), static_cast<std::int64_t>(w.size()), kb.data(),
                  vb.data());
    }
    k->attention(e, c.shape, qkv.data(), c.segments.data(), 2, kb.data(), vb.data(), out.data());
    const auto got = out.values();
    const std::size_t row = static_cast<std::size_t>(last * c.shape.num_heads * c.shape.head_dim);
    EXPECT_TRUE(std::isnan(got[row])) << bad << " gives " << got[row];
    EXPECT_TRUE(std::isfinite(got[row + static_cast<std::size_t>(c.shape.head_dim)]));
    EXPECT_TRUE(std::isfinite(got[0]));
  }
}

TEST_P(EachTable, PrefillInAnyChunksAndDecodeGiveTheSameBits) {
  const AttentionCase c(6, 2, 12, 0);
  const Typed qkv(*k, e, random_floats(c.rows * c.shape.qkv_width(), 16));
  const Segment& whole = c.segments[1];
  const std::size_t size = e == Element::f32 ? 4 : 2;
  auto run = [&](std::vector<std::int64_t> chunks) {
    std::vector<float> kb(11 * c.shape.k_block_elements()), vb(11 * c.shape.v_block_elements());
    Out out(*k, e, c.rows * c.shape.num_heads * c.shape.head_dim);
    std::int64_t at = 0;
    for (std::int64_t n : chunks) {
      Segment part = whole;
      part.row_begin += at;
      part.position_begin = at;
      part.num_rows = n;
      const auto w = c.writes(part);
      k->write_kv(e, c.shape, qkv.data(), w.data(), n, kb.data(), vb.data());
      k->attention(e, c.shape, qkv.data(), &part, 1, kb.data(), vb.data(), out.data());
      at += n;
    }
    const auto* p = static_cast<const char*>(out.data());
    return std::string(p + whole.row_begin * c.shape.num_heads * c.shape.head_dim * size,
                       p + out.f.size() * size);
  };
  const auto once = run({41});
  EXPECT_EQ(once, run({1, 1, 14, 17, 8}));
  EXPECT_EQ(once, run(std::vector<std::int64_t>(41, 1)));
}

INSTANTIATE_TEST_SUITE_P(Kernels, EachTable,
                         testing::Combine(testing::Values("portable", "avx2", "avx512",
                                                          "avx512bf16"),
                                          testing::Values(Element::f32, Element::bf16)),
                         [](const auto& p) {
                           return std::string(std::get<0>(p.param)) +
                                  (std::get<1>(p.param) == Element::f32 ? "_f32" : "_bf16");
                         });

class EachF32 : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    omp_set_num_threads(1);  // one row at a time: waking a team would cost more than the work
    k = kernels_by_name(GetParam());
    if (!k) GTEST_SKIP() << "not run: no " << GetParam() << " on this processor";
  }
  const Kernels* k = nullptr;
};

TEST_P(EachF32, LogSoftmaxValuesEntropyAndGradient) {
  constexpr int vocab = 2500;
  const auto logits = random_floats(vocab, 17, 4.0f);
  const std::int32_t id = 1234;
  for (float t : {0.5f, 1.0f, 2.0f}) {
    double top = -1e300, sum = 0, entropy = 0;
    for (float z : logits) top = std::max(top, double{z} / t);
    for (float z : logits) sum += std::exp(z / t - top);
    std::vector<double> p, grad;
    for (float z : logits) p.push_back(std::exp(z / t - top) / sum);
    for (double q : p) entropy -= q > 0 ? q * std::log(q) : 0;
    for (int j = 0; j < vocab; ++j)
      grad.push_back((0.7 * ((j == id) - p[j]) - 0.3 * p[j] * (std::log(p[j]) + entropy)) / t);
    float lp, lse, h;
    k->log_softmax_gather(logits.data(), &id, t, &lp, &lse, &h, 1, vocab);
    EXPECT_NEAR(lp, std::log(p[id]), 1e-5);
    EXPECT_NEAR(lse, top + std::log(sum), 1e-5);
    EXPECT_NEAR(h, entropy, 1e-5);
    auto z = logits;
    const float d = 0.7f, dh = 0.3f;
    k->log_softmax_backward(z.data(), &id, t, &lse, &h, &d, &dh, 1, vocab);
    expect_near(z, grad, 1e-6);
  }
}

// Logits [2, 0], token 0 at three temperatures.
TEST_P(EachF32, TemperatureDividesTheLogits) {
  const float logits[2] = {2.0f, 0.0f};
  const std::int32_t id = 0;
  for (auto [t, want] : {std::pair{0.5f, -0.018150f}, {1.0f, -0.126928f}, {2.0f, -0.313262f}}) {
    float lp;
    k->log_softmax_gather(logits, &id, t, &lp, nullptr, nullptr, 1, 2);
    EXPECT_NEAR(lp, want, 1e-6);
  }
}

TEST_P(EachF32, ALogitThatIsNotFiniteShowsAsNan) {
  for (float bad : {NAN, INFINITY}) {
    auto logits = random_floats(100, 18);
    logits[97] = bad;
    const std::int32_t id = 3;
    float lp;
    k->log_softmax_gather(logits.data(), &id, 1.0f, &lp, nullptr, nullptr, 1, 100);
    EXPECT_TRUE(std::isnan(lp));
  }
}

TEST_P(EachF32, SamplesFollowTheDistributionAndCarryItsLogProbability) {
  constexpr int vocab = 1500, draws = 4000;
  std::vector<float> logits(vocab, -30.0f);
  const int ids[4] = {0, 1023, 1024, 1499};
  const double p[4] = {0.1, 0.2, 0.3, 0.4};
  for (int i = 0; i < 4; ++i) logits[ids[i]] = static_cast<float>(std::log(p[i]));
  int counts[4] = {};
  std::vector<float> rows;
  std::vector<SampleRow> params;
  for (int i = 0; i < draws; ++i)
    params.push_back(
        {.temperature = 1, .seed = 5, .sample_id = static_cast<std::uint64_t>(i), .position = 9});
  std::int32_t token;
  float lp, want;
  for (int i = 0; i < draws; ++i) {
    k->sample(logits.data(), vocab, &params[i], 1, &token, &lp);
    const auto* found = std::find(ids, ids + 4, token);
    ASSERT_NE(found, ids + 4);
    ++counts[found - ids];
    k->log_softmax_gather(logits.data(), &token, 1.0f, &want, nullptr, nullptr, 1, vocab);
    ASSERT_EQ(lp, want);
  }
  double chi = 0;
  for (int i = 0; i < 4; ++i) chi += std::pow(counts[i] - draws * p[i], 2) / (draws * p[i]);
  EXPECT_LT(chi, 16.27);  // 3 degrees of freedom, 0.1 %
}

TEST_P(EachF32, DrawsAreKeyedBySeedSamplePositionAndPurpose) {
  const auto logits = random_floats(300, 19, 0.01f);
  auto draw = [&](SampleRow row) {
    std::int32_t token;
    float lp;
    k->sample(logits.data(), 300, &row, 1, &token, &lp);
    return token;
  };
  const SampleRow row{.temperature = 1, .seed = 1, .sample_id = 2, .position = 3};
  const auto first = draw(row);
  EXPECT_EQ(first, draw(row));
  int differ = 0;
  for (auto change :
       {+[](SampleRow& r) { r.seed += 1; }, +[](SampleRow& r) { r.sample_id += 1; },
        +[](SampleRow& r) { r.position += 1; }, +[](SampleRow& r) { r.evaluation = true; }}) {
    SampleRow other = row;
    change(other);
    differ += draw(other) != first;
  }
  EXPECT_GE(differ, 3);
  SampleRow greedy = row;
  greedy.temperature = 0;
  EXPECT_EQ(draw(greedy), std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// Two steps of torch.optim.AdamW(lr 0.1, betas (0.9, 0.95), eps 1e-8, weight_decay 0.01) from
// parameter 1 with gradients 0.5 and -0.25.
TEST_P(EachF32, AdamWTakesTheStepsOfTorch) {
  float master = 1, m = 0, v = 0;
  for (auto [t, g, want] : {std::tuple{1, 0.5f, 0.899}, {2, -0.25f, 0.8712641}}) {
    AdamWStep step{.lr = 0.1f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.01f};
    step.bias_correction1 = static_cast<float>(1 - std::pow(0.9, t));
    step.bias_correction2 = static_cast<float>(1 - std::pow(0.95, t));
    k->adamw(step, &g, &master, &m, &v, 1);
    EXPECT_NEAR(master, want, 2e-6);
  }
}

TEST_P(EachF32, SumOfSquaresIsCutAtFixedChunks) {
  const auto x = random_floats(3 * kSumChunk + 11, 20);
  std::vector<double> whole(4), tail(2);
  k->sum_squares(x.data(), static_cast<std::int64_t>(x.size()), whole.data());
  k->sum_squares(x.data() + 2 * kSumChunk, kSumChunk + 11, tail.data());
  EXPECT_EQ(whole[2], tail[0]);
  EXPECT_EQ(whole[3], tail[1]);
  double want = 0;
  for (float f : x) want += double{f} * f;
  EXPECT_NEAR(whole[0] + whole[1] + whole[2] + whole[3], want, 1e-6);
}

INSTANTIATE_TEST_SUITE_P(Kernels, EachF32,
                         testing::Values("portable", "avx2", "avx512", "avx512bf16"),
                         [](const auto& p) { return std::string(p.param); });

TEST(Kernels, Avx512AndAvx2AgreeBitForBit) {
  const Kernels *a = kernels_by_name("avx2"), *b = kernels_by_name("avx512");
  if (!a || !b) GTEST_SKIP() << "not run: needs a processor with AVX-512";
  const auto x = random_floats(7 * 50, 21), w = random_floats(40 * 50, 22);
  const auto p = panels(*a, Element::f32, w, 40, 50);
  std::vector<float> ya(7 * 40), yb(7 * 40), la(7), lb(7);
  a->linear(Element::f32, x.data(), p.data(), nullptr, ya.data(), false, 7, 40, 50);
  b->linear(Element::f32, x.data(), p.data(), nullptr, yb.data(), false, 7, 40, 50);
  EXPECT_EQ(ya, yb);
  const std::int32_t ids[7] = {0, 1, 2, 3, 4, 5, 6};
  a->log_softmax_gather(ya.data(), ids, 1.0f, la.data(), nullptr, nullptr, 7, 40);
  b->log_softmax_gather(yb.data(), ids, 1.0f, lb.data(), nullptr, nullptr, 7, 40);
  EXPECT_EQ(la, lb);
}

TEST(Kernels, AnUnknownTableIsRefusedWithTheListOfThose) {
  try {
    select_kernels("sse9");
    FAIL();
  } catch (const std::invalid_argument& e) {
    EXPECT_NE(std::string(e.what()).find("portable"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace tandem
