// Training attention through cuDNN's fused kernels, which use Hopper's matrix instructions: forward
// and backward take little more than half of FlashAttention-2's time. Variable lengths are packed:
// a segment's rows lie at an offset, and what a sequence lacks to the longest is masked. Fast mode
// only: the backward adds to dq in no fixed order, so runs that must repeat take flash.cpp.
//
// Kernels read in whole tiles, past a segment's last row and past the last segment's; the products
// of the front end's sdpa nodes are cut at the segment's lengths (m_override, k_override), so by the
// graph's definition what lies there does not count (ops_attention_cuda_test puts NaN there).
//
// cuDNN builds a plan for each shape, which takes a while, so the number of segments and the
// longest lengths are rounded up to powers of two (segments that are not there have no rows), and
// the totals, which its workspace goes by, to eighths of them (workspace.h).
#include <ATen/Context.h>
#include <ATen/cudnn/Handle.h>
#include <c10/util/Exception.h>
#include <cudnn_frontend.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "ops/cuda/attention.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/workspace.h"

static_assert(CUDNN_MAJOR == 9, "torch 2.11 loads cuDNN 9: cudnn.h of another version was found");

namespace tandem::cuda {
namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

std::int64_t rounded(std::int64_t n, std::int64_t least) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(std::max(n, least))));
}

// What a plan is built for. Rows and keys: of the longest segment, and of all.
struct Call {
  std::int64_t num_heads, num_kv_heads, head_dim, window;
  float scale;
  bool own_rows;
  std::int64_t segments, max_rows, max_keys, total_rows, total_keys;
  auto operator<=>(const Call&) const = default;
};

Call call_of(const AttentionShape& s, const AttentionPlan& plan) {
  return {.num_heads = s.num_heads,
          .num_kv_heads = s.num_kv_heads,
          .head_dim = s.head_dim,
          .window = s.window,
          .scale = s.scale,
          .own_rows = plan.own_rows,
          .segments = rounded(plan.num_segments, 1),
          .max_rows = rounded(plan.max_rows, 128),
          .max_keys = rounded(plan.max_keys, 128),
          .total_rows = rounded_total(plan.rows),
          .total_keys = rounded_total(plan.total_keys)};
}

// Elements from one row to the next: of qkv, of the output, of the keys (and the values), of their
// gradients, and of those for each query head, which cuDNN keeps before it adds them up.
struct Strides {
  Strides(const AttentionShape& s, bool own_rows)
      : qkv(s.qkv_width()),
        out(s.num_heads * s.head_dim),
        keys(own_rows ? qkv : 2 * s.num_kv_heads * s.head_dim),
        d_keys(s.num_kv_heads * s.head_dim),
        d_keys_by_query_head(s.num_heads * s.head_dim) {}
  std::int64_t qkv, out, keys, d_keys, d_keys_by_query_head;
};

enum class Id : std::int64_t {
  q,
  k,
  v,
  out,
  stats,
  d_out,
  dq,
  dk,
  dv,
  rows,
  keys,
  q_begin,
  out_begin,
  stats_begin,
  keys_begin,
  d_keys_begin
};
std::int64_t number(Id id) { return static_cast<std::int64_t>(id); }
using Data = std::map<Id, const void*>;

// The arrays of plan.ragged, one after the other: each segment's rows and keys, then where the
// segments begin, in elements.
struct Ragged {
  Ragged(const std::int32_t* data, std::int64_t segments)
      : rows(data),
        keys(rows + segments),
        q(keys + segments),
        out(q + segments + 1),
        stats(out + segments + 1),
        k(stats + segments + 1),
        dk(k + segments + 1) {}
  const std::int32_t *rows, *keys, *q, *out, *stats, *k, *dk;
};

void check_graph(fe::error_t error, const char* what) {
  if (error.is_bad())
    throw std::runtime_error(std::string("cuDNN attention: ") + what + ": " + error.get_message());
}

