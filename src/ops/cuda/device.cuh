// What every kernel shares on the device side: elements as floats, singly and eight at a time,
// sums over a warp and over a group of warps in a fixed tree, and the choice of the element type.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "ops/cuda/device.h"
#include "ops/kernels/kernels.h"

namespace tandem::cuda {

using bf16_t = __nv_bfloat16;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16_t x) { return __bfloat162float(x); }
template <class E>
__device__ inline E from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline bf16_t from_float<bf16_t>(float x) {
  return __float2bfloat16_rn(x);
}

// N consecutive elements; N > 1 wants an address that is a multiple of their size, 16 bytes at most
// in one access.
template <class E, int N>
struct alignas(sizeof(E) * N > 16 ? 16 : sizeof(E) * N) Pack {
  E e[N];
};
template <int N, class E>
__device__ inline void load(const E* from, float (&to)[N]) {
  const auto p = *reinterpret_cast<const Pack<E, N>*>(from);
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = to_float(p.e[i]);
}
template <int N, class E>
__device__ inline void store(E* to, const float (&from)[N]) {
  Pack<E, N> p;
#pragma unroll
  for (int i = 0; i < N; ++i) p.e[i] = from_float<E>(from[i]);
  *reinterpret_cast<Pack<E, N>*>(to) = p;
}

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d >= 1; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
  return x;
}
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int d = 16; d >= 1; d /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
  return x;
}

// The sum over the kWarps warps of a group of threads, in every thread; `shared` is the group's own
// kWarps floats. All threads of the block call it.
template <int kWarps>
__device__ inline float group_sum(float x, float* shared) {
  x = warp_sum(x);
  if constexpr (kWarps == 1) return x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kWarps;
  __syncthreads();
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += shared[i];
  return sum;
}

// Kernels of a forward step begin while those before them still run (programmatic dependent
// launch). Launched by `chained`, a kernel calls next_may_start() at once, and previous_done(), in
// every thread that goes on, before it reads what others wrote or writes what others read: that
// waits for the whole of the kernel before, which waited for its own, so all of the chain is done.
// What runs before previous_done() may overlap the whole chain, back to the last copy or ordinary
// kernel; a copy of the plan lies between any write of weights and a forward step, so weights and
// the plan alone may be read there.
__device__ inline void previous_done() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void next_may_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
template <class... P, class... A>
void chained(void (*kernel)(P...), std::int64_t blocks, int threads, A... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream();
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...));
}

// Of pieces whose tiles follow each other, the one of this block: the last that begins at its tile
// or before it.
__device__ inline int find_piece(const std::int32_t* tiles_begin, int num_pieces) {
  int low = 0, high = num_pieces;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (tiles_begin[middle] <= static_cast<std::int32_t>(blockIdx.x) ? low : high) = middle;
  }
  return low;
}

// A pair of rotary embedding turned; the products' roundings are written out, so that every kernel
// that turns gives the same bits.
__device__ inline void turn(float& low, float& high, float cos, float sin) {
  const float a = low, b = high;
  low = __fmaf_rn(a, cos, -__fmul_rn(b, sin));
  high = __fmaf_rn(b, cos, __fmul_rn(a, sin));
}

// Calls f(E{}) with the element type.
template <class F>
void with_element(Element e, F&& f) {
  if (e == Element::f32)
    f(float{});
  else
    f(bf16_t{});
}
inline bool aligned16(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

// Calls f(integral constant N): elements of E an access, by width and alignment of all rows.
template <class E, class F>
void with_pack(std::int64_t width, std::initializer_list<const void*> rows, F&& f) {
  constexpr int kWide = 16 / sizeof(E);
  bool wide = width % kWide == 0;
  for (const void* p : rows) wide = wide && aligned16(p);
  if (wide)
    f(std::integral_constant<int, kWide>{});
  else
    f(std::integral_constant<int, 1>{});
}

}  // namespace tandem::cuda
