// Paged attention of head size 128.
#include "ops/cuda/paged.cuh"

namespace tandem::cuda {

void paged_attention_128(const AttentionShape& s, const PagedCall& call) {
  run_paged_attention<128>(s, call);
}

}  // namespace tandem::cuda