// A graph of one pass, and the tensors that both passes have.
struct Pass {
  explicit Pass(const Call& c) : call(c) {
    graph = std::make_shared<fe::graph::Graph>();
    graph->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    rows = numbers(Id::rows, c.segments);
    keys = numbers(Id::keys, c.segments);
    q_begin = numbers(Id::q_begin, c.segments + 1);
    out_begin = numbers(Id::out_begin, c.segments + 1);
    stats_begin = numbers(Id::stats_begin, c.segments + 1);
    keys_begin = numbers(Id::keys_begin, c.segments + 1);
  }
  Tensor numbers(Id id, std::int64_t count) {
    return graph->tensor(fe::graph::Tensor_attributes()
                             .set_uid(number(id))
                             .set_dim({count, 1, 1, 1})
                             .set_stride({1, 1, 1, 1})
                             .set_data_type(fe::DataType_t::INT32));
  }
  // [segments, heads, longest, head_dim], rows `stride` apart from `begin` on.
  fe::graph::Tensor_attributes rows_of(Id id, std::int64_t heads, std::int64_t longest,
                                       std::int64_t stride, const Tensor& begin) const {
    return fe::graph::Tensor_attributes()
        .set_uid(number(id))
        .set_dim({call.segments, heads, longest, call.head_dim})
        .set_stride({longest * stride, call.head_dim, stride, 1})
        .set_ragged_offset(begin);
  }
  fe::graph::Tensor_attributes stats() const {
    return fe::graph::Tensor_attributes()
        .set_uid(number(Id::stats))
        .set_data_type(fe::DataType_t::FLOAT)
        .set_dim({call.segments, call.num_heads, call.max_rows, 1})
        .set_stride({call.max_rows * call.num_heads, 1, call.num_heads, 1})
        .set_ragged_offset(stats_begin);
  }
  template <class Options>
  void set_masks(Options& options) const {
    options.set_attn_scale(call.scale)
        .set_padding_mask(true)
        .set_seq_len_q(rows)
        .set_seq_len_kv(keys)
        .set_diagonal_alignment(call.own_rows ? fe::DiagonalAlignment_t::TOP_LEFT
                                              : fe::DiagonalAlignment_t::BOTTOM_RIGHT)
        .set_diagonal_band_right_bound(0);
    if (call.window > 0) options.set_diagonal_band_left_bound(static_cast<int>(call.window));
  }
  // An error if cuDNN has no kernel for it.
  fe::error_t build() {
    const cudnnHandle_t handle = at::native::getCudnnHandle();
    fe::error_t error = graph->validate();
    if (error.is_good()) error = graph->build_operation_graph(handle);
    if (error.is_good()) error = graph->create_execution_plans({fe::HeurMode_t::A});
    if (error.is_good()) error = graph->check_support(handle);
    if (error.is_good()) error = graph->build_plans(handle);
    return error;
  }
  void run(const Data& data) const {
    std::unordered_map<std::int64_t, void*> by_number;
    for (const auto& [id, p] : data) by_number.emplace(number(id), const_cast<void*>(p));
    std::int64_t bytes = 0;
    check_graph(graph->get_workspace_size(bytes), "workspace");
    const Scratch workspace(bytes);
    check_graph(graph->execute(at::native::getCudnnHandle(), by_number, workspace.as<void>()),
                "run");
  }
  Call call;
  std::shared_ptr<fe::graph::Graph> graph;
  Tensor rows, keys, q_begin, out_begin, stats_begin, keys_begin;
};

Pass forward_pass(const AttentionShape& s, const Call& c) {
  const Strides stride(s, c.own_rows);
  Pass p(c);
  const auto q = p.graph->tensor(p.rows_of(Id::q, c.num_heads, c.max_rows, stride.qkv, p.q_begin));
  const auto k =
      p.graph->tensor(p.rows_of(Id::k, c.num_kv_heads, c.max_keys, stride.keys, p.keys_begin));
  const auto v =
      p.graph->tensor(p.rows_of(Id::v, c.num_kv_heads, c.max_keys, stride.keys, p.keys_begin));
  auto options = fe::graph::SDPA_attributes().set_name("attention").set_generate_stats(true);
  p.set_masks(options);
  const auto [out, stats] = p.graph->sdpa(q, k, v, options);
  *out = p.rows_of(Id::out, c.num_heads, c.max_rows, stride.out, p.out_begin);
  out->set_output(true);
  *stats = p.stats();
  stats->set_output(true);
  return p;
}

