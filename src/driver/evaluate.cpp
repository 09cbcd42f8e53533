// Evaluation sets: loading, running, and the summary at the end.
#include "driver/evaluate.h"

#include <algorithm>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "driver/metrics.h"
#include "driver/prompt_options.h"
#include "driver/sampling.h"

namespace tandem {

void check_labels(const std::string& path, const std::vector<Prompt>& prompts,
                  const RewardRule& rule) {
  for (const Prompt& p : prompts)
    if (const auto fault = label_fault(rule, p.label))
      throw Error(fmt::format("{}: row {}: {}", path, p.row, *fault));
}

std::vector<EvaluationSet> load_evaluation_sets(const Config& config, std::int64_t vocab_size,
                                                TokenizerProcess& tokenizer,
                                                const RewardRule* rule) {
  const EvaluateConfig& e = config.evaluate;
  std::vector<EvaluationSet> sets;
  for (std::size_t i = 0; i + 1 < e.eval_prompt_data.size(); i += 2) {
    const std::string& path = e.eval_prompt_data[i + 1];
    const PromptSet set =
        load_prompts(evaluation_prompt_options(config, path, vocab_size), tokenizer);
    if (rule) check_labels(path, set.prompts, *rule);
    TD_LOG(info, "evaluation '{}': {}", e.eval_prompt_data[i], path);
    sets.push_back({.name = e.eval_prompt_data[i], .prompts = set.prompts, .samples = {}});
  }
  return sets;
}

bool evaluate(EvaluationSet& set, const Config& config, RolloutMaker& maker, Row& row) {
  const EvaluateConfig& e = config.evaluate;
  RolloutSetup setup{.phase = "evaluate " + set.name,
                     .samples_per_prompt = e.n_samples_per_eval_prompt,
                     .params = evaluation_sampling(config),
                     .skip_special_tokens = config.rollout.rollout_skip_special_tokens,
                     .max_context = config.rollout.rollout_max_context_len.value_or(0),
                     .reward_key = config.reward.eval_reward_key,
                     .timeout_seconds = config.engine.request_timeout_seconds};
  std::vector<RolloutItem> items;
  for (std::uint64_t i = 0; i < set.prompts.size(); ++i) items.push_back({i, i});
  const double start = monotonic_seconds();
  auto samples = maker.run(set.prompts, items, setup);
  if (!samples) return false;
  set.samples = std::move(*samples);
  report_failures(set.samples, setup.phase, config.reward.stop_on_reward_failure);
  add_eval_metrics(row, set.name, set.samples, monotonic_seconds() - start);
  set.last = row.value("eval/" + set.name);
  return true;
}

EvaluationSummary summarize(const EvaluationSet& set, const std::string& run_folder) {
  EvaluationSummary summary{.name = set.name,
                            .before = set.first,
                            .after = set.last,
                            .answers = {},
                            .run_folder = run_folder};
  if (set.samples.empty()) return summary;
  const std::size_t per_prompt = set.samples.size() / set.prompts.size();
  for (std::size_t i = 0; i < std::min<std::size_t>(3, set.prompts.size()); ++i) {
    const Sample& s = set.samples[i * per_prompt];
    summary.answers.push_back({.prompt = set.prompts[i].text,
                               .response = s.response,
                               .label = set.prompts[i].label,
                               .reward = s.reward});
  }
  return summary;
}

}  // namespace tandem
