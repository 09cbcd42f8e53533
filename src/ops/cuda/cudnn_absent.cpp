// The place of cudnn.cpp in a build without cuDNN's front end (cmake/cuda.cmake): it takes no call.
#include "ops/cuda/attention.h"

namespace tandem::cuda {

std::vector<std::int32_t> cudnn_offsets(const AttentionShape&, bool,
                                        const std::vector<std::int32_t>&,
                                        const std::vector<std::int32_t>&) {
  return {};
}
bool cudnn_is_built_in() { return false; }
bool cudnn_takes(Element, const AttentionShape&, const AttentionPlan&) { return false; }
void cudnn_attention(const AttentionShape&, const AttentionPlan&, const void*, void*, float*) {}
void cudnn_attention_backward(const AttentionShape&, const AttentionPlan&, const void*, const void*,
                              const void*, const float*, void*) {}

}  // namespace tandem::cuda