Pass backward_pass(const AttentionShape& s, const Call& c) {
  const Strides stride(s, c.own_rows);
  Pass p(c);
  const auto d_keys_begin = p.numbers(Id::d_keys_begin, c.segments + 1);
  const auto queries = [&](Id id) {
    return p.rows_of(id, c.num_heads, c.max_rows, stride.qkv, p.q_begin);
  };
  const auto outputs = [&](Id id) {
    return p.graph->tensor(p.rows_of(id, c.num_heads, c.max_rows, stride.out, p.out_begin));
  };
  const auto keys = [&](Id id) {
    return p.graph->tensor(p.rows_of(id, c.num_kv_heads, c.max_keys, stride.keys, p.keys_begin));
  };
  auto options = fe::graph::SDPA_backward_attributes()
                     .set_name("attention_backward")
                     .set_max_total_seq_len_q(c.total_rows)
                     .set_max_total_seq_len_kv(c.total_keys);
  p.set_masks(options);
  const auto [dq, dk, dv] = p.graph->sdpa_backward(
      p.graph->tensor(queries(Id::q)), keys(Id::k), keys(Id::v), outputs(Id::out),
      outputs(Id::d_out), p.graph->tensor(p.stats()), options);
  *dq = queries(Id::dq);
  dq->set_output(true);
  for (const auto& [tensor, id] : {std::pair{dk, Id::dk}, {dv, Id::dv}}) {
    *tensor = p.rows_of(id, c.num_kv_heads, c.max_keys, stride.d_keys, d_keys_begin);
    tensor->set_output(true);
  }
  return p;
}

struct Passes {
  Pass forward, backward;
};

void warn(const Call& c, const char* pass, fe::error_t error) {
  TORCH_WARN("cuDNN makes no ", pass, " for attention of ", c.num_heads, " heads (", c.num_kv_heads,
             " of keys) of ", c.head_dim, ", window ", c.window, ", ", c.segments,
             " segments of up to ", c.max_rows, " rows and ", c.max_keys, " keys, ", c.total_rows,
             " rows and ", c.total_keys,
             " keys in all; FlashAttention-2 takes such calls, which is slower. cuDNN says: ",
             error.get_message());
}

// Null if cuDNN lacks either, which is told once a shape. Forward and backward run on threads of
// their own. Plans are of one device, as the process is (start in part.cpp).
const Passes* passes_for(const AttentionShape& s, const AttentionPlan& plan) {
  static std::mutex guard;
  static std::map<Call, std::unique_ptr<Passes>> built;
  const std::lock_guard lock(guard);
  const Call call = call_of(s, plan);
  const auto [found, is_new] = built.try_emplace(call);
  if (is_new) {
    auto passes = std::make_unique<Passes>(Passes{forward_pass(s, call), backward_pass(s, call)});
    if (fe::error_t error = passes->forward.build(); error.is_bad())
      warn(call, "forward pass", error);
    else if (fe::error_t back = passes->backward.build(); back.is_bad())
      warn(call, "backward pass", back);
    else
      found->second = std::move(passes);
  }
  return found->second.get();
}

const Passes& known_passes(const AttentionShape& s, const AttentionPlan& plan) {
  const Passes* const passes = passes_for(s, plan);
  if (!passes) throw std::runtime_error("cuDNN attention: a call that it was not asked for");
  return *passes;
}

// Keys and values: where the qkv rows have them, or gathered. The inputs of both passes.
struct Inputs {
  Inputs(const AttentionShape& s, const AttentionPlan& plan, const void* qkv)
      : gathered(plan.own_rows ? 0 : plan.total_keys * 2 * s.num_kv_heads * s.head_dim * 2) {
    const Ragged ragged(plan.ragged, rounded(plan.num_segments, 1));
    const bf16* keys = static_cast<const bf16*>(qkv) + s.num_heads * s.head_dim;
    if (!plan.own_rows) {
      keys = gathered.as<bf16>();
      gather_keys(s, plan, qkv, gathered.as<void>());
    }
    data = {{Id::q, qkv},
            {Id::k, keys},
            {Id::v, keys + s.num_kv_heads * s.head_dim},
            {Id::rows, ragged.rows},
            {Id::keys, ragged.keys},
            {Id::q_begin, ragged.q},
            {Id::out_begin, ragged.out},
            {Id::stats_begin, ragged.stats},
            {Id::keys_begin, ragged.k}};
  }
  Scratch gathered;
  Data data;
};

}  // namespace

