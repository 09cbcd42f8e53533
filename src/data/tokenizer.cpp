// See tokenizer.h.
#include "data/tokenizer.h"

#include <algorithm>
#include <functional>
#include <string_view>

#include <fmt/ranges.h>

#include "base/check.h"

namespace tandem {
namespace {

constexpr std::size_t kMaxRowsPerCall = 1024;
constexpr std::size_t kMaxBytesPerCall = 4u << 20;

PythonProcessOptions process_options(const TokenizerOptions& options) {
  PythonProcessOptions result;
  result.name = "tokenizer";
  result.module = "tandem.tokenizer_helper";
  result.arguments = {"--folder", options.folder};
  if (!options.chat_template_path.empty()) {
    result.arguments.insert(result.arguments.end(),
                            {"--chat-template", options.chat_template_path});
  }
  result.place = options.place;
  result.log_path = options.log_path;
  result.call_timeout_seconds = options.call_timeout_seconds;
  return result;
}

TokenizedRow read_row(const Json& json) {
  TokenizedRow row;
  row.error = optional_key<std::string>(json, "error", "tokenizer: reply row", "");
  row.text = optional_key<std::string>(json, "text", "tokenizer: reply row", "");
  row.ids = optional_key<std::vector<TokenId>>(json, "ids", "tokenizer: reply row", {});
  return row;
}

// Asks for `count` rows in calls of bounded size: request = head + rows joined by ',' + tail.
std::vector<TokenizedRow> ask(PythonProcess& process, std::size_t count, std::string_view head,
                              std::string_view tail,
                              const std::function<std::string(std::size_t)>& row_json) {
  std::vector<TokenizedRow> results;
  results.reserve(count);
  while (results.size() < count) {
    std::string request(head);
    std::size_t rows = 0;
    for (std::size_t i = results.size();
         i < count && rows < kMaxRowsPerCall && request.size() < kMaxBytesPerCall; ++i, ++rows) {
      if (rows > 0) request.push_back(',');
      request.append(row_json(i));
    }
    request.append(tail);
    const Json reply = process.call(request);
    const auto found = require<std::vector<Json>>(reply, "rows", "tokenizer: reply");
    TD_CHECK(found.size() == rows, "tokenizer: {} rows in the reply to {} rows", found.size(),
             rows);
    std::transform(found.begin(), found.end(), std::back_inserter(results), read_row);
  }
  return results;
}

}  // namespace

TokenizerProcess::TokenizerProcess(const TokenizerOptions& options)
    : process_(process_options(options)) {}

std::vector<TokenizedRow> TokenizerProcess::encode(std::span<const std::string> texts,
                                                   bool add_special_tokens) {
  const std::string tail =
      fmt::format(R"(],"add_special_tokens":{}}})", add_special_tokens ? "true" : "false");
  return ask(process_, texts.size(), R"({"call":"encode","texts":[)", tail,
             [&](std::size_t i) { return dump_json(Json(texts[i])); });
}

std::vector<TokenizedRow> TokenizerProcess::decode(std::span<const std::vector<TokenId>> ids,
                                                   bool skip_special_tokens) {
  const std::string tail =
      fmt::format(R"(],"skip_special_tokens":{}}})", skip_special_tokens ? "true" : "false");
  return ask(process_, ids.size(), R"({"call":"decode","ids":[)", tail,
             [&](std::size_t i) { return fmt::format("[{}]", fmt::join(ids[i], ",")); });
}

std::vector<TokenizedRow> TokenizerProcess::apply_chat_template(
    std::span<const Conversation> conversations, const TemplateOptions& options) {
  const std::string tail =
      fmt::format(R"(],"kwargs":{},"add_generation_prompt":{}}})", options.kwargs_json,
                  options.add_generation_prompt ? "true" : "false");
  return ask(process_, conversations.size(), R"({"call":"template","rows":[)", tail,
             [&](std::size_t i) {
               const Conversation& row = conversations[i];
               return fmt::format(R"({{"messages":{},"tools":{}}})", row.messages_json,
                                  row.tools_json.empty() ? "null" : row.tools_json);
             });
}

Json TokenizerProcess::info() { return process_.call(R"({"call":"info"})"); }

}  // namespace tandem
