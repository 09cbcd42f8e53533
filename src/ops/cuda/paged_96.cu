// Paged attention of head size 96.
#include "ops/cuda/paged.cuh"

namespace tandem::cuda {

void paged_attention_96(const AttentionShape& s, const PagedCall& call) {
  run_paged_attention<96>(s, call);
}

}  // namespace tandem::cuda
