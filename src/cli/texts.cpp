// Texts and JSONL rows to token ids, with file and line in every fault.
#include "cli/texts.h"

#include <sstream>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"

namespace tandem {

std::vector<TokenRow> tokenize_prompts(const std::vector<std::string>& texts,
                                       bool apply_chat_template, TokenizerProcess& tokenizer) {
  std::vector<Conversation> conversations;
  if (apply_chat_template)
    for (const auto& text : texts)
      conversations.push_back(
          {.messages_json = dump_json(OrderedJson::array({{{"role", "user"}, {"content", text}}})),
           .tools_json = ""});
  const auto rows =
      apply_chat_template ? tokenizer.apply_chat_template(conversations) : tokenizer.encode(texts);
  std::vector<TokenRow> out;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    TD_CHECK(rows[i].ok(), "--prompt: text {}: {}", i + 1, rows[i].error);
    out.push_back({apply_chat_template ? rows[i].text : texts[i], rows[i].ids});
  }
  return out;
}

std::vector<TokenRow> read_token_rows(const std::string& path, TokenizerProcess& tokenizer) {
  std::vector<TokenRow> rows;
  std::vector<std::string> texts;
  std::vector<std::size_t> waiting;
  std::istringstream lines(read_file(path));
  std::string line;
  for (std::size_t number = 1; std::getline(lines, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string where = fmt::format("{}: line {}", path, number);
    const Json json = parse_json(line, where);
    TD_CHECK(json.is_object() && json.contains("input_ids") != json.contains("text"),
             "{}: an object with either input_ids or text wanted", where);
    if (json.contains("text")) {
      texts.push_back(require<std::string>(json, "text", where));
      waiting.push_back(rows.size());
      rows.push_back({texts.back(), {}});
    } else {
      rows.push_back({"", require<std::vector<TokenId>>(json, "input_ids", where)});
    }
  }
  const auto encoded = tokenizer.encode(texts);
  for (std::size_t i = 0; i < encoded.size(); ++i) {
    TD_CHECK(encoded[i].ok(), "{}: {}", path, encoded[i].error);
    rows[waiting[i]].ids = encoded[i].ids;
  }
  TD_CHECK(!rows.empty(), "{}: no rows found, lines with input_ids or text wanted", path);
  return rows;
}

}  // namespace tandem
