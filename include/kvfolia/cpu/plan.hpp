// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Deciding, once a step, who computes which part of attention.

#include <algorithm>
#include <cstdint>

#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/cpu/attend_plan.hpp"
#include "kvfolia/cpu/fast_scratch.hpp"
#include "kvfolia/cpu/plain_attend.hpp"
#include "kvfolia/cpu/target.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET {

/// How the fast path reads pages for rows with few queries.
enum class AttendKernel : std::uint8_t {
  none,      ///< attend() refuses
  plain,     ///< the plain path takes its place: no vectors of a known size
  decoding,  ///< some keys or values are decoded to floats first
  streaming  ///< all codes are read where they lie
};

/// Whether attend() can do it, and how well: the same answer at compile time and at run time.
template <class Layout, class Quant>
constexpr AttendKernel supported(int query_heads, int kv_heads) {
  if (!(kv_heads > 0 && query_heads > 0 && query_heads % kv_heads == 0)) return AttendKernel::none;
  if (!has_vectors) return AttendKernel::plain;
  return detail::FormatFacts<Layout, Quant>::streams ? AttendKernel::streaming : AttendKernel::decoding;
}

/// Whether the fast path rounds queries of rows with few of them to 15 bits, so that 8-bit dot products
/// serve 8-bit and 4-bit keys: about a thousandth of what those keys' own rounding costs.
template <class Layout, class Quant>
constexpr bool rounds_queries() {
  return has_vectors && detail::FormatFacts<Layout, Quant>::rounds_queries;
}

namespace detail {

/// Queries of one row that share what is read of a key on the plain path.
inline constexpr std::int32_t plain_query_block = 16;
/// Rows with up to so many queries have their pages read in place.
inline constexpr std::int32_t streaming_queries = 4;
/// Queries times heads of a group that share what is decoded of a key.
inline constexpr std::int32_t decoding_rows = 256;

/// Queries of a row that a task takes at a time.
inline std::int32_t query_block(AttendPath path, std::int32_t queries, int group) {
  if (path == AttendPath::plain) return plain_query_block;
  return queries <= streaming_queries ? streaming_queries : std::max(1, decoding_rows / group);
}

/// One past the last tile that has a key.
inline std::int64_t tile_count(const RowTable& table) {
  for (int i = table.count - 1; i >= 0; --i)
    if (table.used(i) > 0) return table.position(i, table.used(i) - 1) / tile_positions + 1;
  return 0;
}

inline AttendPlan::Row plan_row(const BatchView& batch, int row, int kv_heads, int page_tokens) {
  std::int64_t tiles = 0;
  for (int head = 0; head < (batch.table.head_stride == 0 ? 1 : kv_heads); ++head)
    tiles += tile_count(row_table(batch, row, head, page_tokens));
  return {batch.query_tokens(row), batch.length(row, page_tokens), batch.first_query(row, page_tokens),
          tiles};
}

/// Floats of a worker's scratch, and of a state.
template <class Layout, class Quant>
constexpr std::int64_t scratch_floats(const AttendPlan& plan) {
  if (plan.config.path == AttendPath::plain) return PlainScratch<Layout, Quant>{plan.scratch_rows}.size();
  return FastScratch<Layout, Quant>(plan.scratch_rows).size();
}
template <class Layout, class Quant>
void size_scratch(AttendPlan& plan) {
  plan.scratch_floats = scratch_floats<Layout, Quant>(plan);
  plan.state_floats = plan.config.path == AttendPath::plain ? PlainScratch<Layout, Quant>::state_floats
                                                            : FastScratch<Layout, Quant>::state_floats();
}

}  // namespace detail

/// Checks view and batch and plans attend() for all layers of this shape. Reads tables and lengths
/// only; keeps no pointer. Throws nothing but std::bad_alloc.
template <class Layout, class Quant>
Result<AttendPlan> plan_attend(const PagedView<Layout, Quant>& view, const BatchView& batch,
                               const AttendConfig& config) {
  if (auto ok = validate(view, batch); !ok) return ok.error();
  if (supported<Layout, Quant>(config.query_heads, view.kv_heads) == AttendKernel::none)
    return Error{Errc::unsupported, "config.query_heads", config.query_heads, view.kv_heads};
  if (config.concurrency < 1)
    return kvfolia::detail::bad_argument("config.concurrency", config.concurrency, 1);

  AttendPlan plan;
  plan.config = config;
  if (!has_vectors) plan.config.path = AttendPath::plain;
  plan.kv_heads = view.kv_heads;
  plan.page_tokens = view.page_tokens;
  plan.key_dim = Layout::key_dim;
  plan.value_dim = Layout::value_dim;
  const AttendPath path = plan.config.path;
  const int group = config.query_heads / view.kv_heads;
  std::int64_t items = 0;
  for (int row = 0; row < batch.rows; ++row) {
    plan.rows.push_back(detail::plan_row(batch, row, view.kv_heads, view.page_tokens));
    const std::int32_t queries = batch.query_tokens(row);
    const std::int32_t block = detail::query_block(path, queries, group);
    plan.scratch_rows = std::max(plan.scratch_rows, std::int64_t{std::min(queries, block)} * group);
    items += (queries + block - 1) / block * view.kv_heads;
  }
  detail::size_scratch<Layout, Quant>(plan);

  // With enough items for all threads nothing is gained by cutting one into several.
  const bool split = items < std::int64_t{4} * config.concurrency && config.concurrency > 1;
  for (int row = 0; row < batch.rows; ++row) {
    const std::int32_t queries = batch.query_tokens(row);
    const std::int32_t block = detail::query_block(path, queries, group);
    const bool streams = path == AttendPath::fast && queries <= detail::streaming_queries;
    for (int head = 0; head < view.kv_heads; ++head) {
      const std::int64_t tiles = detail::tile_count(row_table(batch, row, head, view.page_tokens));
      for (std::int32_t begin = 0; begin < queries; begin += block) {
        const std::int32_t end = std::min(begin + block, queries);
        if (!split || tiles < 2) {
          plan.tasks.push_back({row, head, begin, end, 0, tiles, -1, streams});
          continue;
        }
        plan.merges.push_back({row, head, begin, end, 0, tiles, plan.states, streams});
        const std::int64_t parts = std::min<std::int64_t>(tiles, std::int64_t{4} * config.concurrency);
        for (std::int64_t part = 0; part < parts; ++part)
          plan.tasks.push_back({row, head, begin, end, tiles * part / parts, tiles * (part + 1) / parts,
                                plan.states, streams});
        plan.states += tiles * (end - begin) * group;
      }
    }
  }
  return plan;
}

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET
