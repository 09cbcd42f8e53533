// Laying trainer ranks and engine slots over the nodes.
#include "driver/placement.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/check.h"
#include "base/process.h"
#include "model/parameters.h"

namespace tandem {
namespace {

std::vector<std::string> find_faults(const ClusterConfig& c, const Resources& resources,
                                     std::int64_t trainers, std::int64_t slots,
                                     std::int64_t ranks) {
  std::vector<std::string> faults;
  const std::int64_t width = c.rollout_num_gpus_per_engine;
  if (c.rollout_num_gpus_of_engines.empty() && (width < 1 || slots % width != 0))
    faults.push_back(fmt::format(
        "--rollout-num-gpus-per-engine: {} engine ranks (--rollout-num-gpus) cannot be cut into "
        "engines of {}; give a multiple, for example {}",
        slots, width, std::max(slots / std::max<std::int64_t>(width, 1), std::int64_t{1}) * width));
  if (c.actor_num_nodes > resources.num_nodes)
    faults.push_back(fmt::format(
        "--actor-num-nodes: {} wanted, {} there; lower it or start the run over more nodes",
        c.actor_num_nodes, resources.num_nodes));
  if (resources.gpus_per_node && ranks > *resources.gpus_per_node * resources.num_nodes)
    faults.push_back(fmt::format(
        "placement: {} ranks wanted ({} trainer, {} engine{}), {} GPUs there ({} nodes x {}); "
        "lower --actor-num-gpus-per-node or --rollout-num-gpus{}",
        ranks, trainers, slots, c.colocate ? ", colocated" : "",
        *resources.gpus_per_node * resources.num_nodes, resources.num_nodes,
        *resources.gpus_per_node, c.colocate ? "" : ", or add --colocate"));
  return faults;
}

}  // namespace

Resources resources_of(const Config& config) {
  Resources resources{.num_nodes = 1, .gpus_per_node = config.cluster.num_gpus_per_node};
  if (config.compute.device == Device::cuda)
    resources.gpus_per_node =
        std::min<std::int64_t>(resources.gpus_per_node.value_or(num_gpus()), num_gpus());
  return resources;
}

Placement make_placement(const ClusterConfig& c, const Resources& resources) {
  const std::int64_t per_node = c.actor_num_gpus_per_node.value();
  const std::int64_t trainers = c.actor_num_nodes * per_node, slots = c.rollout_num_gpus.value();
  const std::int64_t first_slot = c.colocate ? 0 : trainers;  // rank of engine slot 0
  const std::int64_t ranks = std::max(trainers, first_slot + slots);
  const auto faults = find_faults(c, resources, trainers, slots, ranks);
  TD_CHECK(faults.empty(), "{}", fmt::join(faults, "\n"));

  struct Slot {
    std::int64_t engine, rank, width;
  };
  std::vector<Slot> engine_slots;
  const std::vector<std::int64_t> widths = c.engine_widths();
  for (std::size_t e = 0; e < widths.size(); ++e)
    for (std::int64_t i = 0; i < widths[e]; ++i)
      engine_slots.push_back({static_cast<std::int64_t>(e), i, widths[e]});
  TD_CHECK(std::ssize(engine_slots) == slots,
           "--rollout-num-gpus-of-engines: {} ranks, --rollout-num-gpus {}", engine_slots.size(),
           slots);
  Placement placement{.ranks = {},
                      .num_trainers = static_cast<int>(trainers),
                      .num_engines = static_cast<int>(widths.size())};
  for (std::int64_t r = 0; r < ranks; ++r) {
    const std::int64_t node =
        r < trainers ? r / per_node
                     : (resources.gpus_per_node
                            ? std::min(r / *resources.gpus_per_node, resources.num_nodes - 1)
                            : 0);
    RankRole role{.rank = static_cast<int>(r), .node = static_cast<int>(node)};
    if (r < trainers) role.trainer_rank = static_cast<int>(r);
    const std::int64_t slot = r - first_slot;
    if (slot >= 0 && slot < slots) {
      const Slot& at = engine_slots[static_cast<std::size_t>(slot)];
      role.engine = static_cast<int>(at.engine);
      role.engine_rank = static_cast<int>(at.rank);
      role.engine_width = static_cast<int>(at.width);
    }
    placement.ranks.push_back(role);
  }
  return placement;
}

void check_engine_width(const Config& config, const ModelConfig& model) {
  for (const std::int64_t width : config.cluster.engine_widths()) {
    const std::string fault = tensor_parallel_fault(
        model, width, config.compute.is_exact() ? ShardRule::exact : ShardRule::row_parallel);
    TD_CHECK(fault.empty(), "{}: {}",
             config.cluster.rollout_num_gpus_of_engines.empty() ? "--rollout-num-gpus-per-engine"
                                                                : "--rollout-num-gpus-of-engines",
             fault);
  }
}

}  // namespace tandem
