// The rows of the commands beside `tandem train`; the second part of config/flags.h, which alone
// includes it, after the sections that these commands share with training.
#pragma once

#include "config/config.h"
#include "config/table.h"

namespace tandem {

template <>
inline constexpr auto table<GenerateConfig> = std::tuple{
    Field{"prompt", &GenerateConfig::prompt, "Texts to continue; this or --input is required."},
    Field{"input", &GenerateConfig::input, "JSONL file with text or input_ids in each row."},
    Field{"apply_chat_template", &GenerateConfig::apply_chat_template,
          "Make each text a user message of the model's chat template."},
    Field{"n", &GenerateConfig::n, "Answers to each prompt.", {.at_least = 1}},
    Field{"max_new_tokens",
          &GenerateConfig::max_new_tokens,
          "Most new tokens of an answer.",
          {.at_least = 1}},
    Field{"min_new_tokens",
          &GenerateConfig::min_new_tokens,
          "New tokens before an answer may end.",
          {.at_least = 0}},
    Field{"temperature",
          &GenerateConfig::temperature,
          "Temperature of sampling; 0 is greedy.",
          {.at_least = 0}},
    Field{"top_p",
          &GenerateConfig::top_p,
          "Sample among the likeliest tokens that together have this probability.",
          {.at_least = 0, .at_most = 1, .open = true}},
    Field{"top_k",
          &GenerateConfig::top_k,
          "Sample among the k likeliest tokens; -1: all.",
          {.at_least = -1}},
    Field{"min_p",
          &GenerateConfig::min_p,
          "Sample among tokens of at least this share of the largest probability.",
          {.at_least = 0, .at_most = 1}},
    Field{"frequency_penalty",
          &GenerateConfig::frequency_penalty,
          "Taken from a token's logit each time that it stands in the answer.",
          {.at_least = -2, .at_most = 2}},
    Field{"presence_penalty",
          &GenerateConfig::presence_penalty,
          "Taken from a token's logit if it stands in the answer.",
          {.at_least = -2, .at_most = 2}},
    Field{"repetition_penalty",
          &GenerateConfig::repetition_penalty,
          "Divides a positive logit of a token in the answer, multiplies a negative one; 1: none.",
          {.at_least = 0, .at_most = 2, .open = true}},
    Field{"stop", &GenerateConfig::stop,
          "Texts that end an answer, also across the borders of tokens; they are cut from its text."},
    Field{"stop_token_ids",
          &GenerateConfig::stop_token_ids,
          "Token ids that end an answer, beside the model's own.",
          {.at_least = 0, .at_most = 2147483647}},
    Field{"ignore_eos", &GenerateConfig::ignore_eos, "Do not stop at the model's end token."},
    Field{"seed", &GenerateConfig::seed, "Seed of sampling.", {.at_least = 0}},
    Field{"model", &GenerateConfig::model, "Model"},
    Field{"compute", &GenerateConfig::compute, "Device"},
    Field{"engine", &GenerateConfig::engine, "Engine"}};

template <>
inline constexpr auto table<ScoreConfig> = std::tuple{
    Field{"input", &ScoreConfig::input, "JSONL file with text or input_ids in each row. Required."},
    Field{"through",
          &ScoreConfig::through,
          "Whose forward computes the log-probabilities.",
          {.now = "engine|trainer", .why = "use --through engine or trainer"}},
    Field{"gradients", &ScoreConfig::gradients,
          "Add each row's mean loss and gradient norms by parameter (trainer only)."},
    Field{"model", &ScoreConfig::model, "Model"},
    Field{"compute", &ScoreConfig::compute, "Device"}};

template <>
inline constexpr auto table<SelftestConfig> = std::tuple{
    Field{"tokens",
          &SelftestConfig::tokens,
          "Tokens to compare, roughly, over all ways.",
          {.at_least = 1}},
    Field{"max_new_tokens",
          &SelftestConfig::max_new_tokens,
          "Tokens of an answer.",
          {.at_least = 1}},
    Field{"seed", &SelftestConfig::seed, "Seed of prompts and sampling.", {.at_least = 0}},
    Field{"model", &SelftestConfig::model, "Model"},
    Field{"compute", &SelftestConfig::compute, "Device"}};

template <>
inline constexpr auto table<ServeConfig> = std::tuple{
    Field{"host", &ServeConfig::host, "Address to listen on."},
    Field{"port",
          &ServeConfig::port,
          "Port to listen on; 0: any free one.",
          {.at_least = 0, .at_most = 65535}},
    Field{"seed", &ServeConfig::seed, "Seed of requests that bring none.", {.at_least = 0}},
    Field{"model", &ServeConfig::model, "Model"},
    Field{"compute", &ServeConfig::compute, "Device"},
    Field{"engine", &ServeConfig::engine, "Engine"}};

}  // namespace tandem
