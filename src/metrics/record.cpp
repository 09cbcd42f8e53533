// See record.h.
#include "metrics/record.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"

namespace tandem {
namespace {

double special_number(const std::string& text, std::string_view where) {
  if (text == "inf") return std::numeric_limits<double>::infinity();
  if (text == "-inf") return -std::numeric_limits<double>::infinity();
  TD_CHECK(text == "nan" || text == "-nan", "{}: found '{}', wanted a number", where, text);
  return std::numeric_limits<double>::quiet_NaN();
}

}  // namespace

Declarations::Declarations(std::vector<Declaration> list) {
  for (Declaration& declaration : list) declare(std::move(declaration));
}

void Declarations::declare(Declaration declaration) {
  for (const Declaration& known : list_) {
    TD_CHECK(known.name != declaration.name, "metric '{}' is declared twice", declaration.name);
  }
  list_.push_back(std::move(declaration));
}

Reduction Declarations::reduction(std::string_view name) const {
  const Declaration* best = nullptr;
  for (const Declaration& known : list_) {
    if (known.name == name) return known.reduction;
    const std::size_t star = known.name.find('*');
    if (star == known.name.npos) continue;
    const std::string_view prefix(known.name.data(), star);
    const std::string_view suffix = std::string_view(known.name).substr(star + 1);
    if (name.size() >= prefix.size() + suffix.size() && name.starts_with(prefix) &&
        name.ends_with(suffix) && (!best || known.name.size() > best->name.size())) {
      best = &known;
    }
  }
  TD_CHECK(best, "metric '{}' is not declared: declare its reduction before it is recorded", name);
  return best->reduction;
}

const Row::Entry* Row::find(std::string_view name) const {
  for (const Entry& entry : entries_) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

Row::Entry& Row::entry(std::string_view name) {
  for (Entry& known : entries_) {
    if (known.name == name) return known;
  }
  return entries_.emplace_back(Entry{std::string(name), declarations_->reduction(name)});
}

// `value` is a product with its weight for means.
void Row::take(Entry& into, double value, double weight) {
  switch (into.reduction) {
    case Reduction::sum:
    case Reduction::mean:
      into.value += value;
      break;
    case Reduction::max:
      // NaN wins: a maximum over something that is not a number must not look healthy.
      if (into.weight == 0 || std::isnan(value) || value > into.value) into.value = value;
      break;
    case Reduction::min:
      if (into.weight == 0 || std::isnan(value) || value < into.value) into.value = value;
      break;
    case Reduction::last:
      into.value = value;
      break;
  }
  into.weight += weight;
}

void Row::add(std::string_view name, double value, double weight) {
  Entry& into = entry(name);
  if (into.reduction == Reduction::mean) {
    if (weight != 0) take(into, value * weight, weight);
  } else {
    take(into, value, 1);
  }
}

void Row::merge(const Row& other) {
  for (const Entry& from : other.entries_) {
    Entry& into = entry(from.name);
    if (from.weight != 0) take(into, from.value, from.weight);
  }
}

double Row::reduced(const Entry& entry) {
  if (entry.weight == 0) return std::numeric_limits<double>::quiet_NaN();
  return entry.reduction == Reduction::mean ? entry.value / entry.weight : entry.value;
}

bool Row::has(std::string_view name) const { return find(name) != nullptr; }

double Row::value(std::string_view name) const {
  const Entry* entry = find(name);
  return entry ? reduced(*entry) : std::numeric_limits<double>::quiet_NaN();
}

std::vector<std::string> Row::names() const {
  std::vector<std::string> names;
  for (const Entry& entry : entries_) names.push_back(entry.name);
  return names;
}

OrderedJson Row::to_json() const {
  OrderedJson json = OrderedJson::object();
  for (const Entry& entry : entries_) {
    const double value = reduced(entry);
    json[entry.name] = std::isfinite(value) ? OrderedJson(value) : OrderedJson(nullptr);
  }
  return json;
}

// [[name, value, weight], …]; JSON has no NaN and no infinity, so these travel as strings.
std::string Row::to_wire() const {
  OrderedJson json = OrderedJson::array();
  for (const Entry& entry : entries_) {
    const OrderedJson value = std::isfinite(entry.value)
                                  ? OrderedJson(entry.value)
                                  : OrderedJson(fmt::format("{}", entry.value));
    json.push_back(OrderedJson::array({entry.name, value, entry.weight}));
  }
  return dump_json(json);
}

Row Row::from_wire(std::string_view text, const Declarations& declarations,
                   std::string_view where) {
  Row row(declarations);
  const Json json = parse_json(text, where);
  TD_CHECK(json.is_array(), "{}: found {}, wanted an array of metrics", where, json.type_name());
  for (const Json& item : json) {
    TD_CHECK(item.is_array() && item.size() == 3, "{}: found {}, wanted [name, value, weight]",
             where, dump_json(item));
    Entry& into = row.entry(read_value<std::string>(item[0], where));
    into.value = item[1].is_string() ? special_number(item[1].get<std::string>(), where)
                                     : read_value<double>(item[1], where);
    into.weight = read_value<double>(item[2], where);
  }
  return row;
}

}  // namespace tandem
