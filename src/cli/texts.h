// Rows of token ids for the commands that work on texts: from the command line or a JSONL file.
#pragma once

#include <string>
#include <vector>

#include "data/sample.h"
#include "data/tokenizer.h"

namespace tandem {

struct TokenRow {
  std::string text;  // empty when the row came as ids
  std::vector<TokenId> ids;
};

// Texts, each as one user message when apply_chat_template.
std::vector<TokenRow> tokenize_prompts(const std::vector<std::string>& texts,
                                       bool apply_chat_template, TokenizerProcess& tokenizer);

// Lines with `input_ids` or `text`. Errors name file and line.
std::vector<TokenRow> read_token_rows(const std::string& path, TokenizerProcess& tokenizer);

}  // namespace tandem
