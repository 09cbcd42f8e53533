// The gated activations. Both are x·sigmoid(z(x)), as on the CPU (kernels/rowwise.h).
#pragma once

#include "ops/kernels/kernels.h"

namespace tandem::cuda {

// What bf16 keeps of it the fast exponential gives too.
template <class E>
__device__ inline float sigmoid(float x) {
  if constexpr (sizeof(E) == 4) return 1.0f / (1.0f + expf(-x));
  return 1.0f / (1.0f + __expf(-x));
}

struct Silu {
  __device__ static float z(float x) { return x; }
  __device__ static float dz(float) { return 1.0f; }
};
struct GeluTanh {
  static constexpr float kScale = 1.5957691216057308f, kCubic = 0.044715f;
  __device__ static float z(float x) { return kScale * (x + kCubic * x * x * x); }
  __device__ static float dz(float x) { return kScale * (1.0f + 3.0f * kCubic * x * x); }
};
template <class E, class Act>
__device__ inline float gated(float gate, float up) {
  return gate * sigmoid<E>(Act::z(gate)) * up;
}
template <class F>
void with_activation(Activation activation, F&& f) {
  activation == Activation::silu ? f(Silu{}) : f(GeluTanh{});
}

}  // namespace tandem::cuda
