// Shape checks and autograd around the kernels of the place where the tensors lie. Each Function
// keeps pointers to weight views and call descriptions that its caller owns until backward is done.
#include "ops/functions.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <vector>

#include "base/check.h"

namespace tandem {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

Element element_of(const at::Tensor& x) {
  TD_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
           "activation: dtype {} found, float32 or bfloat16 wanted", at::toString(x.scalar_type()));
  return x.scalar_type() == at::kFloat ? Element::f32 : Element::bf16;
}

at::ScalarType scalar_type(Element e) { return e == Element::f32 ? at::kFloat : at::kBFloat16; }

Place place_of(const at::Tensor& x) { return x.is_cuda() ? Place::cuda : Place::cpu; }

namespace {

void check_rows(const char* op, const at::Tensor& x, std::int64_t width) {
  TD_CHECK(x.dim() == 2 && x.size(1) == width && x.is_contiguous(),
           "{}: a contiguous tensor [rows, {}] wanted, found {} dimensions, last {}", op, width,
           x.dim(), x.dim() > 0 ? x.size(-1) : 0);
}

void check_rows(const WeightView& w, const at::Tensor& x) {
  check_rows(w.name, x, w.cols);
  TD_CHECK(place_of(x) == w.place, "{}: the activation lies on {}, the weight on another device",
           w.name, x.device().str());
}

const Kernels& kernels_of(const at::Tensor& x) { return kernels(place_of(x)); }
at::TensorOptions f32_like(const at::Tensor& x) { return at::dtype(at::kFloat).device(x.device()); }

at::Tensor empty_rows(const at::Tensor& like, std::int64_t rows, std::int64_t width) {
  return at::empty({rows, width}, like.options().requires_grad(false));
}

std::int64_t address(const void* p) { return reinterpret_cast<std::int64_t>(p); }
template <class T>
const T* pointer(const AutogradContext* ctx, const char* key) {
  return reinterpret_cast<const T*>(ctx->saved_data.at(key).toInt());
}

void remember(AutogradContext* ctx, const WeightView& w) {
  ctx->saved_data["weight"] = address(&w);
  ctx->saved_data["version"] = version_of(w);
}
const WeightView& recall(AutogradContext* ctx) {
  const auto& w = *pointer<WeightView>(ctx, "weight");
  check_version(w, ctx->saved_data.at("version").toInt());
  return w;
}

// The gradient buffer of a weight that adds into it: zeroed first if its content is old.
float* added_grad(const WeightView& w) {
  if (w.fresh) zero_memory(w.place, w.grad, w.rows * w.cols * 4);
  w.fresh = false;
  return w.grad;
}
void matrix_grad(const WeightView& w, const at::Tensor& dy, bool dy_is_f32, const at::Tensor& x) {
  if (!w.grad) return;
  kernels(w.place).linear_dw(w.element, dy.data_ptr(), dy_is_f32, x.data_ptr(), w.grad, !w.fresh,
                             x.size(0), w.rows, w.cols);
  w.fresh = false;
}

// A tensor that requires a gradient, so that the first operation of a graph is recorded.
at::Tensor anchor() { return at::zeros({1}).requires_grad_(true); }

struct Embedding : Function<Embedding> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor&, const at::Tensor& ids,
                            const WeightView* w, std::int64_t padding_id) {
    remember(ctx, *w);
    ctx->saved_data["padding_id"] = padding_id;
    ctx->save_for_backward({ids});
    auto y = at::empty({ids.size(0), w->cols}, ids.options().dtype(scalar_type(w->element)));
    kernels(w->place).gather_rows(w->element, w->data, w->cols, ids.data_ptr<std::int32_t>(),
                                  ids.size(0), y.data_ptr());
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const WeightView& w = recall(ctx);
    if (w.grad) {
      const auto ids = ctx->get_saved_variables()[0];
      const auto dy = grads[0].contiguous();
      kernels(w.place).add_rows(w.element, dy.data_ptr(), ids.data_ptr<std::int32_t>(),
                                ctx->saved_data.at("padding_id").toInt(), added_grad(w),
                                ids.size(0), w.cols);
    }
    return {at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

// y = x·Wᵀ + bias: exact mode on a GPU takes a part of a matrix as it would take the whole.
void multiply(const at::Tensor& x, const WeightView& w, const void* bias, const at::Tensor& y,
              bool y_is_f32) {
  if (w.place == Place::cuda && w.whole_rows > 0)
    cuda_part().linear_cut(w.element, x.data_ptr(), w.data, bias, y.data_ptr(), y_is_f32, x.size(0),
                           w.rows, w.cols, w.whole_rows);
  else
    kernels(w.place).linear(w.element, x.data_ptr(), w.data, bias, y.data_ptr(), y_is_f32,
                            x.size(0), w.rows, w.cols);
}

struct Linear : Function<Linear> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const WeightView* w,
                            const WeightView* bias) {
    remember(ctx, *w);
    ctx->saved_data["bias"] = address(bias);
    ctx->save_for_backward({x});
    auto y = empty_rows(x, x.size(0), w->rows);
    multiply(x, *w, bias ? bias->data : nullptr, y, false);
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const WeightView& w = recall(ctx);
    const auto* bias = pointer<WeightView>(ctx, "bias");
    const auto x = ctx->get_saved_variables()[0];
    const auto dy = grads[0].contiguous();
    auto dx = empty_rows(x, x.size(0), w.cols);
    kernels(w.place).linear_dx(w.element, dy.data_ptr(), false, w.data, dx.data_ptr(), x.size(0),
                               w.rows, w.cols);
    matrix_grad(w, dy, false, x);
    if (bias && bias->grad)
      kernels(w.place).bias_dw(w.element, dy.data_ptr(), added_grad(*bias), x.size(0), w.rows);
    return {dx, at::Tensor(), at::Tensor()};
  }
};

