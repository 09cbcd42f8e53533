// What a config must satisfy as a whole, beyond the bounds of single rows: one list of all faults,
// each naming the flags, the values found and what to do.
#pragma once

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

// "data.jsonl" of "data.jsonl@[0:100]": the file of a prompt set, without its slice of rows.
std::string prompt_file(const std::string& prompt_data);

}  // namespace tandem
