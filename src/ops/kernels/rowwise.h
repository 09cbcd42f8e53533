// Row-wise kernels: RMS norm, rotary embedding, gated activation, conversions.
// A row is computed from itself alone, in sixteen lanes by column modulo 16 and one fixed tree.
// Arithmetic is f32 whatever the element type; results are rounded once, when stored.
#pragma once

#include <omp.h>

#include "ops/kernels/simd.h"

namespace tandem::TD_ISA {

template <class E>
void rms_norm(const void* x, const void* weight, float eps, float offset, void* y, float* rstd,
              std::int64_t rows, std::int64_t width) {
  const E* xe = static_cast<const E*>(x);
  const E* we = static_cast<const E*>(weight);
  E* ye = static_cast<E*>(y);
#pragma omp parallel for schedule(static)
  for (std::int64_t r = 0; r < rows; ++r) {
    const E* row = xe + r * width;
    V16 sum = zero();
    for (std::int64_t i = 0; i < width; i += 16) {
      const V16 v = load_tail(row + i, width - i);
      sum = fma(v, v, sum);
    }
    const float scale = 1.0f / std::sqrt(sum_lanes(sum) / static_cast<float>(width) + eps);
    if (rstd) rstd[r] = scale;
    for (std::int64_t i = 0; i < width; i += 16) {
      const V16 w = load_tail(we + i, width - i) + set1(offset);
      store_tail(ye + r * width + i, load_tail(row + i, width - i) * set1(scale) * w, width - i);
    }
  }
}

// dx = rstd·(g - x̂·mean(g·x̂)), g = dy·(weight + offset), x̂ = x·rstd.
template <class E>
void rms_norm_dx(const void* dy, const void* x, const void* weight, float offset, const float* rstd,
                 void* dx, std::int64_t rows, std::int64_t width) {
  const E* de = static_cast<const E*>(dy);
  const E* xe = static_cast<const E*>(x);
  const E* we = static_cast<const E*>(weight);
  E* out = static_cast<E*>(dx);
#pragma omp parallel for schedule(static)
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t base = r * width;
    const V16 scale = set1(rstd[r]);
    auto g = [&](std::int64_t i) {
      return load_tail(de + base + i, width - i) * (load_tail(we + i, width - i) + set1(offset));
    };
    V16 dot = zero();
    for (std::int64_t i = 0; i < width; i += 16)
      dot = fma(g(i), load_tail(xe + base + i, width - i) * scale, dot);
    const V16 mean = set1(sum_lanes(dot) / static_cast<float>(width));
    for (std::int64_t i = 0; i < width; i += 16) {
      const V16 hat = load_tail(xe + base + i, width - i) * scale;
      store_tail(out + base + i, (g(i) - hat * mean) * scale, width - i);
    }
  }
}

template <class E>
void rms_norm_dw(const void* dy, const void* x, const float* rstd, float* dw, std::int64_t rows,
                 std::int64_t width) {
  const E* de = static_cast<const E*>(dy);
  const E* xe = static_cast<const E*>(x);
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < width; i += 16) {
    V16 sum = zero();
    for (std::int64_t r = 0; r < rows; ++r)
      sum = fma(load_tail(de + r * width + i, width - i),
                load_tail(xe + r * width + i, width - i) * set1(rstd[r]), sum);
    store_tail(dw + i, load_tail(dw + i, width - i) + sum, width - i);
  }
}

// One head's pairs (2i, 2i + 1).
template <class E>
void rotate_neighbours(E* x, const float* cos, const float* sin, float sign, std::int64_t half) {
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]), s = sin[i] * sign;
    assign(x[2 * i], a * cos[i] - b * s);
    assign(x[2 * i + 1], b * cos[i] + a * s);
  }
}

template <class E>
void add_rows(const void* dy, const std::int32_t* ids, std::int64_t skipped_id, float* dw,
              std::int64_t rows, std::int64_t k) {
  const E* de = static_cast<const E*>(dy);
  for (std::int64_t r = 0; r < rows; ++r) {
    if (ids[r] == skipped_id) continue;
    float* g = dw + ids[r] * k;
    for (std::int64_t i = 0; i < k; i += 16)
      store_tail(g + i, load_tail(g + i, k - i) + load_tail(de + r * k + i, k - i), k - i);
  }
}

