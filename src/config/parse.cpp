// Assignments meet the table: each name is a row, a Miles flag, a family of them, or unknown.
#include "config/parse.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "base/check.h"
#include "base/text.h"
#include "config/assignments.h"
#include "config/miles_flags.h"

namespace tandem {
namespace {

std::string underscored(std::string_view flag) {
  std::string name(flag);
  std::ranges::replace(name, '-', '_');
  return name;
}

// Levenshtein's distance.
std::size_t edits_between(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({substituted, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

// All of one parse: the table, what has been set and from where, and what is wrong.
class Parse {
 public:
  Parse(const std::vector<FlagRow>& rows, const std::vector<FlagRow>& standard, bool miles)
      : rows_(rows), standard_(standard), miles_(miles) {}

  void apply(const Assignment& assignment);
  Parsed finish(bool help);
  std::vector<std::string>& faults() { return parsed_.faults; }

 private:
  const FlagRow* find_row(std::string_view name) const;
  const FlagRow* find_inverse(std::string_view name) const;
  const MilesFlag* find_miles(std::string_view name) const;
  void apply_row(const FlagRow& row, const Assignment& assignment, bool inverted);
  void apply_miles(const MilesFlag& flag, const Assignment& assignment, bool inverted);
  void apply_prefix(const MilesPrefix& prefix, const Assignment& assignment);
  void unknown(const Assignment& assignment);
  void say(const Assignment& assignment, Kind kind, std::string_view why);

  const std::vector<FlagRow>& rows_;
  const std::vector<FlagRow>& standard_;
  bool miles_;
  std::map<std::string_view, std::string> origins_;  // of rows that were set
  std::set<std::string_view> unreadable_;            // rows whose value keeps its default
  Parsed parsed_;
};

const FlagRow* Parse::find_row(std::string_view name) const {
  for (const FlagRow& row : rows_) {
    if (row.name == name) return &row;
  }
  if (!miles_) return nullptr;  // Miles's spellings belong to its command
  for (const FlagRow& row : rows_) {
    if (std::ranges::count(alternatives(row.options.alias), name) > 0) return &row;
  }
  return nullptr;
}

const FlagRow* Parse::find_inverse(std::string_view name) const {
  const auto found = std::ranges::find_if(
      rows_, [&](const FlagRow& row) { return !name.empty() && row.options.inverse == name; });
  return found == rows_.end() ? nullptr : &*found;
}

const MilesFlag* Parse::find_miles(std::string_view name) const {
  if (!miles_) return nullptr;
  const auto found = std::ranges::find(miles_flags(), name, &MilesFlag::name);
  return found == miles_flags().end() ? nullptr : &*found;
}

void Parse::apply(const Assignment& assignment) {
  const std::string& name = assignment.name;
  if (const FlagRow* row = find_row(name)) {
    if (!assignment.section.empty() && assignment.section != row->section) {
      parsed_.faults.push_back(fmt::format(
          "{}: this key belongs to {}; move it there or to the "
          "top of the file",
          assignment.origin,
          row->section.empty() ? std::string("no table") : fmt::format("[{}]", row->section)));
      return;
    }
    return apply_row(*row, assignment, false);
  }
  if (const FlagRow* row = find_inverse(name)) return apply_row(*row, assignment, true);
  if (const MilesFlag* flag = find_miles(name)) return apply_miles(*flag, assignment, false);
  if (name.starts_with("no_")) {
    const std::string_view positive = std::string_view(name).substr(3);
    const FlagRow* row = find_row(positive);
    if (row != nullptr && is_switch(*row)) return apply_row(*row, assignment, true);
    if (const FlagRow* off = find_inverse(positive)) return apply_row(*off, assignment, false);
    const MilesFlag* flag = find_miles(positive);
    if (flag != nullptr && flag->takes == Takes::nothing) {
      return apply_miles(*flag, assignment, true);
    }
  }
  if (miles_) {
    const std::string_view bare = std::string_view(name).substr(name.starts_with("no_") ? 3 : 0);
    for (const MilesPrefix& prefix : miles_prefixes()) {
      if (bare.starts_with(prefix.prefix)) return apply_prefix(prefix, assignment);
    }
  }
  unknown(assignment);
}

void Parse::apply_row(const FlagRow& row, const Assignment& assignment, bool inverted) {
  std::vector<std::string> words = assignment.words;
  if (is_switch(row)) {
    if (words.empty()) words = {"true"};
    if (inverted && words.size() == 1 && (words[0] == "true" || words[0] == "false")) {
      words[0] = words[0] == "true" ? "false" : "true";
    }
  }
  origins_[row.name] = assignment.origin;
  const auto wanted = words.empty() && !is_list(row)
                          ? std::optional<std::string>("a value: " + value_hint(row))
                          : set_from_words(row, words);
  if (wanted) {
    parsed_.faults.push_back(
        words.empty()
            ? fmt::format("{}: found no value, wanted {}", assignment.origin, *wanted)
            : fmt::format("{}: found '{}', wanted {}", assignment.origin,
                          one_line(fmt::format("{}", fmt::join(words, " ")), 80), *wanted));
    unreadable_.insert(row.name);
  } else {
    unreadable_.erase(row.name);
  }
}

void Parse::apply_miles(const MilesFlag& flag, const Assignment& assignment, bool inverted) {
  const std::vector<std::string>& words = assignment.words;
  const bool is_bool = flag.takes == Takes::nothing;
  const bool fits = is_bool || flag.takes == Takes::optional_one ? words.size() <= 1
                    : flag.takes == Takes::one                   ? words.size() == 1
                                                                 : true;
  std::string value = fmt::format("{}", fmt::join(words, " "));
  if (!fits || (is_bool && !words.empty() && value != "true" && value != "false")) {
    parsed_.faults.push_back(fmt::format("{}: found '{}', wanted {}", assignment.origin,
                                         one_line(value, 80),
                                         is_bool ? "no value (it is a switch)" : "one value"));
    return;
  }
  if (is_bool) value = (value != "false") != inverted ? "true" : "false";
  // A bare flag whose value may be left out is still given; an empty list is not.
  const bool bare = flag.takes == Takes::optional_one && words.empty();
  if (!bare && same_value(value, flag.standard)) return;
  say(assignment, flag.kind, flag.why);
}

void Parse::apply_prefix(const MilesPrefix& prefix, const Assignment& assignment) {
  const bool off = assignment.words.size() == 1 && assignment.words[0] == "false";
  if (!off) say(assignment, prefix.kind, prefix.why);
}

void Parse::say(const Assignment& assignment, Kind kind, std::string_view why) {
  if (kind == Kind::refused) {
    const std::string value = fmt::format("{}", fmt::join(assignment.words, " "));
    parsed_.faults.push_back(fmt::format("{}{}: not built yet: {}", assignment.origin,
                                         value.empty() ? "" : " " + one_line(value, 60), why));
  } else {
    parsed_.notes.push_back(fmt::format("{} changes nothing: {}", assignment.origin, why));
  }
}

void Parse::unknown(const Assignment& assignment) {
  std::string_view nearest;
  std::size_t fewest = std::max<std::size_t>(2, assignment.name.size() / 4) + 1;
  const auto look_at = [&](std::string_view name) {
    const std::size_t edits = edits_between(assignment.name, name);
    if (edits < fewest) {
      fewest = edits;
      nearest = name;
    }
  };
  for (const FlagRow& row : rows_) look_at(row.name);
  if (miles_) {
    for (const MilesFlag& flag : miles_flags()) look_at(flag.name);
  }
  const bool is_flag = assignment.origin.starts_with("--");
  std::string spelled(nearest);
  if (is_flag) {
    std::ranges::replace(spelled, '_', '-');
    spelled.insert(0, "--");
  }
  parsed_.faults.push_back(fmt::format(
      "{}: unknown {}; {}", assignment.origin, is_flag ? "flag" : "key",
      nearest.empty() ? "--help lists what there is" : "did you mean " + spelled + "?"));
}

Parsed Parse::finish(bool help) {
  parsed_.help = help;
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const FlagRow& row = rows_[i];
    const auto origin = origins_.find(row.name);
    if (origin == origins_.end() || unreadable_.contains(row.name)) continue;
    if (const auto fault = row_fault(row, standard_[i], origin->second)) {
      parsed_.faults.push_back(*fault);
    } else if (row.options.kind == Kind::no_effect && show(row) != show(standard_[i])) {
      parsed_.notes.push_back(
          fmt::format("{} changes nothing: {}", origin->second, row.options.why));
    }
  }
  return std::move(parsed_);
}

// "--lr" of "--lr: found …", "lr" of "run.toml: optimizer.lr (line 3): …": the name of the flag.
std::string flag_of(std::string_view fault) {
  const std::size_t start = fault.starts_with("--") ? 2 : fault.find(": ");
  if (start == std::string_view::npos) return std::string(fault);
  std::string_view name = fault.substr(start);
  if (name.starts_with(": ")) name = name.substr(2);
  name = name.substr(0, name.find_first_of(": ("));
  if (const std::size_t dot = name.rfind('.'); dot != std::string_view::npos) {
    name = name.substr(dot + 1);
  }
  std::string flag = underscored(name);
  return flag.starts_with("no_") ? flag.substr(3) : flag;
}

}  // namespace

std::vector<Assignment> read_words(std::span<const std::string> words,
                                   std::vector<std::string>& faults) {
  std::vector<Assignment> assignments;
  for (const std::string& word : words) {
    if (word == "-h") {
      assignments.push_back({"help", "-h", "", {}});
    } else if (word.size() > 2 && word.starts_with("--")) {
      const std::size_t equals = std::min(word.find('='), word.size());
      const std::string flag = word.substr(0, equals);
      assignments.push_back({underscored(flag.substr(2)), flag, "", {}});
      if (equals < word.size()) assignments.back().words.push_back(word.substr(equals + 1));
    } else if (assignments.empty()) {
      faults.push_back(fmt::format("'{}': wanted a flag (--name) first; --help lists them", word));
    } else {
      assignments.back().words.push_back(word);
    }
  }
  return assignments;
}

Parsed parse_rows(std::span<const std::string> words, const std::vector<FlagRow>& rows,
                  const std::vector<FlagRow>& standard, bool miles) {
  Parse parse(rows, standard, miles);
  bool help = false;
  std::vector<Assignment> flags = read_words(words, parse.faults());
  for (const Assignment& flag : flags) {
    if (flag.name == "help") help = true;
    if (flag.name != "config") continue;
    if (flag.words.size() != 1) {
      parse.faults().push_back(
          fmt::format("--config: found {} paths, wanted one TOML file", flag.words.size()));
      continue;
    }
    for (const Assignment& key : read_toml(flag.words[0], parse.faults())) parse.apply(key);
  }
  for (const Assignment& flag : flags) {
    if (flag.name != "config" && flag.name != "help") parse.apply(flag);
  }
  return parse.finish(help);
}

void add_faults(Parsed& parsed, const std::vector<std::string>& faults) {
  std::set<std::string> named;
  for (const std::string& fault : parsed.faults) named.insert(flag_of(fault));
  for (const std::string& fault : faults) {
    if (!named.contains(flag_of(fault))) parsed.faults.push_back(fault);
  }
}

std::string faults_text(const std::vector<std::string>& faults) {
  if (faults.size() == 1) return faults[0];
  std::string text = fmt::format("{} faults in the configuration:", faults.size());
  for (const std::string& fault : faults) text += "\n  " + fault;
  return text;
}

void throw_faults(const std::vector<std::string>& faults) {
  if (!faults.empty()) throw Error(faults_text(faults));
}

}  // namespace tandem
