// Help text and docs/flags.md: the table for people, in two forms.
#include "config/docs.h"

#include <fmt/format.h>

#include <algorithm>

#include "config/miles_flags.h"
#include "config/parse.h"

namespace tandem {
namespace {

std::string flag_of(std::string_view name) {
  std::string flag = "--" + std::string(name);
  std::ranges::replace(flag, '_', '-');
  return flag;
}

bool is_on(const FlagRow& row) { return is_switch(row) && show(row) == "true"; }

// The flag as one would type it to change the default.
std::string usage_of(const FlagRow& row) {
  if (is_on(row)) return flag_of("no_" + std::string(row.name));
  const std::string hint = value_hint(row);
  return flag_of(row.name) + (hint.empty() ? "" : " " + hint);
}

// `text` in lines of at most `width` bytes, each after `indent` spaces.
std::string wrapped(std::string_view text, std::size_t indent, std::size_t width) {
  std::string lines;
  while (!text.empty()) {
    std::size_t cut = text.size();
    if (cut > width) {
      cut = text.rfind(' ', width);
      if (cut == std::string_view::npos || cut == 0) cut = width;
    }
    lines += std::string(indent, ' ') + std::string(text.substr(0, cut)) + "\n";
    text.remove_prefix(std::min(text.size(), cut + (cut < text.size() ? 1 : 0)));
  }
  return lines;
}

std::string cell(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '|') escaped += '\\';
    escaped += c;
  }
  return escaped;
}

std::string_view kind_of(const FlagRow& row) {
  switch (row.options.kind) {
    case Kind::no_effect:
      return "no effect";
    case Kind::refused:
      return "refused";
    case Kind::honoured:
      break;
  }
  return row.options.now.empty() ? "" : "in part";
}

std::string bounds_of(const FlagRow& row) {
  const double low = row.options.at_least;
  const double high = row.options.at_most;
  std::string text;
  if (low > -std::numeric_limits<double>::infinity()) {
    text += fmt::format(" {} {}.", row.options.open ? "Above" : "At least", low);
  }
  if (high < std::numeric_limits<double>::infinity()) text += fmt::format(" At most {}.", high);
  return text;
}

std::string meaning_of(const FlagRow& row) {
  std::string text = std::string(row.help) + bounds_of(row);
  if (!row.options.now.empty()) {
    text += fmt::format(" Built so far: {}.", fmt::join(alternatives(row.options.now), ", "));
  }
  if (row.options.kind != Kind::honoured) text += fmt::format(" *{}*", row.options.why);
  for (const std::string_view alias : alternatives(row.options.alias)) {
    text += fmt::format(" Also `{}`.", flag_of(alias));
  }
  if (!row.options.inverse.empty()) {
    text += fmt::format(" Off: `{}`.", flag_of(row.options.inverse));
  }
  return text;
}

std::string sections_markdown(const std::vector<FlagRow>& rows, std::string_view level) {
  std::string text;
  std::string_view section = "?";
  for (const FlagRow& row : rows) {
    if (row.section != section) {
      section = row.section;
      if (!section.empty()) text += fmt::format("\n{} {} (`[{}]`)\n", level, row.title, section);
      text += "\n| flag | default | kind | meaning |\n| --- | --- | --- | --- |\n";
    }
    const std::string value = show(row);
    const std::string hint = value_hint(row);
    text += fmt::format(
        "| `{}`{} | {} | {} | {} |\n", flag_of(row.name), hint.empty() ? "" : cell(" " + hint),
        value.empty() ? "" : "`" + cell(value) + "`", kind_of(row), cell(meaning_of(row)));
  }
  return text;
}

std::string differences_markdown(const std::vector<FlagRow>& rows) {
  std::string text = "\n| flag | Tandem | Miles |\n| --- | --- | --- |\n";
  for (const FlagRow& row : rows) {
    if (row.options.miles.empty()) continue;
    const std::string value = show(row);
    text += fmt::format("| `{}` | {} | {} |\n", flag_of(row.name),
                        value.empty() ? "derived (see above)" : value, row.options.miles);
  }
  return text;
}

