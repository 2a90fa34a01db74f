// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Names of cache policies, as users write them on a command line.

#include <charconv>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace kvfolia_examples {

/// How keys and values are stored. The grammar is `base {"+" option}`, with the options `window:W[,S]`
/// (S sink tokens, the last W others) and `sink:PAGES` (so many first pages stay exact).
struct Policy {
  enum class Base { fp32, fp16, bf16, int8 };

  std::string name;
  Base base = Base::fp16;
  std::optional<std::int32_t> window;
  std::int32_t sink_tokens = 4;
  std::int32_t exact_sink_pages = 0;
};

inline constexpr const char* policy_help =
    "fp32, fp16, bf16 or int8, each with any of +window:W[,S] (the last W tokens and the first S, 4 if "
    "not given) and +sink:PAGES (so many first pages stay exact)";

namespace detail {

/// Throws std::invalid_argument, naming the policy, unless all of `text` is a number of at least `least`.
inline std::int32_t policy_number(std::string_view text, std::int32_t least, std::string_view policy) {
  std::int32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < least)
    throw std::invalid_argument("policy '" + std::string(policy) + "': '" + std::string(text) +
                                "' is not a whole number of at least " + std::to_string(least));
  return number;
}

}  // namespace detail

/// Throws std::invalid_argument, which says what is wrong and what there is.
inline Policy parse_policy(std::string_view name) {
  Policy policy;
  policy.name = name;
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument("policy '" + std::string(name) + "': " + why + "; there are " + policy_help);
  };
  std::string_view rest = name;
  const auto next = [&rest](char separator) {
    const std::size_t at = rest.find(separator);
    const std::string_view part = rest.substr(0, at);
    rest = at == std::string_view::npos ? std::string_view() : rest.substr(at + 1);
    return part;
  };

  const bool ends_in_plus = name.ends_with('+');
  const std::string_view base = next('+');
  if (base == "fp32")
    policy.base = Policy::Base::fp32;
  else if (base == "fp16")
    policy.base = Policy::Base::fp16;
  else if (base == "bf16")
    policy.base = Policy::Base::bf16;
  else if (base == "int8")
    policy.base = Policy::Base::int8;
  else
    refuse("no base '" + std::string(base) + "' here");

  bool has_sink = false;
  while (!rest.empty()) {
    std::string_view option = next('+');
    const std::string_view key = option.substr(0, option.find(':'));
    const std::string_view value =
        key.size() == option.size() ? std::string_view() : option.substr(key.size() + 1);
    if (key == "window" && !policy.window) {
      const std::size_t comma = value.find(',');
      policy.window = detail::policy_number(value.substr(0, comma), 1, name);
      if (comma != std::string_view::npos)
        policy.sink_tokens = detail::policy_number(value.substr(comma + 1), 0, name);
    } else if (key == "sink" && !has_sink) {
      policy.exact_sink_pages = detail::policy_number(value, 1, name);
      has_sink = true;
    } else {
      refuse("no option '" + std::string(option) + "' here, or given twice");
    }
  }
  if (ends_in_plus) refuse("an option is missing behind the last '+'");
  return policy;
}

}  // namespace kvfolia_examples
