// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Names of cache policies, as users write them on a command line.

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

namespace kvfolia_examples {

/// How keys and values are stored: `part ["/" part] {"+" option}`, keys before the slash. A part is
/// `base {"+" adaptor}` with the adaptors `centered` (keys only) and `rotated`. Without a slash the base
/// serves both and the adaptors belong to the keys.
struct Policy {
  /// One side's base and adaptors.
  struct Part {
    std::string base;
    bool centered = false;
    bool rotated = false;

    std::string name() const { return base + (centered ? "+centered" : "") + (rotated ? "+rotated" : ""); }
    friend bool operator==(const Part&, const Part&) = default;
  };

  std::string name;
  Part keys;
  Part values;
  std::optional<std::int32_t> window;
  std::int32_t sink_tokens = 4;
  std::int32_t exact_sink_pages = 0;
  std::optional<double> mixed;  ///< percent of the pages that keep these codes

  /// What a base without a slash means for values: KIVI's are coded by token.
  static std::string value_base(const std::string& key_base) {
    if (key_base == "kivi4") return "int4-g32";
    if (key_base == "kivi4-g64") return "int4-g64";
    return key_base;
  }
  /// Without options, adaptors in the order centered, rotated: equal for policies that store alike.
  std::string parts() const {
    const bool one = !values.centered && !values.rotated && values.base == value_base(keys.base);
    return (one ? keys.name() : keys.name() + "/" + values.name()) + (mixed ? "+mixed:PERCENT" : "");
  }
};

inline constexpr const char* policy_help =
    "keys or keys/values, each one of fp32, fp16, bf16, int8, int8-g32, int4-g32, int4-g64, kivi4, "
    "kivi4-g64, "
    "compact4, compact4-g16, compact4-g64, fp8, fp8-e5m2, fp8-tensor, nvfp4, mxfp4, q8_0, q4_0 with "
    "+centered (keys) "
    "and +rotated, as far as there are kernels, then any of +window:W[,S] (the last W tokens and the first "
    "S, 4 if "
    "not given), +sink:PAGES (so many first pages stay exact) and +mixed:PERCENT (that share of the pages, "
    "those "
    "looked at most, keep their codes, the others get kivi4's)";

/// Whether its scales come from the magnitudes of other text.
inline bool policy_needs_calibration(const Policy& policy) {
  const auto needs = [](const Policy::Part& part) {
    return part.base == "nvfp4" || part.base == "fp8-tensor";
  };
  return needs(policy.keys) || needs(policy.values);
}

namespace detail {

inline constexpr std::string_view policy_bases[] = {
    "fp32",       "fp16",      "bf16",     "int8",         "int8-g32",     "int4-g32", "int4-g64",
    "kivi4",      "kivi4-g64", "compact4", "compact4-g16", "compact4-g64", "fp8",      "fp8-e5m2",
    "fp8-tensor", "nvfp4",     "mxfp4",    "q8_0",         "q4_0"};

inline bool is_policy_base(std::string_view name) {
  return std::find(std::begin(policy_bases), std::end(policy_bases), name) != std::end(policy_bases);
}

/// Throws std::invalid_argument, naming the policy, unless all of `text` is a number of at least `least`.
inline std::int32_t policy_number(std::string_view text, std::int32_t least, std::string_view policy) {
  std::int32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < least)
    throw std::invalid_argument("policy '" + std::string(policy) + "': '" + std::string(text) +
                                "' is not a whole number of at least " + std::to_string(least));
  return number;
}

/// A percentage, with decimals.
inline double policy_percent(std::string_view text, std::string_view policy) {
  double number = 0.0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  if (error != std::errc() || end != text.data() + text.size() || !(number >= 0.0 && number <= 100.0))
    throw std::invalid_argument("policy '" + std::string(policy) + "': '" + std::string(text) +
                                "' is not a percentage");
  return number;
}

}  // namespace detail

/// Throws std::invalid_argument, which says what is wrong. Whether there are kernels for the parts is
/// make_kv_cache's to say.
inline Policy parse_policy(std::string_view name) {
  Policy policy;
  policy.name = name;
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument("policy '" + std::string(name) + "': " + why + "; a policy is " +
                                policy_help);
  };
  std::string_view rest = name;
  const auto next = [&rest] {  // a word and the separator behind it
    const std::size_t at = rest.find_first_of("+/");
    const std::pair word(rest.substr(0, at), at == std::string_view::npos ? '\0' : rest[at]);
    rest = at == std::string_view::npos ? std::string_view() : rest.substr(at + 1);
    return word;
  };

  auto [base, separator] = next();
  policy.keys.base = base;
  Policy::Part* part = &policy.keys;
  bool has_options = false, has_sink = false;
  if (!detail::is_policy_base(base)) refuse("no base '" + std::string(base) + "' here");
  while (separator != '\0') {
    const bool slash = separator == '/';
    std::string_view word;
    std::tie(word, separator) = next();
    if (word.empty()) refuse("something is missing behind the last '+' or '/'");
    if (slash) {
      if (part == &policy.values || has_options) refuse("there is one '/' at most, before all options");
      if (!detail::is_policy_base(word)) refuse("no base '" + std::string(word) + "' here");
      part = &policy.values;
      part->base = word;
      continue;
    }
    const std::string_view key = word.substr(0, word.find(':'));
    const std::string_view value =
        key.size() == word.size() ? std::string_view() : word.substr(key.size() + 1);
    has_options = has_options || key != word;
    if (word == "centered" && part == &policy.keys && !part->centered && !has_options) {
      part->centered = true;
    } else if (word == "rotated" && !part->rotated && !has_options) {
      part->rotated = true;
    } else if (key == "window" && !policy.window) {
      const std::size_t comma = value.find(',');
      policy.window = detail::policy_number(value.substr(0, comma), 1, name);
      if (comma != std::string_view::npos)
        policy.sink_tokens = detail::policy_number(value.substr(comma + 1), 0, name);
    } else if (key == "sink" && !has_sink) {
      policy.exact_sink_pages = detail::policy_number(value, 1, name);
      has_sink = true;
    } else if (key == "mixed" && !policy.mixed) {
      policy.mixed = detail::policy_percent(value, name);
    } else {
      refuse("no adaptor or option '" + std::string(word) + "' here, or given twice");
    }
  }
  if (part == &policy.keys) policy.values.base = Policy::value_base(policy.keys.base);
  return policy;
}

}  // namespace kvfolia_examples
