// Prompt files (JSONL, Parquet) and the order in which a run goes through them.
//
// A line or row is an object; the keys that hold prompt, label, metadata and tools are flags.
// Labels and metadata keep their bytes: a number's digits are never read as a double. A bad row
// stops the run with file, line and reason, unless rows are skipped, which is counted row by row.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "data/python_process.h"
#include "data/sample.h"
#include "data/tokenizer.h"

namespace tandem {

struct PromptFileOptions {
  std::string path;                       // --prompt-data; may end in "@[a:b]": rows a to b - 1
  std::string input_key = "input";        // string, or list of OpenAI messages
  std::string label_key;                  // string, number or any JSON; empty: rows have no label
  std::string metadata_key = "metadata";  // an object; the key may be absent
  std::string tool_key = "tools";         // a list, or a string that holds one; may be absent
  bool apply_chat_template = false;
  std::string apply_chat_template_kwargs = "{}";
  std::int64_t max_prompt_tokens = 0;  // --rollout-max-prompt-len; 0: no limit
  std::int64_t vocab_size = 0;  // the model's; a row with an id beyond it is bad; 0: any id goes
  bool skip_bad_rows = false;
  std::size_t first_rows = 0;            // template and tokenise only so many good rows; 0: all
  bool may_be_empty = false;             // it is no error if nothing is left
  PythonPlace place = project_python();  // for Parquet files
};

struct BadRow {
  std::int64_t line = 0;  // 1-based; of a Parquet file the row
  std::string reason;
};

// A line taken apart, before template and tokenizer.
struct PromptRow {
  std::uint64_t row = 0;  // 0-based among the non-blank lines of the file
  std::int64_t line = 0;
  std::string text;           // a string prompt
  std::string messages_json;  // a conversation; empty: text is used
  std::string tools_json;     // empty: none
  std::string label;               // as text
  std::string label_json = "null";  // as it stands in the file
  std::string metadata_json = "{}";
};

struct PromptRows {
  std::vector<PromptRow> rows;
  std::vector<BadRow> bad;    // only if bad rows are skipped
  std::int64_t num_read = 0;  // non-blank lines inside the slice
};

// Takes the text of a file apart; `path` begins every error. Pure: needs no tokenizer.
PromptRows parse_prompt_rows(std::string_view text, const PromptFileOptions& options);

// The rows of a file of either kind. Errors: a missing or unknown kind of file, the first bad row
// unless such rows are skipped.
PromptRows read_prompt_rows(const PromptFileOptions& options);

// What a row of the file is called: "line" or, of a Parquet file, "row".
std::string_view row_name(const std::string& file);

struct PromptSet {
  std::vector<Prompt> prompts;  // in the order of the file
  std::vector<BadRow> bad;
  std::int64_t num_read = 0;
  std::int64_t num_overlong = 0;  // rows over max_prompt_tokens after template and tools

  std::string summary() const;         // "256 prompts (300 rows read, 4 bad, 40 over 512 tokens)"
  std::int64_t max_prompt_tokens = 0;  // the limit that was applied
};

// Reads, templates, tokenises and filters. Errors: a missing or unknown kind of file, the first bad
// row (unless skipped), and a file of which nothing is left, with the counts.
PromptSet load_prompts(const PromptFileOptions& options, TokenizerProcess& tokenizer);

// The endless sequence of prompts: epoch after epoch, each a permutation of the file keyed by
// (seed, epoch), or the file's own order. The whole state is one number, so a resumed run continues
// with the very next row, across epoch borders too: no row is lost or doubled.
class PromptOrder {
 public:
  struct Drawn {
    std::uint64_t counter = 0;  // running number of this draw, the group's prompt id
    std::uint64_t index = 0;    // which prompt
  };

  PromptOrder(std::uint64_t num_prompts, std::uint64_t seed, bool shuffle);

  std::vector<Drawn> next(std::int64_t count);

  std::uint64_t num_drawn() const { return counter_; }
  std::uint64_t epoch() const { return counter_ / num_prompts_; }  // of the next draw

  // For state.json. restore throws Error if the saved run had another file size, seed or shuffling.
  Json save() const;
  void restore(const Json& state, std::string_view where);

 private:
  void make_epoch(std::uint64_t epoch);

  std::uint64_t num_prompts_;
  std::uint64_t seed_;
  bool shuffle_;
  std::uint64_t counter_ = 0;
  std::uint64_t made_epoch_ = 0;
  std::vector<std::uint64_t> permutation_;  // of made_epoch_; empty: not made yet
};

}  // namespace tandem
