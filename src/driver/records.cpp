// See records.h.
#include "driver/records.h"

#include <filesystem>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "base/text.h"

namespace tandem {
namespace {

void look_at_row(const Json& row, std::int64_t step, std::int64_t last_step, Records& records) {
  for (const auto& [name, value] : row.items()) {
    const bool evaluation = name.starts_with("eval/");
    if (step == last_step && evaluation) records.has_evaluation = true;
    if (name == "perf/step_time") ++records.num_steps;
    if (step == last_step && name == "perf/step_time") records.has_step = true;
    // "eval/NAME" itself, not "eval/NAME/response_len/mean" or "eval/NAME-truncated_ratio"; a name
    // with a dash or slash is found all the same, with harmless company.
    if (step == -1 && evaluation && value.is_number()) records.first[name.substr(5)] = value;
  }
}

void remove_rollouts(const std::string& folder, std::int64_t last_step) {
  constexpr std::string_view kName = "rollout_", kEnd = ".safetensors";
  std::error_code error;
  for (auto it = std::filesystem::directory_iterator(folder, error);
       !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with(kName) || !name.ends_with(kEnd)) continue;
    const auto id = parse_int(
        std::string_view(name).substr(kName.size(), name.size() - kName.size() - kEnd.size()));
    if (id && *id > last_step) remove_tree(it->path().string());
  }
}

}  // namespace

Records cut_records(const std::string& run_dir, std::int64_t last_step) {
  Records records;
  const std::string path = run_dir + "/metrics.jsonl";
  remove_rollouts(run_dir + "/rollouts", last_step);
  if (!file_exists(path)) return records;
  const std::string text = read_file(path);
  std::string kept;
  std::int64_t number = 0;
  for (std::string_view rest = text; !rest.empty();) {
    const std::size_t end = rest.find('\n');
    if (end == rest.npos) break;  // torn by a crash: its step was not done
    const std::string_view line = rest.substr(0, end + 1);
    rest.remove_prefix(line.size());
    const std::string where = fmt::format("{}: line {}", path, ++number);
    const Json row = parse_json(line, where);
    const auto step = require<std::int64_t>(row, "step", where);
    if (step > last_step) {
      ++records.removed_rows;
      continue;
    }
    look_at_row(row, step, last_step, records);
    kept += line;
  }
  if (kept.size() != text.size()) write_file_atomic(path, kept);
  return records;
}

}  // namespace tandem
