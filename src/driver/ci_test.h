// What --ci-test demands of a step (Miles's checks, on every backend): before the first optimizer
// step of a rollout the policy is the one that scored the rollout, before the first of a run it is
// the reference, and trainer and engine agree on what they computed with the same weights. A pure
// function from results to faults; the weights themselves are compared by Fleet::update_weights.
#pragma once

#include <string>
#include <vector>

#include "config/config.h"
#include "trainer/results.h"

namespace tandem {

struct CiStep {
  bool first_of_run = false;  // the weights are those of --hf-checkpoint
  bool recorded = false;      // its samples come from a file: of what weights is not known
};

// Each fault with its numbers; none: the step passes.
std::vector<std::string> ci_faults(const Config& config, const TrainResult& result,
                                   const CiStep& step);

}  // namespace tandem