std::vector<std::int32_t> cudnn_offsets(const AttentionShape& s, bool own_rows,
                                        const std::vector<std::int32_t>& cum_rows,
                                        const std::vector<std::int32_t>& cum_keys) {
  const std::size_t count = cum_rows.size() - 1;
  const auto segments = static_cast<std::size_t>(rounded(static_cast<std::int64_t>(count), 1));
  const Strides stride(s, own_rows);
  std::vector<std::int32_t> out;
  for (const auto* cum : {&cum_rows, &cum_keys})
    for (std::size_t i = 0; i < segments; ++i)
      out.push_back(i < count ? (*cum)[i + 1] - (*cum)[i] : 0);
  const auto begins = [&](const std::vector<std::int32_t>& cum, std::int64_t row_elements) {
    for (std::size_t i = 0; i <= segments; ++i)
      out.push_back(static_cast<std::int32_t>(cum[std::min(i, count)] * row_elements));
  };
  begins(cum_rows, stride.qkv);
  begins(cum_rows, stride.out);
  begins(cum_rows, s.num_heads);
  begins(cum_keys, stride.keys);
  begins(cum_keys, stride.d_keys);
  return out;
}

bool cudnn_is_built_in() { return true; }

// Its offsets have 32 bits.
bool cudnn_takes(Element e, const AttentionShape& s, const AttentionPlan& plan) {
  constexpr std::int64_t kShort = 512, kMost = std::numeric_limits<std::int32_t>::max();
  const Strides stride(s, plan.own_rows);
  return e == Element::bf16 && plan.ragged && plan.max_keys > kShort && s.head_dim % 16 == 0 &&
         s.head_dim <= 128 && !at::globalContext().deterministicAlgorithms() &&
         rounded_total(plan.rows) * stride.qkv <= kMost &&
         rounded_total(plan.total_keys) * std::max(stride.keys, stride.d_keys_by_query_head) <=
             kMost &&
         cudnn_workspace(s, plan.rows, plan.total_keys) <= kMaxCudnnWorkspace &&
         passes_for(s, plan);
}

void cudnn_attention(const AttentionShape& s, const AttentionPlan& plan, const void* qkv, void* out,
                     float* log_sum_exp) {
  Inputs inputs(s, plan, qkv);
  const Scratch unread(log_sum_exp ? 0 : plan.rows * s.num_heads * 4);
  inputs.data[Id::out] = out;
  inputs.data[Id::stats] = log_sum_exp ? log_sum_exp : unread.as<float>();
  known_passes(s, plan).forward.run(inputs.data);
}

void cudnn_attention_backward(const AttentionShape& s, const AttentionPlan& plan, const void* qkv,
                              const void* out, const void* dout, const float* log_sum_exp,
                              void* dqkv) {
  Inputs inputs(s, plan, qkv);
  const std::int64_t elements = plan.total_keys * s.num_kv_heads * s.head_dim;
  const Scratch d_keys(elements * 2), d_values(elements * 2);
  auto& data = inputs.data;
  data[Id::out] = out;
  data[Id::d_out] = dout;
  data[Id::stats] = log_sum_exp;
  data[Id::dq] = dqkv;
  data[Id::dk] = d_keys.as<void>();
  data[Id::dv] = d_values.as<void>();
  data[Id::d_keys_begin] = Ragged(plan.ragged, rounded(plan.num_segments, 1)).dk;
  known_passes(s, plan).backward.run(data);
  add_key_gradients(s, plan, d_keys.as<void>(), d_values.as<void>(), dqkv);
}

}  // namespace tandem::cuda
