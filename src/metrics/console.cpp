// The console's sink and the block at a run's end. See sinks.h.
#include <algorithm>
#include <cmath>

#include "base/log.h"
#include "base/text.h"
#include "metrics/sinks.h"

namespace tandem {
namespace {

std::string show(double value, Column::Form form) {
  switch (form) {
    case Column::Form::number:
      return fmt::format("{:.3f}", value);
    case Column::Form::exact:
      return value == 0 ? "0" : fmt::format("{:.2e}", value);
    case Column::Form::seconds:
      return human_seconds(value);
    case Column::Form::count:
      return human_count(value);
  }
  return {};
}

std::string score(double value) {
  return std::isnan(value) ? std::string("not evaluated") : fmt::format("{:.3f}", value);
}

}  // namespace

std::vector<Column> ConsoleSink::default_columns() {
  using Form = Column::Form;
  return {{"reward", "rollout/raw_reward", Form::number},
          {"length", "rollout/response_len/mean", Form::number},
          {"gap", "train/train_rollout_logprob_abs_diff", Form::exact},
          {"rollout", "perf/rollout_time", Form::seconds},
          {"train", "perf/train_time", Form::seconds},
          {"update", "perf/update_weights_time", Form::seconds},
          {"eval", "perf/eval_time", Form::seconds},
          {"step", "perf/step_time", Form::seconds},
          {"tokens/s", "perf/tokens_per_gpu_per_sec", Form::count}};
}

std::string step_line(std::int64_t step, std::int64_t num_steps, const Row& row,
                      const std::vector<Column>& columns) {
  std::string parts;
  for (const Column& column : columns) {
    if (row.has(column.metric)) {
      parts += fmt::format("  {} {}", column.label, show(row.value(column.metric), column.form));
    }
  }
  if (parts.empty()) return {};
  const std::string total = num_steps > 0 ? std::to_string(num_steps) : "";
  return num_steps > 0 ? fmt::format("step {:>{}}/{}{}", step + 1, total.size(), total, parts)
                       : fmt::format("step {}{}", step + 1, parts);
}

ConsoleSink::ConsoleSink(std::int64_t num_steps, std::vector<Column> columns)
    : num_steps_(num_steps), columns_(columns.empty() ? default_columns() : std::move(columns)) {}

void ConsoleSink::write(std::int64_t step, const Row& row) {
  const std::string line = step_line(step, num_steps_, row, columns_);
  if (!line.empty()) console_line(line);
}

std::string evaluation_block(const EvaluationSummary& summary) {
  std::string block = fmt::format("\nevaluation '{}': mean reward {} before, {} after\n",
                                  summary.name, score(summary.before), score(summary.after));
  for (const EvaluationSummary::Answer& answer : summary.answers) {
    block += fmt::format("  prompt:   {}\n  answer:   {}\n  expected: {}   reward {:.3g}\n\n",
                         one_line(answer.prompt, 300), one_line(answer.response, 300),
                         one_line(answer.label, 100), answer.reward);
  }
  return block + fmt::format("run folder: {}", summary.run_folder);
}

}  // namespace tandem
