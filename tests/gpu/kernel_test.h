// What the tests of the CUDA kernels share: values rounded to the element type, comparisons with
// references in double by the norm of the difference, weights on the GPU, and the fixture that runs
// a test in f32 and in bf16.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "gpu/gpu.h"
#include "ops/functions.h"

namespace tandem {

inline at::Device gpu() { return device_of(Place::cuda); }

// Random values, rounded to the element type, on the CPU in double.
inline at::Tensor values(at::IntArrayRef shape, Element e, double scale = 1.0) {
  return (at::randn(shape) * scale).to(scalar_type(e)).to(at::kDouble);
}
inline at::Tensor on_gpu(const at::Tensor& x, Element e) { return x.to(scalar_type(e)).to(gpu()); }
inline at::Tensor back(const at::Tensor& x) { return x.to(at::kCPU).to(at::kDouble); }

inline double difference(const at::Tensor& got, const at::Tensor& want) {
  const double norm = want.norm().item<double>();
  return (got - want).norm().item<double>() / (norm > 0 ? norm : 1.0);
}
inline double tolerance(Element e) { return e == Element::f32 ? 3e-6 : 6e-3; }

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

// f32 must agree to rounding, bf16 as its 8 bits let it.
class InBothElements : public testing::TestWithParam<Element> {
 protected:
  void SetUp() override {
    TD_NEED_GPU();
    at::manual_seed(1);
    e = GetParam();
  }
  Element e = Element::f32;
};

inline std::string element_name(const testing::TestParamInfo<Element>& p) {
  return p.param == Element::f32 ? "f32" : "bf16";
}

}  // namespace tandem
