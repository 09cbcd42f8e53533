// A forward call's rows and keys on the device, and what the host must know to launch over them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "ops/cuda/device.h"
#include "ops/cuda/paged.h"
#include "ops/cuda/part.h"

namespace tandem {

// Rows of one sequence; its keys lie at positions [0, position_begin + num_rows), listed from
// keys_begin on.
struct PlannedSegment {
  std::int32_t row_begin, num_rows, position_begin, keys_begin;
};

// A key of a training call is seen by the rows of `segment` from position `position` on.
struct KeyUse {
  std::int32_t segment, position;
};

struct AttentionPlan {
  std::int64_t rows = 0, num_segments = 0, num_writes = 0;
  std::int64_t max_rows = 0, max_keys = 0, total_keys = 0;  // of a segment, of a segment, of all
  bool from_rows = false;    // keys and values are rows of the call (training), not blocks
  bool own_rows = false;     // and each segment's keys are its own rows
  bool from_blocks = false;  // forward reads blocks: rollout, and training in exact mode

  // In `memory`, on the device.
  const PlannedSegment* segments = nullptr;
  const std::int32_t* row_segment = nullptr;       // [rows]
  const std::int32_t* keys = nullptr;              // from_rows: row of each key
  const PlannedSegment* block_segments = nullptr;  // the segments with keys_begin into `blocks`
  const std::int32_t* blocks = nullptr;            // block tables; from_blocks only
  const KvWrite* writes = nullptr;
  const std::int32_t* cum_rows = nullptr;    // [segments + 1]
  const std::int32_t* cum_keys = nullptr;    // [segments + 1]
  const std::int32_t* uses_begin = nullptr;  // [rows + 1], from_rows only
  const KeyUse* uses = nullptr;              // [total_keys]
  const std::int32_t* ragged = nullptr;      // cudnn_offsets; from_rows and not from_blocks only
  bool paged = false;                        // FlashInfer's kernels take it; `work` is filled
  cuda::PagedWork work;
  // How forward attended in the layers of each window (the rest of their shape is the plan's).
  // Backward must go the same way, since each lays log_sum_exp out as it likes. Forward fills it.
  mutable std::map<std::int64_t, AttentionWay> ways;

  std::unique_ptr<cuda::Scratch> memory;
  // Of a plan that a graph reads, which stays where it is: the host's sides of `memory`, which take
  // turns, so that one can be filled while the other is on its way, and room.
  struct Reserved {
    std::int64_t rows = 0, pages = 0;
    void* pinned[2] = {};
    int turn = 0;
    std::int64_t bytes = 0;
    ~Reserved();
  };
  std::unique_ptr<Reserved> reserved;
};

}  // namespace tandem
