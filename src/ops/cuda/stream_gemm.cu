// Products with the few rows of a decode step: bound by reading the weights once, so a block
// keeps as many of them on their way as its shared memory holds, through all that it waits for.
//
// A block computes kTile columns of y (rows of W), kPanels panels of 64 elements of k at a time.
// One warp brings W through a deep ring, beginning while the kernels before it still run
// (programmatic dependent launch): weights are nobody's result. Another brings x through a shallow
// ring once it is there. Warpgroups of 64 rows of x each multiply on the tensor cores. Where there
// are too few tiles for the device, the blocks of a cluster share a tile's k and add their sums up
// in the order of ranks; where there are more than multiprocessors, blocks take tiles in turn. Rows
// of x past the last are whatever lies in shared memory there, and nobody stores their sums.
#include <algorithm>
#include <array>

#include "ops/cuda/activation.cuh"
#include "ops/cuda/device.cuh"
#include "ops/cuda/driver.h"
#include "ops/cuda/hopper.cuh"
#include "ops/cuda/stream_gemm.h"

namespace tandem::cuda {
namespace {

constexpr int kPanel = 64;               // elements of k: 128 bytes of a row
constexpr int kPanelBytes = 2 * kPanel;  // of a row
constexpr int kMaxWeightSlots = 32, kMaxInputSlots = 16;
// Of a block's 227 KB: the ring's barriers and what aligning its slots takes are left out.
constexpr int kAlignment = 1024;  // of swizzled slots
constexpr int kSharedBytes = 225 << 10;
// More rows than these are read out of the cache so often that cuBLAS is faster, measured on an
// H200 (bench/results/gpu-2026-11-30.md); the gated product saves a pass and stays ahead longer.
constexpr std::int64_t kMaxRows = 48, kMaxGatedRows = 128;

struct Work {
  const bf16_t* bias;
  bf16_t* y;
  int rows, n;                                // of y; gated: of the result
  int tiles, steps, split;                    // steps of k; blocks of a tile
  int weight_slots, input_slots, input_rows;  // rows of a slot
  Activation activation;

  // The steps of a rank of a cluster: [begin(r), begin(r + 1)).
  __device__ int begin(int rank) const { return steps * rank / split; }
};

struct Rings {
  std::uint64_t weights_full[kMaxWeightSlots], weights_empty[kMaxWeightSlots];
  std::uint64_t inputs_full[kMaxInputSlots], inputs_empty[kMaxInputSlots];
};

// By one thread: the weights of all steps of the block's tiles.
template <int kTile, int kPanels, bool kGated>
__device__ void bring_weights(const Work& w, const CUtensorMap& map, char* slots, Rings& rings,
                              int rank) {
  constexpr int kBytes = kPanels * kTile * kPanelBytes;
  const std::uint64_t policy = evict_first();
  const int blocks = gridDim.x / w.split, begin = w.begin(rank), end = w.begin(rank + 1);
  RingPlace at;
  for (int tile = blockIdx.x / w.split; tile < w.tiles; tile += blocks)
    for (int step = begin; step < end; ++step, at.advance(w.weight_slots)) {
      std::uint64_t* full = rings.weights_full + at.slot;
      wait_for(rings.weights_empty + at.slot, at.parity ^ 1);
      arrive_expecting(full, kBytes);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        char* to = slots + at.slot * kBytes + panel * (kTile * kPanelBytes);
        const int column = (step * kPanels + panel) * kPanel;
        if constexpr (kGated) {
          constexpr int kHalf = kTile / 2;
          copy_box(to, &map, column, tile * kHalf, full, policy);
          copy_box(to + kHalf * kPanelBytes, &map, column, w.n + tile * kHalf, full, policy);
        } else {
          copy_box(to, &map, column, tile * kTile, full, policy);
        }
      }
    }
}

template <int kPanels>
__device__ void bring_inputs(const Work& w, const CUtensorMap& map, char* slots, Rings& rings,
                             int rank) {
  const std::uint64_t policy = evict_last();
  const int blocks = gridDim.x / w.split, begin = w.begin(rank), end = w.begin(rank + 1);
  const int panel_bytes = w.input_rows * kPanelBytes;
  RingPlace at;
  for (int tile = blockIdx.x / w.split; tile < w.tiles; tile += blocks)
    for (int step = begin; step < end; ++step, at.advance(w.input_slots)) {
      std::uint64_t* full = rings.inputs_full + at.slot;
      wait_for(rings.inputs_empty + at.slot, at.parity ^ 1);
      arrive_expecting(full, static_cast<std::uint32_t>(kPanels * panel_bytes));
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel)
        copy_box(slots + (at.slot * kPanels + panel) * panel_bytes, &map,
                 (step * kPanels + panel) * kPanel, 0, full, policy);
    }
}

