// How a run's prompt files are read: the flags as options of data/prompts.h, the same for a run and
// for its dry run.
#pragma once

#include <cstdint>
#include <string>

#include "config/config.h"
#include "data/prompts.h"

namespace tandem {

// Of --prompt-data, for a model of that many tokens.
PromptFileOptions train_prompt_options(const Config& config, std::int64_t vocab_size);
// Of a file of --eval-prompt-data: its own keys and limit where they are given.
PromptFileOptions evaluation_prompt_options(const Config& config, const std::string& path,
                                            std::int64_t vocab_size);

}  // namespace tandem