// One row of flags that share area, kind and reason; they stand together in the list.
std::string miles_markdown(Kind kind) {
  std::string text = "\n| area | flags | why |\n| --- | --- | --- |\n";
  const auto& flags = miles_flags();
  for (std::size_t i = 0; i < flags.size();) {
    std::string together;
    std::size_t end = i;
    for (; end < flags.size() && flags[end].why == flags[i].why &&
           flags[end].area == flags[i].area && flags[end].kind == flags[i].kind;
         ++end) {
      const MilesFlag& flag = flags[end];
      together += fmt::format("{}`{}`", together.empty() ? "" : ", ", flag_of(flag.name));
      if (kind == Kind::refused && !flag.standard.empty() && flag.standard != "false") {
        together += fmt::format(" ({})", flag.standard);
      }
    }
    if (flags[i].kind == kind) {
      text += fmt::format("| {} | {} | {} |\n", flags[i].area, together, cell(flags[i].why));
    }
    i = end;
  }
  for (const MilesPrefix& prefix : miles_prefixes()) {
    if (prefix.kind != kind) continue;
    text += fmt::format("| Family | any other `{}*` | {} |\n", flag_of(prefix.prefix), prefix.why);
  }
  return text;
}

constexpr std::string_view kOpening = R"(# Flags

This page is made from the table of flags: `tandem flags --markdown > docs/flags.md`.

Flags are those of `tandem train` unless a section says otherwise. Names and meanings are Miles's
wherever Miles has the flag. A switch has a `--no-` form; `--name=value` and `--name value` are the
same; of two equal flags the last one counts. `--config FILE` reads a TOML file whose keys are the
flags' names (dashes or underscores), at the top or in the section's table; flags on the command
line win over it. All faults of a command are reported at once, before anything starts.

The column *kind* is empty for a flag that is followed. *No effect*: accepted, and it cannot change
a result here. *Refused*: it would change results or placement and is not built yet; only the
default is accepted. *In part*: some of its values are built.
)";

}  // namespace

std::string help_rows(std::string_view usage, const std::vector<FlagRow>& standard, bool miles) {
  std::string text(usage);
  if (!text.empty() && text.back() != '\n') text += '\n';
  std::string_view section = "?";
  for (const FlagRow& row : standard) {
    if (row.options.kind != Kind::honoured) continue;
    if (row.section != section) {
      section = row.section;
      text += fmt::format("\n{}\n", section.empty() ? "Flags" : row.title);
    }
    const std::string value = show(row);
    text += "  " + usage_of(row) + "\n";
    text += wrapped(std::string(row.help) +
                        (value.empty() || is_switch(row) ? "" : fmt::format(" [{}]", value)),
                    6, 92);
  }
  text +=
      "\nGeneral\n  --config FILE\n      TOML file with any of these keys; flags win over it.\n";
  text += "  --help\n      This text.\n";
  if (miles) {
    text += "\nFlags of Miles that change nothing here or are not built yet: docs/flags.md\n";
  }
  return text;
}

std::string flags_markdown() {
  Config train;
  GenerateConfig generate;
  ScoreConfig score;
  SelftestConfig selftest;
  ServeConfig serve;
  std::string text(kOpening);
  text += "\n## tandem train\n" + sections_markdown(rows_of(train), "###");
  text += "\n## Defaults that differ from Miles's\n" + differences_markdown(rows_of(train));
  text += "\n## Further flags of Miles without effect here\n" + miles_markdown(Kind::no_effect);
  text +=
      "\n## Further flags of Miles that are refused\n\nIn brackets the value that is accepted, "
      "Miles's default where nothing else is said.\n" +
      miles_markdown(Kind::refused);
  const auto own_flags = [](std::vector<FlagRow> rows) {
    std::erase_if(rows, [](const FlagRow& row) { return !row.section.empty(); });
    return sections_markdown(rows, "###");
  };
  text += "\n## tandem generate\n\nThese, and those of the sections model, compute and engine.\n" +
          own_flags(rows_of(generate));
  text += "\n## tandem score\n\nThese, and those of the sections model and compute.\n" +
          own_flags(rows_of(score));
  text += "\n## tandem selftest\n\nThese, and those of the sections model and compute.\n" +
          own_flags(rows_of(selftest));
  text += "\n## tandem serve\n\nThese, and those of the sections model, compute and engine.\n" +
          own_flags(rows_of(serve));
  return text;
}

}  // namespace tandem
