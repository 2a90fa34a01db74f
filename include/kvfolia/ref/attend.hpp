// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The oracle: attention in double precision, by the definition, one query and head at a time.

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kvfolia/core/attend_args.hpp"
#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/paged_view.hpp"

namespace kvfolia::inline KVF_ABI::ref {

/// Packed as the arguments of attend, without strides.
struct Attention {
  std::vector<double> out;  ///< [query tokens][query_heads][value_dim]
  std::vector<double> lse;  ///< [query tokens][query_heads], natural log
};

namespace detail {

struct Token {
  std::int64_t position;
  std::vector<float> key;
  std::vector<float> value;
};

/// A row's tokens of one KV head, in the order of the table.
template <class Layout, class Quant>
std::vector<Token> read_tokens(const PagedView<Layout, Quant>& view, const RowTable& table, int kv_head) {
  std::vector<Token> tokens;
  for (int i = 0; i < table.count; ++i) {
    const TableEntry entry = table.entry(i);
    if (entry.absent()) continue;
    for (int slot = 0; slot < table.used(i); ++slot) {
      Token token{table.position(i, slot), std::vector<float>(Layout::key_dim), {}};
      visit_format(view, entry, [&](const auto& quant) {
        key_side(quant).decode(view.key_tile(entry, kv_head), slot, token.key.data());
        from_stored(key_side(quant), token.key.data(), Layout::key_dim);
        if constexpr (Layout::shares_key_value) {
          token.value.assign(token.key.begin(), token.key.begin() + Layout::value_dim);
        } else {
          token.value.resize(Layout::value_dim);
          value_side(quant).decode(view.value_tile(entry, kv_head), slot, token.value.data());
          from_stored(value_side(quant), token.value.data(), Layout::value_dim);
        }
      });
      tokens.push_back(std::move(token));
    }
  }
  return tokens;
}

}  // namespace detail

/// Reads queries, masks and parameters from `args`; its `out`, `lse` and `partial`'s output type are
/// not used, but a partial result leaves out the sink logit here, too. Knows a quantizer only through
/// decode().
template <class Layout, class Quant>
Result<Attention> attend(const PagedView<Layout, Quant>& view, const BatchView& batch, const AttendArgs& args,
                         int query_heads) {
  if (auto ok = validate(view, batch); !ok) return ok.error();
  if (auto ok = kvfolia::detail::validate_scale<Layout>(args); !ok) return ok.error();
  if (batch.total_queries() > 0 && !args.queries.data) return kvfolia::detail::bad_argument("args.queries");
  if (args.mask.bits && !args.mask.row_offset) return kvfolia::detail::bad_argument("args.mask.row_offset");
  if (query_heads <= 0 || query_heads % view.kv_heads != 0)
    return kvfolia::detail::bad_argument("query_heads", query_heads, view.kv_heads);
  const double infinity = std::numeric_limits<double>::infinity();
  const double scale = args.scale != 0.0f ? double{args.scale} : 1.0 / std::sqrt(double{Layout::key_dim});
  const auto queries = static_cast<std::size_t>(batch.total_queries());
  const auto heads = static_cast<std::size_t>(query_heads);
  Attention result{std::vector<double>(queries * heads * Layout::value_dim, 0.0),
                   std::vector<double>(queries * heads, -infinity)};

  for (int row = 0; row < batch.rows; ++row) {
    const std::int64_t first = batch.first_query(row, view.page_tokens).value;
    for (int head = 0; head < query_heads; ++head) {
      const int kv_head = head / (query_heads / view.kv_heads);
      const std::vector<detail::Token> tokens =
          detail::read_tokens(view, row_table(batch, row, kv_head, view.page_tokens), kv_head);
      for (int q = 0; q < batch.query_tokens(row); ++q) {
        const std::int64_t packed = batch.query_begin(row) + q;
        const std::int64_t position = first + q;
        float query[Layout::key_dim];
        load_row(args.queries, packed, head, Layout::key_dim, query);

        std::vector<double> logits;
        std::vector<const detail::Token*> seen;
        for (const detail::Token& token : tokens) {
          if (args.causal && token.position > position) continue;
          if (!view.window.sees(position, token.position)) continue;
          if (args.mask.bits && !args.mask.sees(row, q, token.position, first + batch.query_tokens(row)))
            continue;
          double score = 0.0;
          for (int d = 0; d < Layout::key_dim; ++d)
            score += double{query[d]} * double{token.key[static_cast<std::size_t>(d)]};
          score *= scale;
          if (args.soft_cap > 0.0f) score = args.soft_cap * std::tanh(score / args.soft_cap);
          if (args.alibi_slopes)
            score += double{args.alibi_slopes[head]} * static_cast<double>(token.position - position);
          logits.push_back(score);
          seen.push_back(&token);
        }
        const bool sink = args.sink_logits && !args.partial;
        if (logits.empty() && !sink) continue;

        double largest = sink ? double{args.sink_logits[head]} : -infinity;
        for (const double logit : logits)
          if (logit > largest || std::isnan(logit)) largest = logit;  // NaN stays
        if (largest == -infinity) continue;
        double sum = sink ? std::exp(args.sink_logits[head] - largest) : 0.0;
        for (const double logit : logits) sum += std::exp(logit - largest);
        const std::size_t at = static_cast<std::size_t>(packed) * heads + static_cast<std::size_t>(head);
        for (std::size_t k = 0; k < logits.size(); ++k)
          for (std::size_t d = 0; d < Layout::value_dim; ++d)
            result.out[at * Layout::value_dim + d] +=
                std::exp(logits[k] - largest) / sum * double{seen[k]->value[d]};
        result.lse[at] = largest + std::log(sum);
      }
    }
  }
  return result;
}

}  // namespace kvfolia::inline KVF_ABI::ref
