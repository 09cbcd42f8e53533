// The kernels compiled for avx512bf16 (CMake sets the compiler flags by this file's name): those of
// avx512, the bf16 products by pair dot products.
#define TD_ISA isa_avx512bf16
#include "ops/kernels/gemm_dpbf16.h"
#include "ops/kernels/table.h"

namespace tandem {
namespace TD_ISA {

void linear_of(Element e, const void* x, const void* w, const void* bias, void* y, bool y_is_f32,
               std::int64_t rows, std::int64_t n, std::int64_t k) {
  e == Element::f32 ? linear<float>(x, w, bias, y, y_is_f32, rows, n, k)
                    : linear_pairs(x, w, bias, y, y_is_f32, rows, n, k);
}

void linear_dx_of(Element e, const void* dy, bool dy_is_f32, const void* w, void* dx,
                  std::int64_t rows, std::int64_t n, std::int64_t k) {
  e == Element::f32 ? linear_dx<float>(dy, dy_is_f32, w, dx, rows, n, k)
                    : linear_dx_pairs(dy, dy_is_f32, w, dx, rows, n, k);
}

void linear_dw_of(Element e, const void* dy, bool dy_is_f32, const void* x, float* dw,
                  bool accumulate, std::int64_t rows, std::int64_t n, std::int64_t k) {
  e == Element::f32 ? linear_dw<float>(dy, dy_is_f32, x, dw, accumulate, rows, n, k)
                    : linear_dw_pairs(dy, dy_is_f32, x, dw, accumulate, rows, n, k);
}

constexpr Kernels with_pairs(Kernels table) {
  table.linear = &linear_of;
  table.linear_dx = &linear_dx_of;
  table.linear_dw = &linear_dw_of;
  return table;
}

}  // namespace TD_ISA

extern const Kernels kernels_avx512bf16;
constinit const Kernels kernels_avx512bf16 = TD_ISA::with_pairs(TD_ISA::make_table("avx512bf16"));

}  // namespace tandem
