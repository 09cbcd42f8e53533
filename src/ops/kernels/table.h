// Fills one `Kernels` table from the templates compiled for TD_ISA. Included once by each
// kernels_<isa>.cpp, after it has defined TD_ISA.
#pragma once

#include "ops/kernels/attention.h"
#include "ops/kernels/checksum.h"
#include "ops/kernels/gemm.h"
#include "ops/kernels/kernels.h"
#include "ops/kernels/optimizer.h"
#include "ops/kernels/rowwise.h"
#include "ops/kernels/softmax.h"

namespace tandem::TD_ISA {

// One entry for both element types: Pick<&f<float>, &f<bf16>>::call(Element, args...).
template <auto F, auto B>
struct Pick;
template <class... A, void (*F)(A...), void (*B)(A...)>
struct Pick<F, B> {
  static void call(Element e, A... a) { e == Element::f32 ? F(a...) : B(a...); }
};
#define TD_PICK(f) Pick<&f<float>, &f<bf16>>::call

constexpr Kernels make_table(const char* name) {
  return {.name = name,
          .place = Place::cpu,
          .linear = TD_PICK(linear),
          .linear_dx = TD_PICK(linear_dx),
          .linear_dw = TD_PICK(linear_dw),
          .bias_dw = TD_PICK(bias_dw),
          .write_panels = TD_PICK(write_panels),
          .read_panels = TD_PICK(read_panels),
          .gather_rows = TD_PICK(gather_rows),
          .add_rows = TD_PICK(add_rows),
          .rms_norm = TD_PICK(rms_norm),
          .rms_norm_dx = TD_PICK(rms_norm_dx),
          .rms_norm_dw = TD_PICK(rms_norm_dw),
          .rotary = TD_PICK(rotary),
          .gate_mul = TD_PICK(gate_mul),
          .gate_mul_dx = TD_PICK(gate_mul_dx),
          .to_f32 = &to_f32,
          .to_bf16 = &to_bf16,
          .write_kv = TD_PICK(write_kv),
          .attention = TD_PICK(attention),
          .attention_backward = TD_PICK(attention_backward),
          .log_softmax_gather = &log_softmax_gather,
          .log_softmax_backward = &log_softmax_backward,
          .sample = &sample,
          .checksum_panels = TD_PICK(checksum_panels),
          .checksum_flat = TD_PICK(checksum_flat),
          .copy_panels = TD_PICK(copy_panels),
          .sum_squares = &sum_squares,
          .add_f32 = &add_f32,
          .copy_f32 = &copy_f32,
          .adamw = &adamw};
}
#undef TD_PICK

}  // namespace tandem::TD_ISA
