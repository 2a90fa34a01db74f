// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What was measured of policies, as JSON, as a table, as CSV and as a plot.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "common/divergence.hpp"
#include "common/kv_cache.hpp"
#include "common/plot.hpp"
#include "common/policy.hpp"

namespace kvfolia_examples {

/// One policy at work.
struct Measurement {
  Policy policy;
  std::unique_ptr<KvCache> cache{};
  SeqId sequence{};
  Divergence divergence{};
  double seconds = 0.0;
  double bits_per_value = 0.0;
  std::int64_t bytes = 0;   ///< at the ends of windows
  std::int64_t tokens = 0;  ///< held then
};

/// Of every policy, in this order.
inline constexpr std::array<const char*, 10> figure_fields{
    "name", "perplexity",     "perplexity_change_percent", "standard_error", "kl_mean", "kl_p99",
    "top1", "bits_per_value", "bytes_per_token",           "seconds"};

/// What is not a number becomes null where the JSON is written.
inline nlohmann::json figures_of(std::span<const Measurement> measurements, const std::string& text,
                                 std::size_t context) {
  nlohmann::json figures = {
      {"tokens", measurements.front().divergence.summary().tokens}, {"text", text}, {"context", context}};
  for (const Measurement& m : measurements) {
    const DivergenceSummary summary = m.divergence.summary();
    figures["policies"].push_back(
        {{"name", m.policy.name},
         {"perplexity", summary.perplexity},
         {"perplexity_change_percent", summary.perplexity_change_percent},
         {"standard_error", summary.standard_error},
         {"kl_mean", summary.kl_mean},
         {"kl_p99", summary.kl_p99},
         {"top1", summary.top1},
         {"bits_per_value", m.bits_per_value},
         {"bytes_per_token", static_cast<double>(m.bytes) / static_cast<double>(m.tokens)},
         {"seconds", m.seconds}});
  }
  return figures;
}

/// What was measured, as a sentence's beginning.
inline std::string heading_of(const nlohmann::json& figures) {
  return figures["text"].get<std::string>() + ", " + figures["tokens"].dump() +
         " tokens scored in contexts of " + figures["context"].dump();
}

inline std::string table_of(const nlohmann::json& figures) {
  std::size_t width = 6;
  for (const auto& policy : figures["policies"])
    width = std::max(width, policy["name"].get<std::string>().size());
  const auto padded = [&](std::string name) {
    name.resize(std::max(width, name.size()), ' ');
    return name;
  };
  std::string table =
      heading_of(figures) + "; KL(fp32 || policy) in nats\n\n" + padded("policy") +
      "  perplexity  change %    s.e.   KL mean    KL p99   top-1   bits  bytes/token  seconds\n";
  for (const auto& policy : figures["policies"]) {
    const auto number = [&](const char* field) { return policy[field].get<double>(); };
    std::array<char, 256> line{};
    std::snprintf(line.data(), line.size(),
                  "  %10.4f  %8.3f  %6.3f  %8.2e  %8.2e  %6.4f  %5.2f  %11.0f  %7.1f\n", number("perplexity"),
                  number("perplexity_change_percent"), number("standard_error"), number("kl_mean"),
                  number("kl_p99"), number("top1"), number("bits_per_value"), number("bytes_per_token"),
                  number("seconds"));
    table += padded(policy["name"].get<std::string>()) + line.data();
  }
  return table;
}

inline std::string csv_of(const nlohmann::json& figures) {
  const auto line_of = [](const auto& field) {
    std::string line;
    for (const char* name : figure_fields) {
      if (!line.empty()) line += ',';
      line += field(name);
    }
    return line + '\n';
  };
  std::string csv = line_of([](const char* name) { return std::string(name); });
  for (const auto& policy : figures["policies"]) {
    csv += line_of([&](const char* name) {
      const auto& value = policy[name];
      if (!value.is_string()) return value.dump();
      // A window's name holds a comma, none a quote: JSON's quotes are then CSV's.
      const auto text = value.template get<std::string>();
      return text.find(',') == std::string::npos ? text : value.dump();
    });
  }
  return csv;
}

/// Divergence against bytes. `model` is a path.
inline std::string svg_of(const nlohmann::json& figures, const std::string& model) {
  Plot plot{.title = "What cache policies cost: divergence against bytes",
            .subtitle = std::filesystem::path(model).filename().string() + ", " + heading_of(figures),
            .x_label = "bytes of cache a token, all that is held",
            .y_label = "mean KL(fp32 || policy), nats",
            .points = {}};
  for (const auto& policy : figures["policies"])
    plot.points.push_back({policy["name"], policy["bytes_per_token"], policy["kl_mean"]});
  return plot_svg(plot);
}

}  // namespace kvfolia_examples
