// From the placement flags to the map of ranks: a pure function, so that --dry-run prints what a
// run would start and a test can ask for any shape.
//
// Split: ranks 0..T-1 train, the following ones serve. Colocated: engine slots are laid over the
// trainer's ranks first; slots beyond them get ranks of their own. T = actor_num_nodes ×
// actor_num_gpus_per_node, engine slots = rollout_num_gpus, an engine = rollout_num_gpus_per_engine
// consecutive slots, or as many as rollout_num_gpus_of_engines names.
#pragma once

#include <string>
#include <vector>

#include "cluster/placement.h"
#include "config/config.h"
#include "model/hf_config.h"

namespace tandem {

// What the nodes have: "GPUs" of each node (CPU: any number of ranks share a node's cores).
struct Resources {
  std::int64_t num_nodes = 1;
  std::optional<std::int64_t> gpus_per_node;  // empty: no limit
};

// Of this machine: --num-gpus-per-node, with --device cuda at most the GPUs that are visible.
Resources resources_of(const Config& config);

// cluster must be resolved. Throws Error with all that is impossible, have and need in numbers, and
// what to change.
Placement make_placement(const ClusterConfig& cluster, const Resources& resources);

// Error if the model cannot be cut into engines of as many ranks as they have; it names the widths
// that fit.
void check_engine_width(const Config& config, const ModelConfig& model);

}  // namespace tandem
