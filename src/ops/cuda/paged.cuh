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
  // Of a windowed layer FlashInfer counts chunks from the window's begin, others than those listed.
  // There each item takes the whole window: items of further chunks write the same once more.
  const bool cut = w.partial_rows > 0 && s.window == 0;
  params.o_indptr = cut ? w.partial_begin : w.row_begin;
  params.block_valid_mask = w.valid;
  params.kv_chunk_size_ptr = w.chunk_keys;
  params.max_total_num_rows = static_cast<std::uint32_t>(call.rows);
  params.padded_batch_size = static_cast<std::uint32_t>(w.items);
  const std::int64_t partial_rows = cut ? w.partial_rows * s.num_heads : 0;
  const Scratch partial(partial_rows * kDim * 2), partial_sums(partial_rows * 4);
  if (decode_takes(s, call)) {
    if (!cut) return decode_attention(s, call, call.out, nullptr);
    decode_attention(s, call, partial.as<void>(), partial_sums.as<float>());
    CHECK_CUDA(flashinfer::VariableLengthMergeStates(
        partial.as<E>(), partial_sums.as<float>(), w.merge_begin, static_cast<E*>(call.out),
        nullptr, static_cast<std::uint32_t>(call.rows), nullptr,
        static_cast<std::uint32_t>(s.num_heads), kDim, /*enable_pdl=*/true, stream()));
    return;
  }
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
