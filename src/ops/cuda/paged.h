// Paged attention by FlashInfer's prefill kernel (Ye et al. 2025), which serves a query of one row
// and of many alike: queries of all heads of a group share a tile, keys come in chunks that several
// blocks may share and a second kernel merges. What FlashInfer plans in its own scheduler is
// planned in plan.cpp, since the tile and the chunk decide the order of additions; in exact mode
// both are the same in every call.
#pragma once

#include <cstdint>

#include "ops/cuda/device.h"
#include "ops/kernels/kernels.h"

namespace tandem::cuda {

// The work list of a call, in device memory. One item is one query tile of one sequence and one
// chunk of its keys.
struct PagedWork {
  std::int64_t tile = 0;               // packed queries (rows × heads of a group) a tile: 16 or 64
  std::int64_t items = 0;              // of the grid; those not valid return at once
  std::int64_t partial_rows = 0;       // rows × chunks; 0: keys are not cut, nothing is merged
  std::int32_t* request = nullptr;     // [items]
  std::int32_t* query_tile = nullptr;  // [items]
  std::int32_t* key_chunk = nullptr;   // [items]
  bool* valid = nullptr;               // [items]
  std::int32_t* partial_begin = nullptr;   // [segments + 1]
  std::int32_t* merge_begin = nullptr;     // [rows + 1]
  std::int32_t* chunk_keys = nullptr;      // [1]
  // [1]: 1 if each row is a sequence and the call writes keys of sequences' last pages alone.
  std::int32_t* settled = nullptr;
  std::int32_t* row_begin = nullptr;       // [segments + 1]
  std::int32_t* page_begin = nullptr;      // [segments + 1]
  std::int32_t* last_page_keys = nullptr;  // [segments]
  std::int32_t* pages = nullptr;
};

struct PagedCall {
  std::int64_t rows = 0, segments = 0;
  PagedWork work;
  const void* qkv = nullptr;
  void *k_blocks = nullptr, *v_blocks = nullptr, *out = nullptr;
  float* log2_sum_exp = nullptr;  // [rows, heads] to base 2, or null
};

inline bool paged_takes(Element e, const AttentionShape& s) {
  // Its shared memory is swizzled over 64 columns, so a head of 96 has no instance.
  return e == Element::bf16 && (s.head_dim == 64 || s.head_dim == 128);
}
// One file an instance, since each takes nvcc a while.
void paged_attention_64(const AttentionShape&, const PagedCall&);
void paged_attention_128(const AttentionShape&, const PagedCall&);

// paged_decode.cu: the same of sequences of one row, in fast mode. `out`: the rows, or the partial
// rows with their sums (to base 2).
bool decode_takes(const AttentionShape&, const PagedCall&);
void decode_attention(const AttentionShape&, const PagedCall&, void* out, float* sums);

}  // namespace tandem::cuda