// Where a warpgroup reads; all numbers are the same in its threads.
struct Reader {
  std::uint32_t weights, inputs;  // addresses of slot 0, of this group's rows
  RingPlace weights_at, inputs_at;
};

// By a warpgroup: its 64 rows of x with a tile, over some steps.
template <int kTile, int kPanels>
__device__ void multiply_steps(const Work& w, Rings& rings, int steps, Reader& reader,
                               float (&sum)[kTile / 8][4]) {
  const bool speaks = threadIdx.x % 32 == 0;
  const int panel_bytes = w.input_rows * kPanelBytes;
  int weights_before = -1, inputs_before = -1;
  const auto give_back = [&] {
    if (!speaks || weights_before < 0) return;
    arrive(rings.weights_empty + weights_before);
    arrive(rings.inputs_empty + inputs_before);
  };
  for (int step = 0; step < steps; ++step) {
    const std::uint64_t a =
        swizzled_rows(reader.inputs + reader.inputs_at.slot * (kPanels * panel_bytes));
    const std::uint64_t b =
        swizzled_rows(reader.weights + reader.weights_at.slot * (kPanels * kTile * kPanelBytes));
    wait_for(rings.weights_full + reader.weights_at.slot, reader.weights_at.parity);
    wait_for(rings.inputs_full + reader.inputs_at.slot, reader.inputs_at.parity);
    products_begin();
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll
      for (int part = 0; part < kPanel / 16; ++part)
        multiply_add<kTile / 8>(sum, a + panel * (panel_bytes >> 4) + part * (32 >> 4),
                                b + panel * (kTile * kPanelBytes >> 4) + part * (32 >> 4));
    products_end();
    wait_for_products<1>();
    give_back();
    weights_before = reader.weights_at.slot;
    inputs_before = reader.inputs_at.slot;
    reader.weights_at.advance(w.weight_slots);
    reader.inputs_at.advance(w.input_slots);
  }
  wait_for_products<0>();
  give_back();
#pragma unroll
  for (int j = 0; j < kTile / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sum[j][i])::"memory");
}

__device__ inline void store_pair(const Work& w, int row, int column, float a, float b) {
  const float v[2] = {a, b};
  store<2>(w.y + static_cast<std::int64_t>(row) * w.n + column, v);
}

__device__ inline void store_sums(const Work& w, int row, int column, float a, float b) {
  if (row >= w.rows || column >= w.n) return;
  if (w.bias) {
    a += to_float(w.bias[column]);
    b += to_float(w.bias[column + 1]);
  }
  store_pair(w, row, column, a, b);
}

__device__ inline void store_gated(const Work& w, int row, int column, const float (&gate)[2],
                                   const float (&up)[2]) {
  if (row >= w.rows || column >= w.n) return;
  float v[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float gate_bias = w.bias ? to_float(w.bias[column + i]) : 0.0f;
    const float up_bias = w.bias ? to_float(w.bias[w.n + column + i]) : 0.0f;
    const float g = to_float(from_float<bf16_t>(gate[i] + gate_bias));
    const float u = to_float(from_float<bf16_t>(up[i] + up_bias));
    v[i] = w.activation == Activation::silu ? gated<bf16_t, Silu>(g, u)
                                            : gated<bf16_t, GeluTanh>(g, u);
  }
  store_pair(w, row, column, v[0], v[1]);
}

// Of a thread's sums, calls f(j, half, row, column) twice for each eight columns j: of its two
// rows.
template <int kColumns, class F>
__device__ inline void for_each_pair(F&& f) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) f(j, half, row + 8 * half, 8 * j + lane % 4 * 2);
}