struct RmsNorm : Function<RmsNorm> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const WeightView* w,
                            double eps, double offset) {
    remember(ctx, *w);
    ctx->saved_data["offset"] = offset;
    auto y = at::empty_like(x, x.options().requires_grad(false));
    auto rstd = at::empty({x.size(0)}, f32_like(x));
    kernels(w->place).rms_norm(w->element, x.data_ptr(), w->data, static_cast<float>(eps),
                               static_cast<float>(offset), y.data_ptr(), rstd.data_ptr<float>(),
                               x.size(0), w->cols);
    ctx->save_for_backward({x, rstd});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const WeightView& w = recall(ctx);
    const auto saved = ctx->get_saved_variables();
    const auto dy = grads[0].contiguous();
    auto dx = at::empty_like(saved[0], saved[0].options().requires_grad(false));
    const float* rstd = saved[1].data_ptr<float>();
    const Kernels& k = kernels(w.place);
    k.rms_norm_dx(w.element, dy.data_ptr(), saved[0].data_ptr(), w.data,
                  static_cast<float>(ctx->saved_data.at("offset").toDouble()), rstd, dx.data_ptr(),
                  dy.size(0), w.cols);
    if (w.grad)
      k.rms_norm_dw(w.element, dy.data_ptr(), saved[0].data_ptr(), rstd, added_grad(w), dy.size(0),
                    w.cols);
    return {dx, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

struct AddRmsNorm : Function<AddRmsNorm> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& delta,
                               const WeightView* w, double eps, double offset) {
    remember(ctx, *w);
    ctx->saved_data["offset"] = offset;
    auto y = at::empty_like(x, x.options().requires_grad(false));
    auto rstd = at::empty({x.size(0)}, f32_like(x));
    at::Tensor sum;
    if (x.is_cuda()) {
      sum = at::empty_like(y);
      cuda_part().add_rms_norm(w->element, x.data_ptr(), delta.data_ptr(), w->data,
                               static_cast<float>(eps), static_cast<float>(offset), sum.data_ptr(),
                               y.data_ptr(), rstd.data_ptr<float>(), x.size(0), w->cols);
    } else {
      sum = x + delta;
      kernels().rms_norm(w->element, sum.data_ptr(), w->data, static_cast<float>(eps),
                         static_cast<float>(offset), y.data_ptr(), rstd.data_ptr<float>(),
                         x.size(0), w->cols);
    }
    ctx->save_for_backward({sum, rstd});
    return {sum, y};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const WeightView& w = recall(ctx);
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& sum = saved[0];
    const float* rstd = saved[1].data_ptr<float>();
    const auto offset = static_cast<float>(ctx->saved_data.at("offset").toDouble());
    // The last norm's sum has no other reader.
    const auto d_sum = grads[0].defined() ? grads[0].contiguous() : at::zeros_like(sum);
    if (!grads[1].defined()) return {d_sum, d_sum, at::Tensor(), at::Tensor(), at::Tensor()};
    const auto dy = grads[1].contiguous();
    auto dx = at::empty_like(sum, sum.options().requires_grad(false));
    if (sum.is_cuda()) {
      cuda_part().add_rms_norm_dx(w.element, dy.data_ptr(), d_sum.data_ptr(), sum.data_ptr(),
                                  w.data, offset, rstd, dx.data_ptr(), dy.size(0), w.cols);
    } else {
      kernels().rms_norm_dx(w.element, dy.data_ptr(), sum.data_ptr(), w.data, offset, rstd,
                            dx.data_ptr(), dy.size(0), w.cols);
      dx += d_sum;
    }
    if (w.grad)
      kernels(w.place).rms_norm_dw(w.element, dy.data_ptr(), sum.data_ptr(), rstd, added_grad(w),
                                   dy.size(0), w.cols);
    return {dx, dx, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

// On a GPU; see norm_heads.
struct NormHeads : Function<NormHeads> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& qkv,
                            const AttentionShape* shape, const WeightView* q, const WeightView* k,
                            double eps, double offset) {
    remember(ctx, *q);
    ctx->saved_data["k_weight"] = address(k);
    ctx->saved_data["shape"] = address(shape);
    ctx->saved_data["offset"] = offset;
    auto y = at::empty_like(qkv, qkv.options().requires_grad(false));
    auto rstd = at::empty({qkv.size(0), shape->num_heads + shape->num_kv_heads}, f32_like(qkv));
    cuda_part().norm_heads(q->element, *shape, qkv.data_ptr(), q->data, k->data,
                           static_cast<float>(eps), static_cast<float>(offset), y.data_ptr(),
                           rstd.data_ptr<float>(), qkv.size(0));
    ctx->save_for_backward({qkv, rstd});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const WeightView &q = recall(ctx), &k = *pointer<WeightView>(ctx, "k_weight");
    const auto& shape = *pointer<AttentionShape>(ctx, "shape");
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& qkv = saved[0];
    const float* rstd = saved[1].data_ptr<float>();
    const auto dy = grads[0].contiguous();
    auto dx = at::empty_like(qkv, qkv.options().requires_grad(false));
    cuda_part().norm_heads_dx(q.element, shape, dy.data_ptr(), qkv.data_ptr(), q.data, k.data,
                              static_cast<float>(ctx->saved_data.at("offset").toDouble()), rstd,
                              dx.data_ptr(), qkv.size(0));
    for (const bool keys : {false, true}) {
      const WeightView& w = keys ? k : q;
      if (w.grad)
        cuda_part().norm_heads_dw(w.element, shape, dy.data_ptr(), qkv.data_ptr(), rstd, keys,
                                  added_grad(w), qkv.size(0));
    }
    return {dx, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

struct Rotary : Function<Rotary> {
  static void rotate(const at::Tensor& x, const AttentionShape& s, const at::Tensor& positions,
                     const RopeTable& table, int direction) {
    kernels_of(x).rotary(element_of(x), x.data_ptr(), s.qkv_width(), s.num_heads + s.num_kv_heads,
                         s.head_dim, 2 * table.cos.size(1), table.interleaved,
                         positions.data_ptr<std::int32_t>(), table.cos.data_ptr<float>(),
                         table.sin.data_ptr<float>(), direction, x.size(0));
  }
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& qkv,
                            const AttentionShape* shape, const at::Tensor& positions,
                            const RopeTable* table) {
    ctx->saved_data["shape"] = address(shape);
    ctx->saved_data["interleaved"] = table->interleaved;
    ctx->save_for_backward({positions, table->cos, table->sin});
    // The product before rotation has no other reader, so it is rotated where it lies.
    ctx->mark_dirty({qkv});
    rotate(qkv, *shape, positions, *table, 1);
    return qkv;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const RopeTable table{.cos = saved[1],
                          .sin = saved[2],
                          .interleaved = ctx->saved_data.at("interleaved").toBool()};
    auto dx = grads[0].clone(at::MemoryFormat::Contiguous);
    rotate(dx, *pointer<AttentionShape>(ctx, "shape"), saved[0], table, -1);
    return {dx, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

struct Attention : Function<Attention> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& qkv,
                            const AttentionShape* shape, const LayerKv* kv) {
    const Element e = element_of(qkv);
    ctx->saved_data["shape"] = address(shape);
    ctx->saved_data["segments"] = address(kv->segments.data());
    ctx->saved_data["num_segments"] = static_cast<std::int64_t>(kv->segments.size());
    auto y = empty_rows(qkv, qkv.size(0), shape->num_heads * shape->head_dim);
    if (qkv.is_cuda()) {
      ctx->saved_data["plan"] = address(kv->plan);
      auto lse = at::empty({shape->num_heads, qkv.size(0)}, f32_like(qkv));
      cuda_part().attention(e, *shape, kv->plan, qkv.data_ptr(), kv->k_blocks, kv->v_blocks, false,
                            y.data_ptr(), lse.data_ptr<float>());
      ctx->save_for_backward({qkv, y, lse});
      return y;
    }
    ctx->save_for_backward({qkv});
    kernels().write_kv(e, *shape, qkv.data_ptr(), kv->writes.data(),
                       static_cast<std::int64_t>(kv->writes.size()), kv->k_blocks, kv->v_blocks);
    kernels().attention(e, *shape, qkv.data_ptr(), kv->segments.data(),
                        static_cast<std::int64_t>(kv->segments.size()), kv->k_blocks, kv->v_blocks,
                        y.data_ptr());
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& qkv = saved[0];
    const auto dy = grads[0].contiguous();
    auto dx = at::empty_like(qkv, qkv.options().requires_grad(false));
    if (qkv.is_cuda()) {
      cuda_part().attention_backward(element_of(qkv), *pointer<AttentionShape>(ctx, "shape"),
                                     pointer<AttentionPlan>(ctx, "plan"), qkv.data_ptr(),
                                     saved[1].data_ptr(), dy.data_ptr(), saved[2].data_ptr<float>(),
                                     dx.data_ptr());
      return {dx, at::Tensor(), at::Tensor()};
    }
    kernels().attention_backward(element_of(qkv), *pointer<AttentionShape>(ctx, "shape"),
                                 qkv.data_ptr(), dy.data_ptr(), pointer<Segment>(ctx, "segments"),
                                 ctx->saved_data.at("num_segments").toInt(), dx.data_ptr(),
                                 qkv.size(0));
    return {dx, at::Tensor(), at::Tensor()};
  }
};

struct GateMul : Function<GateMul> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, std::int64_t activation) {
    ctx->saved_data["activation"] = activation;
    ctx->save_for_backward({x});
    auto y = empty_rows(x, x.size(0), x.size(1) / 2);
    kernels_of(x).gate_mul(element_of(x), static_cast<Activation>(activation), x.data_ptr(),
                           y.data_ptr(), x.size(0), x.size(1) / 2);
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto x = ctx->get_saved_variables()[0];
    const auto dy = grads[0].contiguous();
    auto dx = at::empty_like(x, x.options().requires_grad(false));
    kernels_of(x).gate_mul_dx(element_of(x),
                              static_cast<Activation>(ctx->saved_data.at("activation").toInt()),
                              dy.data_ptr(), x.data_ptr(), dx.data_ptr(), x.size(0), x.size(1) / 2);
    return {dx, at::Tensor()};
  }
};

// Rows of the head computed at a time: about 64 MB of logits, on a GPU 8 GB.
std::int64_t head_chunk(const WeightView& head) {
  const std::int64_t elements = std::int64_t{head.place == Place::cpu ? 16 : 2048} << 20;
  return std::max<std::int64_t>(16, elements / head.rows);
}

struct HeadLogProbs : Function<HeadLogProbs> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& hidden,
                               const at::Tensor& ids, const WeightView* head, double temperature,
                               bool with_entropy) {
    remember(ctx, *head);
    ctx->saved_data["temperature"] = temperature;
    ctx->set_materialize_grads(false);  // an entropy that is only looked at costs no backward
    const std::int64_t rows = hidden.size(0), chunk = head_chunk(*head);
    const auto f32 = f32_like(hidden);
    auto log_probs = at::empty({rows}, f32), lse = at::empty({rows}, f32);
    auto entropy = with_entropy ? at::empty({rows}, f32) : at::Tensor();
    at::Tensor last;
    for (std::int64_t r = 0; r < rows; r += chunk) {
      const std::int64_t n = std::min(chunk, rows - r);
      last = linear_f32(hidden.narrow(0, r, n), *head);
      kernels_of(hidden).log_softmax_gather(
          last.data_ptr<float>(), ids.data_ptr<std::int32_t>() + r, static_cast<float>(temperature),
          log_probs.data_ptr<float>() + r, lse.data_ptr<float>() + r,
          with_entropy ? entropy.data_ptr<float>() + r : nullptr, n, head->rows);
    }
    // A single chunk is kept for backward; more are computed again there.
    ctx->save_for_backward({hidden, ids, lse, entropy, rows <= chunk ? last : at::Tensor()});
    if (!with_entropy) return {log_probs};
    return {log_probs, entropy};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const WeightView& head = recall(ctx);
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &hidden = saved[0], &ids = saved[1], &lse = saved[2], &entropy = saved[3];
    const std::int64_t rows = hidden.size(0), chunk = head_chunk(head);
    const auto d_log_prob =
        grads[0].defined() ? grads[0].contiguous() : at::zeros({rows}, lse.options());
    const bool has_entropy = grads.size() > 1 && grads[1].defined();
    const auto d_entropy = has_entropy ? grads[1].contiguous() : at::Tensor();
    auto dx = at::empty_like(hidden, hidden.options().requires_grad(false));
    const auto width = hidden.size(1) * static_cast<std::int64_t>(hidden.element_size());
    for (std::int64_t r = 0; r < rows; r += chunk) {
      const std::int64_t n = std::min(chunk, rows - r);
      const auto part = hidden.narrow(0, r, n);
      const auto z = saved[4].defined() ? saved[4] : linear_f32(part, head);
      const auto temperature = static_cast<float>(ctx->saved_data.at("temperature").toDouble());
      const float* h = entropy.defined() ? entropy.data_ptr<float>() + r : nullptr;
      const float* dh = has_entropy ? d_entropy.data_ptr<float>() + r : nullptr;
      // On a GPU the gradient is rounded as it is made, since both products want it so.
      at::Tensor dz = z;
      if (z.is_cuda() && head.element == Element::bf16) {
        dz = at::empty_like(z, z.options().dtype(at::kBFloat16));
        cuda_part().log_softmax_gradient(z.data_ptr<float>(), ids.data_ptr<std::int32_t>() + r,
                                         temperature, lse.data_ptr<float>() + r, h,
                                         d_log_prob.data_ptr<float>() + r, dh, n, head.rows,
                                         static_cast<bf16*>(dz.data_ptr()));
      } else {
        kernels_of(z).log_softmax_backward(z.data_ptr<float>(), ids.data_ptr<std::int32_t>() + r,
                                           temperature, lse.data_ptr<float>() + r, h,
                                           d_log_prob.data_ptr<float>() + r, dh, n, head.rows);
      }
      const bool wide = dz.scalar_type() == at::kFloat;
      kernels_of(z).linear_dx(head.element, dz.data_ptr(), wide, head.data,
                              static_cast<char*>(dx.data_ptr()) + r * width, n, head.rows,
                              head.cols);
      matrix_grad(head, dz, wide, part);
    }
    return {dx, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor ids_tensor(const char* what, std::span<const std::int32_t> ids, std::int64_t limit,
                      Place place) {
  auto t = at::empty({static_cast<std::int64_t>(ids.size())}, at::dtype(at::kInt));
  for (std::size_t i = 0; i < ids.size(); ++i)
    TD_CHECK(ids[i] >= 0 && ids[i] < limit, "{}: {} at index {} is outside [0, {})", what, ids[i],
             i, limit);
  std::copy(ids.begin(), ids.end(), t.data_ptr<std::int32_t>());
  return place == Place::cpu ? t : t.to(device_of(place));
}

at::Tensor embedding(const at::Tensor& ids, const WeightView& w, std::int64_t padding_id) {
  return Embedding::apply(anchor(), ids, &w, padding_id);
}

at::Tensor linear(const at::Tensor& x, const WeightView& w, const WeightView* bias) {
  check_rows(w, x);
  return Linear::apply(x, &w, bias);
}

at::Tensor rms_norm(const at::Tensor& x, const WeightView& w, float eps, float offset) {
  check_rows(w, x);
  return RmsNorm::apply(x, &w, static_cast<double>(eps), static_cast<double>(offset));
}

AddedNorm add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const WeightView& w, float eps,
                       float offset) {
  check_rows(w, x);
  check_rows(w, delta);
  auto out = AddRmsNorm::apply(x, delta, &w, static_cast<double>(eps), static_cast<double>(offset));
  return {out[0], out[1]};
}

at::Tensor norm_heads(const at::Tensor& qkv, const AttentionShape& shape,
                      const WeightView& q_weight, const WeightView& k_weight, float eps,
                      float offset) {
  check_rows("head norms", qkv, shape.qkv_width());
  if (qkv.is_cuda())
    return NormHeads::apply(qkv, &shape, &q_weight, &k_weight, static_cast<double>(eps),
                            static_cast<double>(offset));
  const std::int64_t rows = qkv.size(0), dim = shape.head_dim;
  const std::int64_t q = shape.num_heads * dim, kv = shape.num_kv_heads * dim;
  auto part = [&](std::int64_t begin, std::int64_t width, const WeightView& w) {
    const auto heads = qkv.narrow(1, begin, width).reshape({-1, dim}).contiguous();
    return rms_norm(heads, w, eps, offset).reshape({rows, width});
  };
  return at::cat({part(0, q, q_weight), part(q, kv, k_weight), qkv.narrow(1, q + kv, kv)}, 1);
}

at::Tensor rotary(const at::Tensor& qkv, const AttentionShape& shape, const at::Tensor& positions,
                  const RopeTable& table) {
  check_rows("rotary", qkv, shape.qkv_width());
  TD_CHECK(positions.size(0) == qkv.size(0), "rotary: {} positions for {} rows", positions.size(0),
           qkv.size(0));
  return Rotary::apply(qkv, &shape, positions, &table);
}

at::Tensor attention(const at::Tensor& qkv, const AttentionShape& shape, const LayerKv& kv) {
  check_rows("attention", qkv, shape.qkv_width());
  return Attention::apply(qkv, &shape, &kv);
}

bool is_rollout_call(const at::Tensor& rows, const LayerKv& kv) {
  return rows.is_cuda() && !at::GradMode::is_enabled() && !kv.segments.empty() &&
         !kv.segments[0].key_rows && static_cast<std::int64_t>(kv.writes.size()) == rows.size(0);
}

at::Tensor finish_qkv_and_attend(const at::Tensor& qkv, const AttentionShape& shape,
                                 const LayerKv& kv, const HeadNormWeights& norms,
                                 const at::Tensor& positions, const RopeTable* table) {
  check_rows("attention", qkv, shape.qkv_width());
  const Element e = element_of(qkv);
  Rotation rotation;
  if (table)
    rotation = {.positions = positions.const_data_ptr<std::int32_t>(),
                .cos = table->cos.const_data_ptr<float>(),
                .sin = table->sin.const_data_ptr<float>(),
                .rotary_dim = 2 * table->cos.size(1),
                .interleaved = table->interleaved};
  else
    rotation.positions = positions.const_data_ptr<std::int32_t>();
  cuda_part().finish_qkv(e, shape, kv.plan, qkv.data_ptr(),
                         {.q_weight = norms.q ? norms.q->data : nullptr,
                          .k_weight = norms.k ? norms.k->data : nullptr,
                          .eps = norms.eps,
                          .offset = norms.offset},
                         rotation, kv.k_blocks, kv.v_blocks);
  auto y = empty_rows(qkv, qkv.size(0), shape.num_heads * shape.head_dim);
  cuda_part().attention(e, shape, kv.plan, qkv.data_ptr(), kv.k_blocks, kv.v_blocks, true,
                        y.data_ptr(), nullptr);
  return y;
}

at::Tensor gate_mul(const at::Tensor& gate_up, Activation activation) {
  check_rows("gate_mul", gate_up, gate_up.size(1) / 2 * 2);
  return GateMul::apply(gate_up, static_cast<std::int64_t>(activation));
}

at::Tensor linear_gate_mul(const at::Tensor& x, const WeightView& w, const WeightView* bias,
                           Activation activation, bool of_rollout) {
  if (of_rollout) {
    check_rows(w, x);
    auto y = empty_rows(x, x.size(0), w.rows / 2);
    if (cuda_part().linear_gated(w.element, activation, x.data_ptr(), w.data,
                                 bias ? bias->data : nullptr, y.data_ptr(), x.size(0), w.rows,
                                 w.cols))
      return y;
  }
  return gate_mul(linear(x, w, bias), activation);
}

at::Tensor linear_f32(const at::Tensor& x, const WeightView& w) {
  check_rows(w, x);
  auto z = at::empty({x.size(0), w.rows}, f32_like(x));
  multiply(x, w, nullptr, z, true);
  return z;
}

LogProbs head_log_probs(const at::Tensor& hidden, std::span<const std::int32_t> ids,
                        const WeightView& head, float temperature, bool with_entropy) {
  check_rows(head, hidden);
  TD_CHECK(static_cast<std::int64_t>(ids.size()) == hidden.size(0), "head: {} ids for {} rows",
           ids.size(), hidden.size(0));
  TD_CHECK(temperature > 0.0f, "temperature: {} found, a number above 0 wanted", temperature);
  auto out = HeadLogProbs::apply(hidden, ids_tensor("token id", ids, head.rows, head.place), &head,
                                 static_cast<double>(temperature), with_entropy);
  return {out[0], with_entropy ? out[1] : at::Tensor()};
}

}  // namespace tandem
