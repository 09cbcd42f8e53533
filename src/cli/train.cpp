// `tandem train`, its table of flags, and the rank that it starts.
#include "driver/train.h"

#include <algorithm>

#include "cli/usage.h"
#include "config/docs.h"
#include "config/parse.h"
#include "driver/dry_run.h"
#include "rank/rank.h"

namespace tandem {

int command_train(const std::vector<std::string>& words) {
  constexpr const char* kUsage =
      "usage: tandem train --hf-checkpoint DIR --prompt-data FILE --colocate [flags]\n";
  Config config;
  const Parsed parsed = check_command_line(words, config);
  if (parsed.help) {
    fmt::print("{}", help_text<Config>(kUsage));
    return 0;
  }
  if (std::find(words.begin(), words.end(), "--dry-run") != words.end())
    return dry_run(std::move(config), parsed);
  if (!parsed.faults.empty()) {  // and with them whatever else would stop the corrected line
    std::vector<std::string> faults = parsed.faults;
    for (std::string& fault : faults_before_start(std::move(config), false))
      faults.push_back(std::move(fault));
    throw UsageError(faults_text(faults));
  }
  return run_train(std::move(config), parsed.notes);
}

int command_rank(const std::vector<std::string>& words) { return run_rank(words); }

int command_flags(const std::vector<std::string>& words) {
  if (words.size() == 1 && words.front() == "--markdown")
    fmt::print("{}", flags_markdown());
  else if (words.empty())
    fmt::print("{}", help_text<Config>("flags of tandem train\n"));
  else
    throw UsageError(fmt::format("'{}' found, --markdown or nothing wanted", words.front()));
  return 0;
}

}  // namespace tandem
