// The FlashInfer instance of one head size; see paged.h.
#pragma once

#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/variants.cuh>

#include "ops/cuda/paged.h"

namespace tandem::cuda {

template <int kDim>
void run_paged_attention(const AttentionShape& s, const PagedCall& call) {
  using E = __nv_bfloat16;
  using Params = flashinfer::BatchPrefillPagedParams<E, E, E, std::int32_t>;
  // Windows are always compiled in; -1 means none.
  using Variant = flashinfer::DefaultAttention<false, true, false, false>;
  const PagedWork& w = call.work;
  const flashinfer::paged_kv_t<E, std::int32_t> keys(
      static_cast<std::uint32_t>(s.num_kv_heads), kBlockTokens, kDim,
      static_cast<std::uint32_t>(call.segments), flashinfer::QKVLayout::kNHD,
      static_cast<E*>(call.k_blocks), static_cast<E*>(call.v_blocks), w.pages, w.page_begin,
      w.last_page_keys);
  Params params(static_cast<E*>(const_cast<void*>(call.qkv)), keys, nullptr, w.row_begin, nullptr,
                nullptr, static_cast<E*>(call.out), call.log2_sum_exp, nullptr,
                static_cast<std::uint32_t>(s.num_heads), static_cast<std::int32_t>(s.qkv_width()),
                kDim, s.window > 0 ? static_cast<std::int32_t>(s.window) - 1 : -1, 0.0f, s.scale,
                1.0f, 1e4f);
  params.request_indices = w.request;
  params.qo_tile_indices = w.query_tile;
  params.kv_tile_indices = w.key_chunk;
  params.merge_indptr = w.merge_begin;
  params.o_indptr = w.partial_begin;
  params.block_valid_mask = w.valid;
  params.kv_chunk_size_ptr = w.chunk_keys;
  params.max_total_num_rows = static_cast<std::uint32_t>(call.rows);
  params.padded_batch_size = static_cast<std::uint32_t>(w.items);
  const Scratch partial(w.partial_rows * s.num_heads * kDim * 2),
      partial_sums(w.partial_rows * s.num_heads * 4);
  auto run = [&](auto tile) {
    CHECK_CUDA((flashinfer::BatchPrefillWithPagedKVCacheDispatched<
                true, tile, kDim, kDim, flashinfer::PosEncodingMode::kNone, false,
                flashinfer::MaskMode::kCausal, Variant, Params>(
        params, partial.as<E>(), partial_sums.as<float>(), /*enable_pdl=*/true, stream())));
  };
  if (w.tile == 16)
    run(std::integral_constant<std::uint32_t, 16>{});
  else
    run(std::integral_constant<std::uint32_t, 64>{});
}

}  // namespace tandem::cuda
