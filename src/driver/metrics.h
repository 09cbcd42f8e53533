// The metrics of a training run under Miles's names, each with its reduction, and how the driver's
// results become a step's row.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "base/memory.h"
#include "data/sample.h"
#include "driver/fleet.h"
#include "driver/sampling.h"
#include "metrics/record.h"
#include "rl/advantages.h"
#include "trainer/results.h"
#include "transfer/client.h"

namespace tandem {

const Declarations& train_declarations();

void add_rollout_metrics(Row& row, std::span<const Sample> samples,
                         const GroupAdvantages& advantages, double seconds, std::int64_t num_gpus);
// What the filter dropped and how many prompts were drawn for the rollout.
void add_selection_metrics(Row& row, const DrawnGroups& drawn);
// first_batch: no other was generated since the engines got their weights.
void add_train_metrics(Row& row, const TrainResult& result, double seconds, bool first_batch);
void add_update_metrics(Row& row, const UpdateTimes& times);
// How old the samples are, in weight versions: of their oldest tokens, and before the trainer's.
void add_version_metrics(Row& row, std::span<const Sample> samples, std::int64_t trainer_version);
// What each side did of a step of `seconds`, from the ranks' clocks at its begin and end.
void add_usage_metrics(Row& row, const RankUsage& before, const RankUsage& after, double seconds);
// `phase`: "rollout", "train" or "update", at whose end the ranks were asked.
void add_rank_memory(Row& row, const std::string& phase, const ProcessMemory& most);
// Resident memory of the driver and of its helper processes.
void add_driver_memory(Row& row, std::int64_t helper_bytes);
void add_eval_metrics(Row& row, const std::string& name, std::span<const Sample> samples,
                      double seconds);

}  // namespace tandem
