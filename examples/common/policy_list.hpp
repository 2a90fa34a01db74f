// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Several policies in one argument.

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace kvfolia_examples {

/// Splits at commas, except inside `window:W,S`: that comma stands between a number and a number. The
/// names are not checked.
inline std::vector<std::string> split_policies(std::string_view list) {
  const auto is_number = [](std::string_view text) {
    return !text.empty() &&
           std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  };
  const auto ends_in_window = [&](std::string_view name) {
    constexpr std::string_view window = "window:";
    const std::size_t separator = name.find_last_of("+/");
    const std::string_view option = separator == std::string_view::npos ? name : name.substr(separator + 1);
    return option.starts_with(window) && is_number(option.substr(window.size()));
  };
  std::vector<std::string> names;
  std::size_t begin = 0;
  for (std::size_t comma = list.find(','); comma != std::string_view::npos;
       comma = list.find(',', comma + 1)) {
    const std::string_view next = list.substr(comma + 1);
    const std::string_view name = list.substr(begin, comma - begin);
    if (ends_in_window(name) && is_number(next.substr(0, next.find_first_of("+/,")))) continue;
    names.emplace_back(name);
    begin = comma + 1;
  }
  names.emplace_back(list.substr(begin));
  return names;
}

}  // namespace kvfolia_examples
