// Hopper's asynchronous instructions, one function each: barriers in shared memory, bulk tensor
// copies that complete on them, and products of a warpgroup over tiles in shared memory.
// Names and operands follow the PTX ISA 9.0.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

namespace tandem::cuda {

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// mbarrier
__device__ inline void init_barrier(std::uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals));
}
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
__device__ inline void arrive_expecting(std::uint64_t* barrier, std::uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ inline void wait_for(std::uint64_t* barrier, std::uint32_t parity) {
  std::uint32_t done = 0;
  while (!done)
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
}

// Where a ring of slots stands: the slot and the parity of the barriers' phase.
struct RingPlace {
  int slot = 0;
  std::uint32_t parity = 0;
  __device__ void advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// What is read once leaves the L2 cache first.
__device__ inline std::uint64_t evict_first() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline std::uint64_t evict_last() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// The box at (column, row) of a matrix, to shared memory.
__device__ inline void copy_box(void* to, const CUtensorMap* map, int column, int row,
                                std::uint64_t* barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Rows of 128 bytes in shared memory as such a copy lays them with CU_TENSOR_MAP_SWIZZLE_128B: the
// operand of a warpgroup's product, eight rows 1,024 bytes apart.
__device__ inline std::uint64_t swizzled_rows(std::uint32_t address) {
  constexpr std::uint32_t kHigh = (1024 >> 4) | (1u << 30), kLow = 1u << 16;
  return (std::uint64_t{kHigh} << 32) | (address >> 4) | kLow;
}

__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_end() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kLeft>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

#define TD_ACC(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
// sum[64, 8·kEights] += a[64, 16]·b[8·kEights, 16]ᵀ. Thread t holds, of sum, elements 2(t%4) and
// the next of the eight columns j at rows 16(t/32) + t%32/4 in sum[j][0, 1], and eight rows below
// in sum[j][2, 3].
template <int kEights>
__device__ inline void multiply_add(float (*c)[4], std::uint64_t a, std::uint64_t b) {
  if constexpr (kEights == 2)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, "
        "%7}, %8, %9, 1, 1, 1, 0, 0;"
        : TD_ACC(0), TD_ACC(1)
        : "l"(a), "l"(b));
  else if constexpr (kEights == 3)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, "
        "%7, %8, %9, %10, %11}, %12, %13, 1, 1, 1, 0, 0;"
        : TD_ACC(0), TD_ACC(1), TD_ACC(2)
        : "l"(a), "l"(b));
  else if constexpr (kEights == 4)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, "
        "%7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, 1, 1, 1, 0, 0;"
        : TD_ACC(0), TD_ACC(1), TD_ACC(2), TD_ACC(3)
        : "l"(a), "l"(b));
  else if constexpr (kEights == 5)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n40k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, "
        "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19}, %20, %21, 1, 1, 1, 0, "
        "0;"
        : TD_ACC(0), TD_ACC(1), TD_ACC(2), TD_ACC(3), TD_ACC(4)
        : "l"(a), "l"(b));
  else if constexpr (kEights == 6)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, "
        "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, "
        "%24, %25, 1, 1, 1, 0, 0;"
        : TD_ACC(0), TD_ACC(1), TD_ACC(2), TD_ACC(3), TD_ACC(4), TD_ACC(5)
        : "l"(a), "l"(b));
  else if constexpr (kEights == 8)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, "
        "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, 1, 1, 1, 0, 0;"
        : TD_ACC(0), TD_ACC(1), TD_ACC(2), TD_ACC(3), TD_ACC(4), TD_ACC(5), TD_ACC(6), TD_ACC(7)
        : "l"(a), "l"(b));
  else if constexpr (kEights == 10)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, "
        "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39}, "
        "%40, %41, 1, 1, 1, 0, 0;"
        : TD_ACC(0), TD_ACC(1), TD_ACC(2), TD_ACC(3), TD_ACC(4), TD_ACC(5), TD_ACC(6), TD_ACC(7),
          TD_ACC(8), TD_ACC(9)
        : "l"(a), "l"(b));
  else if constexpr (kEights == 12)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, "
        "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, "
        "%41, %42, %43, %44, %45, %46, %47}, %48, %49, 1, 1, 1, 0, 0;"
        : TD_ACC(0), TD_ACC(1), TD_ACC(2), TD_ACC(3), TD_ACC(4), TD_ACC(5), TD_ACC(6), TD_ACC(7),
          TD_ACC(8), TD_ACC(9), TD_ACC(10), TD_ACC(11)
        : "l"(a), "l"(b));
  else if constexpr (kEights == 20)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n160k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, "
        "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, "
        "%41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, "
        "%58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, "
        "%75, %76, %77, %78, %79}, %80, %81, 1, 1, 1, 0, 0;"
        : TD_ACC(0), TD_ACC(1), TD_ACC(2), TD_ACC(3), TD_ACC(4), TD_ACC(5), TD_ACC(6), TD_ACC(7),
          TD_ACC(8), TD_ACC(9), TD_ACC(10), TD_ACC(11), TD_ACC(12), TD_ACC(13), TD_ACC(14),
          TD_ACC(15), TD_ACC(16), TD_ACC(17), TD_ACC(18), TD_ACC(19)
        : "l"(a), "l"(b));
  else
    static_assert(kEights == 0, "no product of this width");
}
#undef TD_ACC

// Clusters
__device__ inline int cluster_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
}
// Two floats at the same place of another block's shared memory.
__device__ inline float2 read_peer(const void* mine, int rank) {
  std::uint32_t there;
  float2 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"(shared_address(mine)), "r"(rank));
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(v.x), "=f"(v.y)
               : "r"(there)
               : "memory");
  return v;
}

}  // namespace tandem::cuda
