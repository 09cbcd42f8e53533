// The walk over a config: from constexpr tables of fields to a plain vector of rows.
//
// Each struct of config.h has one table (flags.h) with a Field for every member; a member without a
// field does not compile. bind_rows() is where the types end: it is instantiated once a command, in
// flags.cpp.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "config/rows.h"

namespace tandem {

template <class C, class T>
struct Field {
  std::string_view name;
  T C::*member;
  std::string_view help;  // of a section: its title
  RowOptions options = {};
};
template <class C, class T>
Field(std::string_view, T C::*, std::string_view) -> Field<C, T>;
template <class C, class T>
Field(std::string_view, T C::*, std::string_view, RowOptions) -> Field<C, T>;

// Specialised beside the tables: the fields of a struct, the spellings of an enum by value.
template <class C>
inline constexpr std::nullptr_t table = nullptr;
template <class E>
inline constexpr std::nullptr_t names = nullptr;

// ---- how many members a struct has
// ---------------------------------------------------------------

// Two stand-ins, since std::optional takes anything that converts to its value and would be
// ambiguous with one stand-in for all.
template <class T>
inline constexpr bool is_optional = false;
template <class T>
inline constexpr bool is_optional<std::optional<T>> = true;
struct AnyPlain {
  template <class T>
  requires(!is_optional<T>) operator T() const;
};
struct AnyOptional {
  template <class T>
  requires(is_optional<T>) operator T() const;
};
template <class C, class... A>
constexpr std::size_t member_count() {
  if constexpr (requires { C{A{}..., AnyPlain{}}; }) {
    return member_count<C, A..., AnyPlain>();
  } else if constexpr (requires { C{A{}..., AnyOptional{}}; }) {
    return member_count<C, A..., AnyOptional>();
  } else {
    return sizeof...(A);
  }
}

// ---- the walk
// ------------------------------------------------------------------------------------

template <class T>
ValueRef erase_type(T& value) {
  if constexpr (std::is_enum_v<T>) {
    return EnumRef{&value,
                   [](const void* p) { return static_cast<int>(*static_cast<const T*>(p)); },
                   [](void* p, int v) { *static_cast<T*>(p) = static_cast<T>(v); }, names<T>};
  } else {
    return &value;
  }
}

template <class C>
void append_rows(C& config, std::string_view section, std::string_view title,
                 std::vector<FlagRow>& rows) {
  const auto append = [&](const auto& field) {
    auto& value = config.*field.member;
    if constexpr (std::is_null_pointer_v<
                      std::remove_cv_t<decltype(table<std::remove_cvref_t<decltype(value)>>)>>) {
      rows.push_back({section, title, field.name, field.help, field.options, erase_type(value)});
    } else {
      append_rows(value, field.name, field.help, rows);
    }
  };
  std::apply([&](const auto&... fields) { (append(fields), ...); }, table<C>);
}

template <class C>
std::vector<FlagRow> bind_rows(C& config) {
  std::vector<FlagRow> rows;
  append_rows(config, {}, {}, rows);
  return rows;
}

}  // namespace tandem