template <class E>
void rotary(void* x, std::int64_t row_stride, std::int64_t heads, std::int64_t head_dim,
            std::int64_t rotary_dim, bool interleaved, const std::int32_t* positions,
            const float* cos, const float* sin, int direction, std::int64_t rows) {
  E* xe = static_cast<E*>(x);
  const std::int64_t half = rotary_dim / 2;
  const V16 sign = set1(static_cast<float>(direction));
#pragma omp parallel for schedule(static)
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* c = cos + positions[r] * half;
    const float* s = sin + positions[r] * half;
    for (std::int64_t h = 0; h < heads; ++h) {
      E* low = xe + r * row_stride + h * head_dim;
      if (interleaved) {
        rotate_neighbours(low, c, s, static_cast<float>(direction), half);
        continue;
      }
      E* high = low + half;
      for (std::int64_t i = 0; i < half; i += 16) {
        const std::int64_t n = half - i;
        const V16 a = load_tail(low + i, n), b = load_tail(high + i, n);
        const V16 cv = load_tail(c + i, n), sv = load_tail(s + i, n) * sign;
        store_tail(low + i, a * cv - b * sv, n);
        store_tail(high + i, b * cv + a * sv, n);
      }
    }
  }
}

inline V16 sigmoid(V16 x) { return set1(1.0f) / (set1(1.0f) + exp(zero() - x)); }

// Both activations are x·sigmoid(z(x)): silu with z = x; the tanh form of GELU (Hendrycks & Gimpel
// 2016) with z = 2·sqrt(2/pi)·(x + 0.044715·x^3), since (1 + tanh u)/2 = sigmoid(2u).
struct Silu {
  static V16 z(V16 x) { return x; }
  static V16 dz(V16) { return set1(1.0f); }
};
struct GeluTanh {
  static constexpr float kScale = 1.5957691216057308f, kCubic = 0.044715f;
  static V16 z(V16 x) { return set1(kScale) * (x + set1(kCubic) * x * x * x); }
  static V16 dz(V16 x) { return set1(kScale) * (set1(1.0f) + set1(3.0f * kCubic) * x * x); }
};

template <class E, class Act>
void gate_mul_of(const void* x, void* y, std::int64_t rows, std::int64_t width) {
  const E* xe = static_cast<const E*>(x);
  E* ye = static_cast<E*>(y);
#pragma omp parallel for schedule(static)
  for (std::int64_t r = 0; r < rows; ++r) {
    const E* gate = xe + r * 2 * width;
    for (std::int64_t i = 0; i < width; i += 16) {
      const V16 g = load_tail(gate + i, width - i), u = load_tail(gate + width + i, width - i);
      store_tail(ye + r * width + i, g * sigmoid(Act::z(g)) * u, width - i);
    }
  }
}

template <class E, class Act>
void gate_mul_dx_of(const void* dy, const void* x, void* dx, std::int64_t rows,
                    std::int64_t width) {
  const E* de = static_cast<const E*>(dy);
  const E* xe = static_cast<const E*>(x);
  E* out = static_cast<E*>(dx);
#pragma omp parallel for schedule(static)
  for (std::int64_t r = 0; r < rows; ++r) {
    const E* gate = xe + r * 2 * width;
    E* d_gate = out + r * 2 * width;
    for (std::int64_t i = 0; i < width; i += 16) {
      const std::int64_t n = width - i;
      const V16 g = load_tail(gate + i, n), u = load_tail(gate + width + i, n);
      const V16 d = load_tail(de + r * width + i, n), s = sigmoid(Act::z(g)), act = g * s;
      store_tail(d_gate + i, d * u * (s + act * (set1(1.0f) - s) * Act::dz(g)), n);
      store_tail(d_gate + width + i, d * act, n);
    }
  }
}

template <class E>
void gate_mul(Activation activation, const void* x, void* y, std::int64_t rows,
              std::int64_t width) {
  switch (activation) {
    case Activation::silu:
      return gate_mul_of<E, Silu>(x, y, rows, width);
    case Activation::gelu_tanh:
      return gate_mul_of<E, GeluTanh>(x, y, rows, width);
  }
}

template <class E>
void gate_mul_dx(Activation activation, const void* dy, const void* x, void* dx, std::int64_t rows,
                 std::int64_t width) {
  switch (activation) {
    case Activation::silu:
      return gate_mul_dx_of<E, Silu>(dy, x, dx, rows, width);
    case Activation::gelu_tanh:
      return gate_mul_dx_of<E, GeluTanh>(dy, x, dx, rows, width);
  }
}

inline void to_f32(const bf16* x, float* y, std::int64_t count) {
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < count; i += 16)
    store_tail(y + i, load_tail(x + i, count - i), count - i);
}

inline void to_bf16(const float* x, bf16* y, std::int64_t count) {
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < count; i += 16)
    store_tail(y + i, load_tail(x + i, count - i), count - i);
}

}  // namespace tandem::TD_ISA
