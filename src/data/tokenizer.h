// Tokenizer and chat template of a Hugging Face folder, exactly as the ecosystem's own libraries do
// it: a Python process (python/tandem/tokenizer_helper.py) asked in batches. It belongs to loading
// and to rewards, not to the engine's inner loop.
//
// A row that fails (a template that raises, a text that is not valid) carries its own error; the
// other rows of the batch stand. A failure of the whole call is an Error, see python_process.h.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "data/python_process.h"
#include "data/sample.h"

namespace tandem {

struct TokenizerOptions {
  std::string folder = {};              // --hf-checkpoint
  std::string chat_template_path = {};  // --chat-template-path; empty: the folder's own
  PythonPlace place = project_python();
  std::string log_path = {};
  double call_timeout_seconds = 120;
};

struct TokenizedRow {
  std::string text;
  std::vector<TokenId> ids;
  std::string error;  // empty: the row is good

  bool ok() const { return error.empty(); }
};

// One conversation as JSON text, passed on byte for byte: the order of keys is part of the prompt.
struct Conversation {
  std::string messages_json;  // an array of OpenAI messages
  std::string tools_json;     // an array of tools; empty: none
};

struct TemplateOptions {
  std::string kwargs_json = "{}";  // --apply-chat-template-kwargs, an object
  bool add_generation_prompt = true;
};

class TokenizerProcess {
 public:
  explicit TokenizerProcess(const TokenizerOptions& options);

  // One result per row, in order; calls are cut so that one stays within its deadline.
  std::vector<TokenizedRow> encode(std::span<const std::string> texts,
                                   bool add_special_tokens = false);
  std::vector<TokenizedRow> decode(std::span<const std::vector<TokenId>> ids,
                                   bool skip_special_tokens = true);  // fills text only
  std::vector<TokenizedRow> apply_chat_template(std::span<const Conversation> conversations,
                                                const TemplateOptions& options = {});

  // {"vocab_size", "special_tokens", "templates"}; a first call that shows faults of the folder
  // early.
  Json info();

  PythonProcess& process() { return process_; }

 private:
  PythonProcess process_;
};

}  // namespace tandem
