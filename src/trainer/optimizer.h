// AdamW whose f32 master weights and moments are sharded over the group by ranges of the flat
// parameter vector. Each rank gets the others' sums for its own range and finishes the tree over
// leaves there, the norm comes from fixed chunks added in order, and nothing is written before the
// norm is known to be finite. So one rank and any number of ranks hold the same bits. Between
// ranks everything goes through host memory, on GPUs too.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "comm/group.h"
#include "model/arena.h"
#include "model/shard.h"
#include "ops/kernels/kernels.h"
#include "trainer/gradients.h"

namespace tandem {

class ShardedAdamW {
 public:
  ShardedAdamW(std::int64_t flat_elements, Group& group, Place place);

  std::int64_t begin() const { return begin_; }
  std::int64_t end() const { return end_; }
  // The own range, in the first end - begin elements; with steps() all of a rank's state.
  FlatBuffer& master() { return master_; }
  FlatBuffer& exp_avg() { return exp_avg_; }
  FlatBuffer& exp_avg_sq() { return exp_avg_sq_; }
  std::int64_t steps() const { return steps_; }
  void set_steps(std::int64_t steps) { steps_ = steps; }

  // `sums`: of this rank's leaves, those of leaves_of_rank(num_leaves, rank, ranks); used as
  // scratch. Returns the global norm. The step is taken only if the norm is finite; clip_grad 0: no
  // clipping.
  double step(const std::vector<GradientTree::Sum>& sums, std::int64_t num_leaves,
              AdamWStep settings, double clip_grad);
  // The same, and publish(arena, held) if it was taken; on one GPU in bf16 both in one pass.
  double step_and_publish(const std::vector<GradientTree::Sum>& sums, std::int64_t num_leaves,
                          const AdamWStep& settings, double clip_grad, Arena& arena,
                          std::span<const FlatRange> held = {});

  // All ranks' masters into their arenas: the in-place weight update. held: what the arena of each
  // rank holds of the flat vector; empty: every arena all of it.
  void publish(Arena& arena, std::span<const FlatRange> held = {});
  // Of the flat vector range wanted[rank] to each rank, on the host; `mine` is as long as the own
  // one. wanted is equal on all ranks.
  void gather(std::span<const FlatRange> wanted, std::span<float> mine);

 private:
  FlatRange range_of(int rank) const;  // whose masters that rank owns
  // The gradient, right in the own range.
  float* sum_over_ranks(const std::vector<GradientTree::Sum>& sums, std::int64_t num_leaves);
  float* sum_on_host(const std::vector<GradientTree::Sum>& sums, std::int64_t num_leaves);
  double global_norm(const float* grad);
  // Norm, and the step's remaining numbers if it is finite.
  double prepare(const float* grad, AdamWStep& settings, double clip_grad);

  std::int64_t flat_elements_;
  Group& group_;
  std::int64_t shard_, begin_, end_;
  FlatBuffer master_, exp_avg_, exp_avg_sq_;
  std::int64_t steps_ = 0;
};

}  // namespace tandem
