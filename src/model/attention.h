// The attention context of a forward call: which rows belong to which sequence, and where their
// keys and values lie. *Paged* (the engine): blocks of a long-lived pool. *Packed* (training):
// whole sequences in one row of tokens, with blocks laid out for this call alone. Both are the same
// structure, which is why both sides compute the same bits.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "model/kv_pool.h"
#include "ops/kernels/kernels.h"

namespace tandem {

struct AttentionContext {
  KvPool* pool = nullptr;
  std::vector<Segment> segments;
  std::vector<KvWrite> writes;

  // Segments and writes as the device wants them, made by the forward call; null on the CPU.
  struct FreePlan {
    void operator()(AttentionPlan* plan) const { cuda_part().free_plan(plan); }
  };
  std::unique_ptr<AttentionPlan, FreePlan> plan;
};

}  // namespace tandem
