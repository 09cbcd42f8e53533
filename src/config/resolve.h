// Filling what a config leaves open, from its other values and from the machine.
//
// Every value that is filled is returned as a line for the log, such as "global_batch_size = 64
// (rollout_batch_size 8 x n_samples_per_prompt 8 / num_steps_per_rollout 1)". Resolving a resolved
// config changes nothing and returns nothing. The config must have passed validate().
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/config.h"

namespace tandem {

// What resolve() needs to know of the outside.
struct Host {
  std::int64_t num_cpus = 1;       // cores that this process may use
  bool bf16_instructions = false;  // AVX-512 BF16
  bool cuda = false;               // a GPU, and the part of this program that computes on it
  std::string time;                // for names of runs: "20260131-235959"
};
Host this_host();

std::vector<std::string> resolve(Config& config, const Host& host);
std::vector<std::string> resolve(GenerateConfig& config, const Host& host);
std::vector<std::string> resolve(ScoreConfig& config, const Host& host);
std::vector<std::string> resolve(SelftestConfig& config, const Host& host);
std::vector<std::string> resolve(ServeConfig& config, const Host& host);

// Sets num_rollout from num_epoch once the prompts are counted: num_epoch x (rows /
// rollout_batch_size), rounded down. Error: fewer rows than one rollout needs.
std::vector<std::string> resolve_num_rollout(Config& config, std::int64_t num_rows);

}  // namespace tandem
