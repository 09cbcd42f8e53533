// The one place that sees toml++: a file becomes assignments, its exceptions become faults.
//
// Values are given on as words, so that a number in a file is read by the same code as on the
// command line. A table inside a table is a JSON object (--apply-chat-template-kwargs).
#include <toml++/toml.h>

#include <filesystem>
#include <sstream>

#include "base/check.h"
#include "base/text.h"
#include "config/assignments.h"

namespace tandem {
namespace {

std::string to_word(const toml::node& node) {
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* number = node.as_integer()) return fmt::format("{}", number->get());
  if (const auto* number = node.as_floating_point()) return fmt::format("{}", number->get());
  if (const auto* flag = node.as_boolean()) return flag->get() ? "true" : "false";
  std::ostringstream text;
  if (const auto* object = node.as_table()) {
    text << toml::json_formatter{*object};
  } else {
    node.visit([&](const auto& value) { text << value; });
  }
  return text.str();
}

std::string underscored(std::string_view key) {
  std::string name(key);
  for (char& c : name) c = c == '-' ? '_' : c;
  return name;
}

// One key of `section` (empty: of the file).
Assignment read_key(const std::string& path, const std::string& section, std::string_view key,
                    const toml::node& node) {
  const std::string dotted = section.empty() ? std::string(key) : section + "." + std::string(key);
  Assignment assignment{underscored(key),
                        fmt::format("{}: {} (line {})", path, dotted, node.source().begin.line),
                        section,
                        {}};
  if (const auto* list = node.as_array()) {
    for (const auto& item : *list) assignment.words.push_back(to_word(item));
  } else {
    assignment.words.push_back(to_word(node));
  }
  return assignment;
}

toml::table parse_file(const std::string& path, std::vector<std::string>& faults) {
  if (std::filesystem::is_directory(path)) {  // toml++ would read it as an empty file
    faults.push_back(fmt::format("--config: '{}' is a folder, a TOML file wanted", path));
    return {};
  }
  try {
    return toml::parse_file(path);
  } catch (const toml::parse_error& error) {
    if (!std::filesystem::is_regular_file(path)) {
      faults.push_back(
          fmt::format("--config: '{}' is not a file that can be read; give the path "
                      "of a TOML file",
                      path));
    } else {
      faults.push_back(fmt::format("{}: not valid TOML at line {}, column {}: {}", path,
                                   error.source().begin.line, error.source().begin.column,
                                   error.description()));
    }
    return {};
  }
}

}  // namespace

std::vector<Assignment> read_toml(const std::string& path, std::vector<std::string>& faults) {
  std::vector<Assignment> assignments;
  const toml::table file = parse_file(path, faults);
  for (const auto& [key, node] : file) {
    const auto* section = node.as_table();
    if (section == nullptr || section->is_inline()) {
      assignments.push_back(read_key(path, "", key.str(), node));
      continue;
    }
    for (const auto& [inner_key, inner] : *section) {
      assignments.push_back(read_key(path, std::string(key.str()), inner_key.str(), inner));
    }
  }
  return assignments;
}

}  // namespace tandem
