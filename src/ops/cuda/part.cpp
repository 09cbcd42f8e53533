// The table of the CUDA part, its memory, and this process's device and streams, over torch's CUDA
// runtime layer, so that torch's operations and these kernels share streams and memory.
#include "ops/cuda/part.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/sort.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdio>
#include <exception>
#include <memory>

#include "ops/cuda/attention.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/link.h"
#include "ops/cuda/memory.h"

namespace tandem::cuda {

cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

Scratch::Scratch(std::int64_t bytes) {
  if (bytes > 0)
    data_ = c10::cuda::CUDACachingAllocator::raw_alloc(static_cast<std::size_t>(bytes));
}
Scratch::~Scratch() {
  if (data_) c10::cuda::CUDACachingAllocator::raw_delete(data_);
}

namespace {
bool exact = false;
}
bool exact_mode() { return exact; }

void sort_ids(const std::int32_t* ids, std::int64_t rows, std::int32_t* sorted,
              std::int64_t* order) {
  const auto device = at::dtype(at::kInt).device(at::kCUDA, at::DeviceIndex(-1));
  const auto in = at::from_blob(const_cast<std::int32_t*>(ids), {rows}, device);
  const auto [values, indices] = at::sort(in, /*stable=*/true, 0, /*descending=*/false);
  at::from_blob(sorted, {rows}, device).copy_(values);
  at::from_blob(order, {rows}, device.dtype(at::kLong)).copy_(indices);
}

namespace {

// From the blocks of a layer, into which the call's keys and values have been written.
void block_attention(Element e, const AttentionShape& shape, const AttentionPlan& plan,
                     const void* qkv, void* k_blocks, void* v_blocks, void* out,
                     float* log_sum_exp) {
  // FlashInfer counts key tiles from the window's begin, which depends on the call.
  if (!plan.paged || (exact_mode() && shape.window > 0))
    return plain_attention(e, shape, plan, qkv, k_blocks, v_blocks, out, log_sum_exp);
  const Scratch base2(log_sum_exp ? plan.rows * shape.num_heads * 4 : 0);
  const PagedCall call{.rows = plan.rows,
                       .segments = plan.num_segments,
                       .work = plan.work,
                       .qkv = qkv,
                       .k_blocks = k_blocks,
                       .v_blocks = v_blocks,
                       .out = out,
                       .log2_sum_exp = base2.as<float>()};
  shape.head_dim == 64 ? paged_attention_64(shape, call) : paged_attention_128(shape, call);
  if (log_sum_exp) natural_by_head(base2.as<float>(), log_sum_exp, plan.rows, shape.num_heads);
}

AttentionWay choose_way(Element e, const AttentionShape& shape, const AttentionPlan& plan) {
  if (cudnn_takes(e, shape, plan)) return AttentionWay::cudnn;
  return flash_takes(e, shape, plan) ? AttentionWay::flash : AttentionWay::plain;
}

AttentionWay attention_way(const AttentionPlan* plan, std::int64_t window) {
  const auto found = plan->ways.find(window);
  if (found == plan->ways.end())
    throw std::runtime_error("attention, window " + std::to_string(window) +
                             ": no forward pass with this plan was before");
  return found->second;
}

}  // namespace

void attention(Element e, const AttentionShape& shape, const AttentionPlan* plan, const void* qkv,
               void* k_blocks, void* v_blocks, bool kv_written, void* out, float* log_sum_exp) {
  if (plan->from_rows) plan->ways[shape.window] = choose_way(e, shape, *plan);
  if (plan->from_blocks) {
    if (!kv_written) write_kv(e, shape, *plan, qkv, k_blocks, v_blocks);
    // Only a training call goes backward.
    block_attention(e, shape, *plan, qkv, k_blocks, v_blocks, out,
                    plan->from_rows ? log_sum_exp : nullptr);
    return;
  }
  switch (attention_way(plan, shape.window)) {
    case AttentionWay::cudnn:
      return cudnn_attention(shape, *plan, qkv, out, log_sum_exp);
    case AttentionWay::flash:
      return flash_attention(shape, *plan, qkv, out, log_sum_exp);
    case AttentionWay::plain:
      return plain_attention(e, shape, *plan, qkv, nullptr, nullptr, out, log_sum_exp);
  }
}

void attention_backward(Element e, const AttentionShape& shape, const AttentionPlan* plan,
                        const void* qkv, const void* out, const void* dout,
                        const float* log_sum_exp, void* dqkv) {
  switch (attention_way(plan, shape.window)) {
    case AttentionWay::cudnn:
      return cudnn_attention_backward(shape, *plan, qkv, out, dout, log_sum_exp, dqkv);
    case AttentionWay::flash:
      return flash_attention_backward(shape, *plan, qkv, out, dout, log_sum_exp, dqkv);
    case AttentionWay::plain:
      return plain_attention_backward(e, shape, *plan, qkv, out, dout, log_sum_exp, dqkv);
  }
}

namespace {

void write(void* to, const void* host, std::int64_t bytes) {
  CHECK_CUDA(
      cudaMemcpyAsync(to, host, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice, stream()));
  CHECK_CUDA(cudaStreamSynchronize(stream()));
}

void read(void* host, const void* from, std::int64_t bytes) {
  CHECK_CUDA(cudaMemcpyAsync(host, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost,
                             stream()));
  CHECK_CUDA(cudaStreamSynchronize(stream()));
}

void zero(void* memory, std::int64_t bytes) {
  CHECK_CUDA(cudaMemsetAsync(memory, 0, static_cast<std::size_t>(bytes), stream()));
}

void copy(void* to, const void* from, std::int64_t bytes) {
  CHECK_CUDA(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice,
                             stream()));
}

void synchronize() { CHECK_CUDA(cudaStreamSynchronize(stream())); }

// Graphs that are alive; with the last one their pool ends.
int graphs_alive = 0;

void* begin_graph() {
  static at::cuda::MempoolId_t pool;
  if (graphs_alive++ == 0) pool = at::cuda::graph_pool_handle();
  auto graph = std::make_unique<at::cuda::CUDAGraph>();
  graph->capture_begin(pool, cudaStreamCaptureModeThreadLocal);
  return graph.release();
}
void end_graph(void* graph) { static_cast<at::cuda::CUDAGraph*>(graph)->capture_end(); }
void run_graph(void* graph) { static_cast<at::cuda::CUDAGraph*>(graph)->replay(); }
void free_graph(void* graph) {
  delete static_cast<at::cuda::CUDAGraph*>(graph);
  --graphs_alive;
}

void* new_mark() {
  cudaEvent_t event = nullptr;
  CHECK_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}
void set_mark(void* mark) { CHECK_CUDA(cudaEventRecord(static_cast<cudaEvent_t>(mark), stream())); }
void wait_for_mark(void* mark) { CHECK_CUDA(cudaEventSynchronize(static_cast<cudaEvent_t>(mark))); }
void free_mark(void* mark) { cudaEventDestroy(static_cast<cudaEvent_t>(mark)); }

constexpr Kernels kTable = {.name = "cuda",
                            .place = Place::cuda,
                            .linear = &linear,
                            .linear_dx = &linear_dx,
                            .linear_dw = &linear_dw,
                            .bias_dw = &bias_dw,
                            .write_panels = nullptr,
                            .read_panels = nullptr,
                            .gather_rows = &gather_rows,
                            .add_rows = &add_rows,
                            .rms_norm = &rms_norm,
                            .rms_norm_dx = &rms_norm_dx,
                            .rms_norm_dw = &rms_norm_dw,
                            .rotary = &rotary,
                            .gate_mul = &gate_mul,
                            .gate_mul_dx = &gate_mul_dx,
                            .to_f32 = &to_f32,
                            .to_bf16 = &to_bf16,
                            .write_kv = nullptr,
                            .attention = nullptr,
                            .attention_backward = nullptr,
                            .log_softmax_gather = &log_softmax_gather,
                            .log_softmax_backward = &log_softmax_backward,
                            .sample = &sample,
                            .checksum_panels = nullptr,
                            .checksum_flat = nullptr,
                            .copy_panels = nullptr,
                            .sum_squares = &sum_squares,
                            .add_f32 = &add_f32,
                            .copy_f32 = &copy_f32,
                            .adamw = &adamw};

const CudaPart* start(int device) {
  static CudaPart part;
  static cudaDeviceProp properties;
  int count = 0;
  CHECK_CUDA(cudaGetDeviceCount(&count));
  if (device >= count)
    throw std::runtime_error("GPU " + std::to_string(device) + " wanted, " + std::to_string(count) +
                             " found");
  CHECK_CUDA(cudaGetDeviceProperties(&properties, device));
  if (properties.major != 9)
    throw std::runtime_error(std::string(properties.name) +
                             ": this build has kernels for Hopper (compute capability 9.0) alone");
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);  // torch's allocator and generator
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(device));
  // Not the default stream: only others can be captured into graphs.
  c10::cuda::setCurrentCUDAStream(
      c10::cuda::getStreamFromPool(true, static_cast<c10::DeviceIndex>(device)));
  part = {.version = kCudaPartVersion,
          .device = device,
          .device_name = properties.name,
          .device_bytes = static_cast<std::int64_t>(properties.totalGlobalMem),
          .kernels = &kTable,
          .set_exact = [](bool value) { exact = value; },
          .allocate = &allocate,
          .release = &release,
          .export_memory = &export_memory,
          .import_memory = &import_memory,
          .give_back = &give_back,
          .take_again = &take_again,
          .free_bytes = &free_bytes,
          .write = &write,
          .read = &read,
          .zero = &zero,
          .copy = &copy,
          .copy_and_compare = &copy_and_compare,
          .find_differing = &find_differing,
          .sum_words = &sum_words,
          .adamw_into = &adamw_into,
          .new_link_id = &new_link_id,
          .open_link = &open_link,
          .close_link = &close_link,
          .link_exchange = &link_exchange,
          .link_broadcast = &link_broadcast,
          .link_wait = &link_wait,
          .link_all_gather = &link_all_gather,
          .link_settle = &link_settle,
          .linear_cut = &linear_cut,
          .linear_gated = &linear_gated,
          .plan_attention = &plan_attention,
          .free_plan = &free_plan,
          .reserve_plan = &reserve_plan,
          .update_plan = &update_plan,
          .finish_qkv = &finish_qkv,
          .attention = &attention,
          .attention_backward = &attention_backward,
          .attention_way = &attention_way,
          .has_cudnn_attention = cudnn_is_built_in(),
          .add_rms_norm = &add_rms_norm,
          .add_rms_norm_dx = &add_rms_norm_dx,
          .norm_heads = &norm_heads,
          .norm_heads_dx = &norm_heads_dx,
          .norm_heads_dw = &norm_heads_dw,
          .log_softmax_gradient = &log_softmax_gradient,
          .sample_on_device = &sample_on_device,
          .begin_graph = &begin_graph,
          .end_graph = &end_graph,
          .run_graph = &run_graph,
          .free_graph = &free_graph,
          .feed_tokens = &feed_tokens,
          .new_mark = &new_mark,
          .set_mark = &set_mark,
          .wait_for_mark = &wait_for_mark,
          .free_mark = &free_mark,
          .synchronize = &synchronize};
  return &part;
}

}  // namespace
}  // namespace tandem::cuda

extern "C" __attribute__((visibility("default"))) const tandem::CudaPart* tandem_cuda_part(
    int device, char* error, std::int64_t error_bytes) {
  // The border of the library: what goes wrong is told in words.
  try {
    return tandem::cuda::start(device);
  } catch (const std::exception& e) {
    std::snprintf(error, static_cast<std::size_t>(error_bytes), "%s", e.what());
    return nullptr;
  }
}