// By one thread.
__device__ inline void init_rings(const Work& w, Rings& rings, int readers) {
  for (int i = 0; i < w.weight_slots; ++i) {
    init_barrier(rings.weights_full + i, 1);
    init_barrier(rings.weights_empty + i, readers);
  }
  for (int i = 0; i < w.input_slots; ++i) {
    init_barrier(rings.inputs_full + i, 1);
    init_barrier(rings.inputs_empty + i, readers);
  }
  publish_barriers();
}

// By a warpgroup: all of the block's tiles, stored; of a shared tile the sums go to `parts`.
template <int kTile, int kPanels, bool kGated>
__device__ void multiply_tiles(const Work& w, Rings& rings, Reader reader, int rank, float* parts) {
  const int steps = w.begin(rank + 1) - w.begin(rank);
  for (int tile = blockIdx.x / w.split; tile < w.tiles; tile += gridDim.x / w.split) {
    float sum[kTile / 8][4] = {};
    multiply_steps<kTile, kPanels>(w, rings, steps, reader, sum);
    if constexpr (kGated) {
      constexpr int kHalf = kTile / 2;
      for_each_pair<kHalf>([&](int j, int half, int row, int column) {
        store_gated(w, row, tile * kHalf + column, {sum[j][2 * half], sum[j][2 * half + 1]},
                    {sum[j + kHalf / 8][2 * half], sum[j + kHalf / 8][2 * half + 1]});
      });
    } else if (w.split == 1) {
      for_each_pair<kTile>([&](int j, int half, int row, int column) {
        store_sums(w, row, tile * kTile + column, sum[j][2 * half], sum[j][2 * half + 1]);
      });
    } else {
      for_each_pair<kTile>([&](int j, int half, int row, int column) {
        const float v[2] = {sum[j][2 * half], sum[j][2 * half + 1]};
        store<2>(parts + row * kTile + column, v);
      });
    }
  }
}

// By all threads of a cluster, whose one tile it is: each rank adds up a share of the pairs.
template <int kTile>
__device__ void add_parts(const Work& w, int rank, const float* parts) {
  __syncwarp();
  cluster_sync();
  const int tile = blockIdx.x / w.split;
  for (int i = rank * blockDim.x + threadIdx.x; i < w.rows * (kTile / 2);
       i += w.split * blockDim.x) {
    float2 total{0, 0};
    for (int r = 0; r < w.split; ++r) {
      const float2 v = read_peer(parts + 2 * i, r);
      total.x += v.x;
      total.y += v.y;
    }
    store_sums(w, i / (kTile / 2), tile * kTile + i % (kTile / 2) * 2, total.x, total.y);
  }
  cluster_sync();  // a block's shared memory outlives its readers
}

template <int kTile, int kPanels, int kGroups, bool kGated>
__global__ void __launch_bounds__(kGroups * 128 + 64, 1)
    stream_kernel(const __grid_constant__ CUtensorMap weights_map,
                  const __grid_constant__ CUtensorMap inputs_map, const Work w) {
  extern __shared__ char shared[];
  __shared__ Rings rings;
  next_may_start();
  // Inputs first: what is read past their rows lies in the weights' slots.
  char* const inputs =
      shared + (kAlignment - static_cast<int>(shared_address(shared) % kAlignment)) % kAlignment;
  char* const weights = inputs + w.input_slots * w.input_rows * (kPanels * kPanelBytes);
  char* const parts = weights + w.weight_slots * (kPanels * kTile * kPanelBytes);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  const int rank = w.split > 1 ? cluster_rank() : 0;
  if (threadIdx.x == 0) init_rings(w, rings, kGroups * 4);
  __syncthreads();
  if (warp == kGroups * 4) {
    if (threadIdx.x % 32 == 0)
      bring_weights<kTile, kPanels, kGated>(w, weights_map, weights, rings, rank);
  } else {
    previous_done();
    if (warp < kGroups * 4)
      multiply_tiles<kTile, kPanels, kGated>(
          w, rings,
          {.weights = shared_address(weights),
           .inputs = shared_address(inputs) + warp / 4 * (64 * kPanelBytes),
           .weights_at = {},
           .inputs_at = {}},
          rank, reinterpret_cast<float*>(parts));
    else if (threadIdx.x % 32 == 0)
      bring_inputs<kPanels>(w, inputs_map, inputs, rings, rank);
  }
  if constexpr (!kGated)
    if (w.split > 1) add_parts<kTile>(w, rank, reinterpret_cast<const float*>(parts));
}

