// See prompts.h.
#include "data/prompts.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "base/check.h"
#include "base/file.h"
#include "base/log.h"
#include "base/text.h"
#include "data/json_members.h"

namespace tandem {
namespace {

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
constexpr std::size_t kLoggedBadRows = 10;

// "file.jsonl@[2:5]" as the file and a slice of its rows with Python's meaning of a and b.
struct RowSlice {
  std::string file;
  std::optional<std::int64_t> begin, end;

  bool whole() const { return !begin && !end; }

  // Bounds for a file of `count` rows.
  std::pair<std::int64_t, std::int64_t> bounds(std::int64_t count) const {
    const auto place = [count](std::int64_t at) {
      return std::clamp<std::int64_t>(at < 0 ? at + count : at, 0, count);
    };
    const std::int64_t first = begin ? place(*begin) : 0;
    return {first, std::max(first, end ? place(*end) : count)};
  }
};

RowSlice parse_path(const std::string& path) {
  const std::size_t at = path.rfind("@[");
  if (at == path.npos || path.back() != ']') return {path, {}, {}};
  const std::string_view inside = std::string_view(path).substr(at + 2, path.size() - at - 3);
  const std::vector<std::string_view> parts = split(inside, ':');
  RowSlice slice{path.substr(0, at), {}, {}};
  bool good = parts.size() == 2;
  for (std::size_t i = 0; good && i < 2; ++i) {
    if (parts[i].empty()) continue;
    (i == 0 ? slice.begin : slice.end) = parse_int(parts[i]);
    good = parse_int(parts[i]).has_value();
  }
  TD_CHECK(good, "{}: '[{}]' is not a slice of rows; wanted '@[a:b]' with whole numbers", path,
           inside);
  return slice;
}

bool is_parquet(const std::string& file) { return file.ends_with(".parquet"); }

void check_kind_of_file(const std::string& file) {
  TD_CHECK(is_parquet(file) || file.ends_with(".jsonl"),
           "{}: unknown kind of prompt file; wanted a name ending in .jsonl or .parquet", file);
}

struct Line {
  std::int64_t number = 0;  // 1-based
  std::string_view text;    // without line end
  std::string fault = {};
};

// The non-blank lines; LF and CRLF both end a line.
std::vector<Line> non_blank_lines(std::string_view text) {
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  std::vector<Line> lines;
  std::int64_t number = 0;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = trim(text.substr(0, end));
    ++number;
    if (!line.empty()) lines.push_back({number, line});
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

std::string present_keys(const std::vector<JsonMember>& members) {
  std::string text;
  for (const JsonMember& member : members) {
    text += fmt::format("{}'{}'", text.empty() ? "" : ", ", member.key);
  }
  return text.empty() ? "none" : text;
}

// Each read_ function fills its part of the row and returns what is wrong, or "".
std::string read_input(std::string_view value, const PromptFileOptions& options, PromptRow& row) {
  const JsonKind kind = json_kind(value);
  if (kind == JsonKind::string) {
    row.text = json_string_text(value);
    if (row.text.empty()) return fmt::format("'{}' is an empty prompt", options.input_key);
    if (options.apply_chat_template) {
      row.messages_json = fmt::format(R"([{{"role":"user","content":{}}}])", value);
    }
    return {};
  }
  if (kind != JsonKind::array) {
    return fmt::format("'{}' is {}, wanted a string or a list of messages", options.input_key,
                       json_kind_name(kind));
  }
  const std::vector<std::string_view> messages = json_elements(value);
  if (messages.empty()) return fmt::format("'{}' is an empty list of messages", options.input_key);
  for (std::size_t i = 0; i < messages.size(); ++i) {
    if (json_kind(messages[i]) != JsonKind::object) {
      return fmt::format("'{}': message {} is {}, wanted an object with role and content",
                         options.input_key, i, json_kind_name(json_kind(messages[i])));
    }
  }
  if (!options.apply_chat_template) {
    return fmt::format("'{}' is a list of messages, which needs --apply-chat-template",
                       options.input_key);
  }
  row.messages_json = value;
  return {};
}

std::string read_label(std::string_view value, PromptRow& row) {
  row.label_json = value;
  switch (json_kind(value)) {
    case JsonKind::null:
      return {};
    case JsonKind::string:
      row.label = json_string_text(value);
      return {};
    default:
      row.label = value;
      return {};  // digits, or JSON, as they stand
  }
}

std::string read_metadata(std::string_view value, const PromptFileOptions& options,
                          PromptRow& row) {
  const JsonKind kind = json_kind(value);
  if (kind == JsonKind::null) return {};
  if (kind != JsonKind::object) {
    return fmt::format("'{}' is {}, wanted an object", options.metadata_key, json_kind_name(kind));
  }
  row.metadata_json = value;
  return {};
}

std::string read_tools(std::string_view value, const PromptFileOptions& options, PromptRow& row) {
  std::string tools(value);
  if (json_kind(value) == JsonKind::string) {
    tools = json_string_text(value);
    if (const std::string fault = json_fault(tools); !fault.empty()) {
      return fmt::format("'{}' is a string that is not JSON: {}", options.tool_key, fault);
    }
  }
  const JsonKind kind = json_kind(tools);
  if (kind == JsonKind::null) return {};
  if (kind != JsonKind::array) {
    return fmt::format("'{}' is {}, wanted a list of tools", options.tool_key,
                       json_kind_name(kind));
  }
  row.tools_json = std::move(tools);
  return {};
}

std::string read_row(std::string_view line, const PromptFileOptions& options, PromptRow& row) {
  if (std::string fault = json_fault(line); !fault.empty()) {
    return fmt::format("not valid JSON: {}", fault);
  }
  if (const JsonKind kind = json_kind(line); kind != JsonKind::object) {
    return fmt::format("the row is {}, wanted an object", json_kind_name(kind));
  }
  const std::vector<JsonMember> members = json_members(line);
  const auto missing = [&](std::string_view flag, const std::string& key) {
    return fmt::format("no key '{}' ({}); the row's keys are {}", key, flag, present_keys(members));
  };
  const std::string_view input = find_member(members, options.input_key);
  if (input.empty()) return missing("--input-key", options.input_key);
  std::string fault = read_input(input, options, row);
  if (fault.empty() && !options.label_key.empty()) {
    const std::string_view label = find_member(members, options.label_key);
    fault = label.empty() ? missing("--label-key", options.label_key) : read_label(label, row);
  }
  if (const auto metadata = find_member(members, options.metadata_key);
      fault.empty() && !metadata.empty()) {
    fault = read_metadata(metadata, options, row);
  }
  if (const auto tools = find_member(members, options.tool_key); fault.empty() && !tools.empty()) {
    fault = read_tools(tools, options, row);
  }
  return fault;
}

// Keeps the bad row, or stops at it.
void note_bad_row(const PromptFileOptions& options, std::int64_t line, const std::string& reason,
                  std::vector<BadRow>& bad) {
  const std::string file = parse_path(options.path).file;
  TD_CHECK(options.skip_bad_rows,
           "{}: {} {}: {}; mend the {} or take it out, or leave such rows out with "
           "--skip-bad-rows",
           file, row_name(file), line, reason, row_name(file));
  bad.push_back({line, reason});
}

// The rows of `lines`, which begin at row `first` of the file.
void read_rows(const std::vector<Line>& lines, std::int64_t first, const PromptFileOptions& options,
               PromptRows& result) {
  for (std::size_t i = 0; i < lines.size(); ++i) {
    PromptRow row;
    row.row = static_cast<std::uint64_t>(first) + i;
    row.line = lines[i].number;
    ++result.num_read;
    std::string fault = lines[i].fault;
    if (fault.empty()) fault = read_row(lines[i].text, options, row);
    if (fault.empty()) {
      result.rows.push_back(std::move(row));
    } else {
      note_bad_row(options, lines[i].number, fault, result.bad);
    }
  }
}

// The rows of a Parquet file, through the helper that has pyarrow.
PromptRows read_parquet(const PromptFileOptions& options) {
  const RowSlice slice = parse_path(options.path);
  PythonProcess helper({.name = slice.file + ": parquet helper",
                        .module = "tandem.parquet_helper",
                        .arguments = {},
                        .place = options.place,
                        .log_path = {},
                        .call_timeout_seconds = 600});
  const Json opened = helper.call(dump_json(Json{{"call", "open"}, {"path", slice.file}}));
  const auto columns = require<std::vector<std::string>>(opened, "columns", slice.file);
  for (const auto& [flag, key] :
       {std::pair("--input-key", &options.input_key), {"--label-key", &options.label_key}})
    TD_CHECK(key->empty() || std::ranges::count(columns, *key) > 0,
             "{}: no column '{}' ({}); its columns are {}", slice.file, *key, flag,
             fmt::join(columns, ", "));
  const auto [begin, end] = slice.bounds(require<std::int64_t>(opened, "num_rows", slice.file));
  PromptRows result;
  for (std::int64_t at = begin; at < end;) {
    const Json reply = helper.call(dump_json(
        Json{{"call", "rows"},
             {"begin", at},
             {"columns",
              {options.input_key, options.label_key, options.metadata_key, options.tool_key}}}));
    const auto texts = require<std::vector<std::string>>(reply, "lines", slice.file);
    const auto faults = require<Json>(reply, "faults", slice.file);
    TD_CHECK(!texts.empty(), "{}: the file ends at row {} of {}", slice.file, at, end);
    std::vector<Line> lines;
    const std::int64_t first = at;
    for (std::size_t i = 0; i < texts.size() && at < end; ++i, ++at) {
      lines.push_back(
          {.number = at + 1,
           .text = texts[i],
           .fault = optional_key<std::string>(faults, std::to_string(i), slice.file, "")});
    }
    read_rows(lines, first, options, result);
  }
  return result;
}

// Ids (and the templated text) of all rows, in order.
std::vector<TokenizedRow> tokenize(const std::vector<PromptRow>& rows,
                                   const PromptFileOptions& options, TokenizerProcess& tokenizer) {
  if (options.apply_chat_template) {
    std::vector<Conversation> conversations;
    for (const PromptRow& row : rows) conversations.push_back({row.messages_json, row.tools_json});
    TemplateOptions template_options;
    template_options.kwargs_json = options.apply_chat_template_kwargs;
    return tokenizer.apply_chat_template(conversations, template_options);
  }
  std::vector<std::string> texts;
  for (const PromptRow& row : rows) texts.push_back(row.text);
  std::vector<TokenizedRow> tokenized = tokenizer.encode(texts);
  for (std::size_t i = 0; i < texts.size(); ++i) tokenized[i].text = std::move(texts[i]);
  return tokenized;
}

void check_kwargs(const std::string& kwargs) {
  const std::string fault = json_fault(kwargs);
  TD_CHECK(fault.empty(), "--apply-chat-template-kwargs: not valid JSON: {}", fault);
  TD_CHECK(json_kind(kwargs) == JsonKind::object,
           "--apply-chat-template-kwargs: found {}, wanted an object such as "
           "'{{\"enable_thinking\": false}}'",
           json_kind_name(json_kind(kwargs)));
}

}  // namespace

PromptRows parse_prompt_rows(std::string_view text, const PromptFileOptions& options) {
  const RowSlice slice = parse_path(options.path);
  const std::vector<Line> lines = non_blank_lines(text);
  const auto [begin, end] = slice.bounds(static_cast<std::int64_t>(lines.size()));
  PromptRows result;
  read_rows({lines.begin() + begin, lines.begin() + end}, begin, options, result);
  return result;
}

PromptRows read_prompt_rows(const PromptFileOptions& options) {
  const std::string file = parse_path(options.path).file;
  check_kind_of_file(file);
  return is_parquet(file) ? read_parquet(options) : parse_prompt_rows(read_file(file), options);
}

std::string_view row_name(const std::string& file) { return is_parquet(file) ? "row" : "line"; }

std::string PromptSet::summary() const {
  return fmt::format(
      "{} prompts ({} rows read, {} bad, {}{})", prompts.size(), num_read, bad.size(), num_overlong,
      max_prompt_tokens > 0 ? fmt::format(" over {} tokens", max_prompt_tokens) : " too long");
}

PromptSet load_prompts(const PromptFileOptions& options, TokenizerProcess& tokenizer) {
  const std::string file = parse_path(options.path).file;
  if (options.apply_chat_template) check_kwargs(options.apply_chat_template_kwargs);
  PromptRows parsed = read_prompt_rows(options);
  if (options.first_rows > 0 && parsed.rows.size() > options.first_rows)
    parsed.rows.resize(options.first_rows);
  std::vector<TokenizedRow> tokenized = tokenize(parsed.rows, options, tokenizer);

  PromptSet set;
  set.num_read = parsed.num_read;
  set.bad = std::move(parsed.bad);
  set.max_prompt_tokens = options.max_prompt_tokens;
  const std::size_t limit = options.max_prompt_tokens > 0
                                ? static_cast<std::size_t>(options.max_prompt_tokens)
                                : std::numeric_limits<std::size_t>::max();
  for (std::size_t i = 0; i < tokenized.size(); ++i) {
    PromptRow& row = parsed.rows[i];
    TokenizedRow& result = tokenized[i];
    if (result.ok() && result.ids.empty()) result.error = "the prompt has no tokens";
    if (result.ok() && options.vocab_size > 0) {
      const TokenId most = *std::ranges::max_element(result.ids);
      if (most >= options.vocab_size)
        result.error = fmt::format(
            "token id {} of the tokenizer is outside the model's vocabulary of {}: the tokenizer "
            "is "
            "not this model's",
            most, options.vocab_size);
    }
    if (!result.ok()) {
      note_bad_row(options, row.line, result.error, set.bad);
    } else if (result.ids.size() > limit) {
      ++set.num_overlong;
    } else {
      set.prompts.push_back({row.row, std::move(result.text), std::move(row.label),
                             std::move(row.label_json), std::move(row.metadata_json), std::move(result.ids)});
    }
  }
  for (std::size_t i = 0; i < std::min(set.bad.size(), kLoggedBadRows); ++i) {
    TD_LOG(warn, "{}: {} {} skipped: {}", file, row_name(file), set.bad[i].line, set.bad[i].reason);
  }
  TD_LOG(info, "{}: {}", options.path, set.summary());
  TD_CHECK(options.may_be_empty || !set.prompts.empty(), "{}: nothing left to train on: {}{}",
           options.path, set.summary(),
           set.num_overlong > 0
               ? "; raise --rollout-max-prompt-len (and --rollout-max-context-len, if it is given, "
                 "which bounds it) or shorten the prompts"
               : "");
  return set;
}

}  // namespace tandem
