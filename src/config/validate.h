// What a config must satisfy as a whole, beyond the bounds of single rows: one list of all faults,
// each naming the flags, the values found and what to do.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/config.h"

namespace tandem {

std::vector<std::string> validate(const Config& config);
std::vector<std::string> validate(const GenerateConfig& config);
std::vector<std::string> validate(const ScoreConfig& config);
std::vector<std::string> validate(const SelftestConfig& config);
std::vector<std::string> validate(const ServeConfig& config);

// Files and folders that the config names and that do not exist.
std::vector<std::string> missing_files(const Config& config);
std::vector<std::string> missing_files(const GenerateConfig& config);
std::vector<std::string> missing_files(const ScoreConfig& config);
std::vector<std::string> missing_files(const SelftestConfig& config);
std::vector<std::string> missing_files(const ServeConfig& config);

// Whether two spellings name one path; links are not followed.
bool same_path(const std::string& a, const std::string& b);

// Whether --load is the folder that --save fills (or the run's folder that holds it): if there is
// no checkpoint yet, the run begins there.
bool loads_where_it_saves(const Config& config);

// A path with its {rollout_id} (or {rollout_id:07d}: with leading zeros) filled in. A pattern that
// cannot be read comes back as it is.
std::string fill_rollout_id(const std::string& pattern, std::int64_t rollout_id);

// "data.jsonl" of "data.jsonl@[0:100]": the file of a prompt set, without its slice of rows.
std::string prompt_file(const std::string& prompt_data);

}  // namespace tandem