// A row-major matrix in boxes of box_rows rows and kPanel columns; past its ends are zeros.
CUtensorMap map_of(const void* data, std::int64_t rows, std::int64_t columns,
                   std::int64_t box_rows) {
  static const auto encode = driver<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t stride[1] = {static_cast<cuuint64_t>(columns * 2)};
  const cuuint32_t box[2] = {kPanel, static_cast<cuuint32_t>(box_rows)}, ones[2] = {1, 1};
  check_driver(encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), sizes,
                      stride, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
               "cuTensorMapEncodeTiled");
  return map;
}

// Of the process's one device.
int multiprocessors() {
  static const int count = [] {
    int device = 0, n = 0;
    CHECK_CUDA(cudaGetDevice(&device));
    CHECK_CUDA(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device));
    return n;
  }();
  return count;
}

struct Cut {
  int tile = 0, split = 1, tiles = 0;
};

// The widths that kernels are made for; a gated tile is two halves of whole eights.
template <int... kTiles>
struct TileList {
  static constexpr std::array<int, sizeof...(kTiles)> kAll{kTiles...};
};
using Tiles = TileList<16, 24, 32, 40, 48, 64, 80, 96, 160>;
constexpr bool has_tile(int tile, bool gated) { return !gated || tile % 16 == 0; }

// The cut whose busiest multiprocessor is done first, counted in bytes of weights that it reads in
// the time; the other costs are fitted to measurements on an H200 (bench/results).
Cut choose_cut(std::int64_t n, std::int64_t panels, std::int64_t input_rows, bool gated) {
  constexpr double kInputCost = 1.0 / 8;  // of a byte of x: it comes out of the cache
  constexpr double kColumnCost = 700;     // of the last tile's, whose end nothing hides
  constexpr double kTurnCost = 12 << 10, kMeetingCost = 24 << 10;  // of a tile, of a cluster
  constexpr std::int64_t kLeastPanels = 8;                         // of a block of a cluster
  Cut best;
  double least = 0;
  const std::int64_t most = multiprocessors();
  for (const int tile : Tiles::kAll)
    for (const int split : {1, 2}) {
      if (!has_tile(tile, gated) || (gated && split > 1)) continue;
      const std::int64_t tiles = ceil_div(n, tile);
      if (split > 1 && (tiles * split > most || panels < kLeastPanels * split)) continue;
      const std::int64_t turns = split > 1 ? 1 : ceil_div(tiles, most);
      const double row_bytes = static_cast<double>(turns * ceil_div(panels, split) * kPanelBytes);
      const double bytes = row_bytes * (tile + kInputCost * static_cast<double>(input_rows)) +
                           kColumnCost * tile + kTurnCost * static_cast<double>(turns) +
                           (split > 1 ? kMeetingCost : 0);
      if (best.tile > 0 && bytes >= least) continue;
      best = {tile, split, static_cast<int>(tiles)};
      least = bytes;
    }
  return best;
}

