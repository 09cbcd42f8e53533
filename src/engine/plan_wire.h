// A step's plan as bytes, from an engine's leader to its followers: what the forward pass needs,
// and the draws, which say whether it is a captured step. Both ends are the same build, so numbers
// cross as they lie.
#pragma once

#include <string>
#include <string_view>

#include "engine/scheduler.h"

namespace tandem {

std::string encode_plan(const StepPlan& plan);
// Error if the bytes are no plan.
void decode_plan(std::string_view bytes, StepPlan& plan);

}  // namespace tandem
