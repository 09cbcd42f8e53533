// Paged attention of head size 64.
#include "ops/cuda/paged.cuh"

namespace tandem::cuda {

void paged_attention_64(const AttentionShape& s, const PagedCall& call) {
  run_paged_attention<64>(s, call);
}

}  // namespace tandem::cuda
