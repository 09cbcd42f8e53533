// A config as JSON and back, exactly: sections are objects, an optional without a value is null.
// This is the form of a run's config.json and of what a rank reads on its standard input.
#pragma once

#include <string_view>
#include <vector>

#include "base/json.h"
#include "config/rows.h"

namespace tandem {

OrderedJson rows_to_json(const std::vector<FlagRow>& rows);

// Sets every row from its key; a row whose key is missing keeps its value. Error: an unknown key, a
// value of a wrong type. Bounds are not checked: the config was checked where it was made.
void rows_from_json(const std::vector<FlagRow>& rows, const OrderedJson& json,
                    std::string_view source);

template <class C>
OrderedJson to_json(const C& config) {
  C copy = config;
  return rows_to_json(rows_of(copy));
}

template <class C>
C from_json(const OrderedJson& json, std::string_view source) {
  C config;
  rows_from_json(rows_of(config), json, source);
  return config;
}

}  // namespace tandem
