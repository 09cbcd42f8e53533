// Evaluation on prompts of its own: every prompt of a set, in file order, with random numbers from
// the evaluation's own key space, so it neither disturbs training nor depends on when it runs.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "config/config.h"
#include "driver/rollout.h"
#include "metrics/record.h"
#include "metrics/sinks.h"

namespace tandem {

struct EvaluationSet {
  std::string name;
  std::vector<Prompt> prompts;
  double first = std::numeric_limits<double>::quiet_NaN();  // mean reward of the first evaluation
  double last = std::numeric_limits<double>::quiet_NaN();
  std::vector<Sample> samples;  // of the last evaluation
};

// The sets of --eval-prompt-data; logs what each holds. rule: checks the labels, null: nothing
// does.
std::vector<EvaluationSet> load_evaluation_sets(const Config& config, std::int64_t vocab_size,
                                                TokenizerProcess& tokenizer,
                                                const RewardRule* rule);

// Evaluates one set and adds its metrics to the row; false: stopped, nothing was added.
bool evaluate(EvaluationSet& set, const Config& config, RolloutMaker& maker, Row& row);

// Before and after, with up to three answers.
EvaluationSummary summarize(const EvaluationSet& set, const std::string& run_folder);

// Error naming the first row whose label no answer could ever match.
void check_labels(const std::string& path, const std::vector<Prompt>& prompts,
                  const RewardRule& rule);

}  // namespace tandem
