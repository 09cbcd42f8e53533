// Training attention through the FlashAttention-2 kernels in libtorch_cuda (Dao 2023), variable
// lengths packed. Where every segment's keys are its own rows, queries, keys and values are views
// of the qkv rows; with shared prompts keys and values are gathered first. A segment whose rows
// begin later than its keys is what the kernels call bottom-right causal.
#include <ATen/ATen.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>

#include <algorithm>

#include "ops/cuda/attention.h"

namespace tandem::cuda {
namespace {

at::TensorOptions options(at::ScalarType type) {
  return at::dtype(type).device(at::kCUDA, at::DeviceIndex(-1));
}

// The call's tensors over memory that others own.
struct Views {
  Views(const AttentionShape& s, const AttentionPlan& plan, const void* qkv_data)
      : qkv(at::from_blob(const_cast<void*>(qkv_data),
                          {plan.rows, s.num_heads + 2 * s.num_kv_heads, s.head_dim},
                          options(at::kBFloat16))),
        q(qkv.narrow(1, 0, s.num_heads)) {
    const std::int64_t n = s.num_kv_heads;
    if (plan.own_rows) {
      k = qkv.narrow(1, s.num_heads, n);
      v = qkv.narrow(1, s.num_heads + n, n);
    } else {
      const auto both = at::empty({plan.total_keys, 2 * n, s.head_dim}, qkv.options());
      gather_keys(s, plan, qkv_data, both.data_ptr());
      k = both.narrow(1, 0, n);
      v = both.narrow(1, n, n);
    }
    cum_rows = at::from_blob(const_cast<std::int32_t*>(plan.cum_rows), {plan.num_segments + 1},
                             options(at::kInt));
    cum_keys = at::from_blob(const_cast<std::int32_t*>(plan.cum_keys), {plan.num_segments + 1},
                             options(at::kInt));
    // A call of single rows would be laid out differently (the kernels swap rows and head groups).
    max_rows = std::max<std::int64_t>(plan.max_rows, 2);
    if (s.window > 0) {
      left = s.window - 1;
      right = 0;
    }
  }
  at::Tensor qkv, q, k, v, cum_rows, cum_keys;
  std::int64_t max_rows = 0;
  std::optional<std::int64_t> left, right;
};

at::Tensor heads_of(const void* data, const AttentionShape& s, const AttentionPlan& plan) {
  return at::from_blob(const_cast<void*>(data), {plan.rows, s.num_heads, s.head_dim},
                       options(at::kBFloat16));
}
at::Tensor lse_of(const float* data, const AttentionShape& s, const AttentionPlan& plan) {
  return at::from_blob(const_cast<float*>(data), {s.num_heads, plan.rows}, options(at::kFloat));
}

}  // namespace

bool flash_takes(Element e, const AttentionShape& s, const AttentionPlan& plan) {
  return e == Element::bf16 && s.head_dim % 8 == 0 && s.head_dim <= 256 && plan.from_rows;
}

void flash_attention(const AttentionShape& s, const AttentionPlan& plan, const void* qkv, void* out,
                     float* log_sum_exp) {
  const Views x(s, plan, qkv);
  const auto result =
      at::_flash_attention_forward(x.q, x.k, x.v, x.cum_rows, x.cum_keys, x.max_rows, plan.max_keys,
                                   0.0, true, false, static_cast<double>(s.scale), x.left, x.right);
  heads_of(out, s, plan).copy_(std::get<0>(result));
  if (log_sum_exp) lse_of(log_sum_exp, s, plan).copy_(std::get<1>(result));
}

void flash_attention_backward(const AttentionShape& s, const AttentionPlan& plan, const void* qkv,
                              const void* out, const void* dout, const float* log_sum_exp,
                              void* dqkv) {
  const Views x(s, plan, qkv);
  // Without dropout the generator's state is not read.
  const auto state = at::zeros({2}, options(at::kLong)).view(at::kUInt64);
  const auto [dq, dk, dv] = at::_flash_attention_backward(
      heads_of(dout, s, plan), x.q, x.k, x.v, heads_of(out, s, plan), lse_of(log_sum_exp, s, plan),
      x.cum_rows, x.cum_keys, x.max_rows, plan.max_keys, 0.0, true, state,
      at::empty({}, state.options()), static_cast<double>(s.scale), x.left, x.right);
  const auto to = at::from_blob(dqkv, x.qkv.sizes(), x.qkv.options());
  to.narrow(1, 0, s.num_heads).copy_(dq);
  if (plan.own_rows) {
    to.narrow(1, s.num_heads, s.num_kv_heads).copy_(dk);
    to.narrow(1, s.num_heads + s.num_kv_heads, s.num_kv_heads).copy_(dv);
  } else {
    const auto keys = dk.contiguous(), values = dv.contiguous();
    add_key_gradients(s, plan, keys.data_ptr(), values.data_ptr(), dqkv);
  }
}

}  // namespace tandem::cuda