template <int kTile, int kPanels, int kGroups, bool kGated>
void launch(const Cut& cut, Work w, const void* x, const void* weights, std::int64_t weight_rows,
            std::int64_t k) {
  constexpr int kWeightBytes = kPanels * kTile * kPanelBytes;
  const int input_bytes = kPanels * w.input_rows * kPanelBytes;
  const int parts_bytes = cut.split > 1 ? kGroups * 64 * kTile * 4 : 0;
  const int room = kSharedBytes - kAlignment - static_cast<int>(sizeof(Rings)) - parts_bytes;
  w.steps = static_cast<int>(ceil_div(k, kPanels * kPanel));
  w.input_slots = std::clamp(room / 3 / input_bytes, 2, kMaxInputSlots);
  w.weight_slots = std::min((room - w.input_slots * input_bytes) / kWeightBytes, kMaxWeightSlots);
  const auto kernel = &stream_kernel<kTile, kPanels, kGroups, kGated>;
  static const bool prepared = [&] {
    CHECK_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    return true;
  }();
  static_cast<void>(prepared);
  cudaLaunchConfig_t config{};
  const std::int64_t blocks = cut.split > 1 ? std::int64_t{cut.tiles} * cut.split
                                            : std::min<std::int64_t>(cut.tiles, multiprocessors());
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kGroups * 128 + 64);
  config.dynamicSmemBytes = static_cast<std::size_t>(kAlignment + w.input_slots * input_bytes +
                                                     w.weight_slots * kWeightBytes + parts_bytes);
  config.stream = stream();
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cut.split), 1, 1};
  config.attrs = attributes;
  config.numAttrs = cut.split > 1 ? 2 : 1;
  CHECK_CUDA(cudaLaunchKernelEx(&config, kernel,
                                map_of(weights, weight_rows, k, kGated ? kTile / 2 : kTile),
                                map_of(x, w.rows, k, w.input_rows), w));
}

// Narrow tiles take more panels a step, so that a step has work enough to hide its own cost.
template <int kGroups, bool kGated, int... kTiles>
void launch_cut(TileList<kTiles...>, const Cut& cut, const Work& w, const void* x,
                const void* weights, std::int64_t n, std::int64_t k) {
  const auto try_tile = [&]<int kTile>(std::integral_constant<int, kTile>) {
    if constexpr (has_tile(kTile, kGated)) {
      constexpr int kMost = kTile <= 48 ? 4 : kTile <= 80 ? 2 : 1;
      constexpr int kPanels = kGroups == 1 ? kMost : std::min(kMost, 2);
      if (cut.tile == kTile) launch<kTile, kPanels, kGroups, kGated>(cut, w, x, weights, n, k);
    }
  };
  (try_tile(std::integral_constant<int, kTiles>{}), ...);
}

template <bool kGated>
void run(Activation activation, const void* x, const void* w, const void* bias, void* y,
         std::int64_t rows, std::int64_t n, std::int64_t k) {
  const std::int64_t input_rows = ceil_div(rows, 8) * 8;
  const Cut cut = choose_cut(n, ceil_div(k, kPanel), input_rows, kGated);
  const Work work{.bias = static_cast<const bf16_t*>(bias),
                  .y = static_cast<bf16_t*>(y),
                  .rows = static_cast<int>(rows),
                  .n = static_cast<int>(kGated ? n / 2 : n),
                  .tiles = cut.tiles,
                  .steps = 0,
                  .split = cut.split,
                  .weight_slots = 0,
                  .input_slots = 0,
                  .input_rows = static_cast<int>(input_rows),
                  .activation = activation};
  if (rows <= 64) return launch_cut<1, kGated>(Tiles{}, cut, work, x, w, n, k);
  if constexpr (kGated) launch_cut<2, kGated>(Tiles{}, cut, work, x, w, n, k);
}

bool takes(Element e, const void* x, const void* w, std::int64_t n, std::int64_t k) {
  return e == Element::bf16 && n > 0 && n < (std::int64_t{1} << 30) && k > 0 && k % 8 == 0 &&
         aligned16(x) && aligned16(w);
}

}  // namespace

bool stream_takes(Element e, const void* x, const void* w, std::int64_t rows, std::int64_t n,
                  std::int64_t k) {
  return rows >= 2 && rows <= kMaxRows && n % 2 == 0 && takes(e, x, w, n, k);
}

void stream_linear(const void* x, const void* w, const void* bias, void* y, std::int64_t rows,
                   std::int64_t n, std::int64_t k) {
  run<false>(Activation::silu, x, w, bias, y, rows, n, k);
}

bool stream_takes_gated(Element e, const void* x, const void* w, std::int64_t rows, std::int64_t n,
                        std::int64_t k) {
  return rows >= 2 && rows <= kMaxGatedRows && n % 4 == 0 && takes(e, x, w, n, k);
}

void stream_gated(Activation activation, const void* x, const void* w, const void* bias, void* y,
                  std::int64_t rows, std::int64_t n, std::int64_t k) {
  run<true>(activation, x, w, bias, y, rows, n, k);
}

}  // namespace tandem::cuda
