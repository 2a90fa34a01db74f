// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Which keys a column sees, and what becomes of its products with them.

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/mask.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/decode_args.hpp"
#include "kvfolia/cuda/decode_queries.hpp"
#include "kvfolia/cuda/decode_tokens.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

struct ColumnRules {
  float scale;            ///< of products, to base 2, as the slope
  std::uint32_t seen;     ///< positions below are seen, as far as the causal mask goes
  std::int32_t position;  ///< of the query, for other masks and the slope
  float slope;
};

template <bool General, class Ctx, class Layout, class Quant>
KVF_INLINE KVF_HD ColumnRules column_rules(Ctx& ctx, const Columns<Layout, Quant>& columns, int column,
                                           float scale) {
  const AttendArgs& args = columns.args.args;
  const std::int32_t position = columns.row.position + columns.query(column);
  ColumnRules rules{scale * log2_e, 0x80000000u, position, 0.0f};
  if (args.causal) rules.seen = position < 0 ? 0u : static_cast<std::uint32_t>(position) + 1u;
  if (General && args.alibi_slopes && columns.exists(column))
    rules.slope = ctx.load(args.alibi_slopes + columns.head(column)) * log2_e;
  return rules;
}

template <class Ctx, class Layout, class Quant>
KVF_INLINE KVF_HD bool mask_sees(Ctx& ctx, const Columns<Layout, Quant>& columns, int column,
                                 std::int32_t key) {
  const CustomMask& mask = columns.args.args.mask;
  if (!mask.bits || !columns.exists(column)) return true;
  const std::int64_t keys = std::int64_t{columns.row.position} + columns.row.queries;
  if (key >= keys) return false;
  const std::int64_t bit = columns.query(column) * keys + key;
  return (ctx.load(mask.bits + ctx.load(mask.row_offset + ctx.block_z()) + bit / 8) >> bit % 8 & 1) != 0;
}

/// A product of query and key becomes a score, to base 2, plus what its values' weight is multiplied by:
/// -infinity where the key, at a position, or -1 for none, is not seen.
template <bool General, class Ctx, class Layout, class Quant>
KVF_INLINE KVF_HD float finish_score(Ctx& ctx, const Columns<Layout, Quant>& columns,
                                     const ColumnRules& rules, int column, float product,
                                     const TokenFacts& token) {
  const DecodeArgs<Layout, Quant>& args = columns.args;
  // As a number without a sign -1 is the largest.
  const bool hidden = static_cast<std::uint32_t>(token.position) >= rules.seen;
  if constexpr (!General) {
    const float score = __builtin_fmaf(product, rules.scale, token.log_value_scale);
    return hidden ? minus_infinity() : score;
  } else {
    if (hidden || !args.view.window.sees(rules.position, token.position) ||
        !mask_sees(ctx, columns, column, token.position))
      return minus_infinity();
    const auto distance = static_cast<float>(token.position - rules.position);
    const float bias = __builtin_fmaf(rules.slope, distance, token.log_value_scale);
    const float cap = args.args.soft_cap;
    // Without a cap and slopes the same bits as above.
    if (cap <= 0.0f) return __builtin_fmaf(product, rules.scale, bias);
    // cap * tanh(score / cap), as cap * (1 - 2 / (1 + e^(2 score / cap))), to base 2
    const float power = Ctx::exp2(product * rules.scale * 2.0f * args.inverse_cap);
    return cap * log2_e * (1.0f - 2.0f * Ctx::reciprocal(1.0f + power)) + bias;
  }
}

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
