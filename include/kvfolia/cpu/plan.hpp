// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Deciding, once a step, who computes which part of attention.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/cpu/chunk.hpp"
#include "kvfolia/cpu/target.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET {

/// Attention is reduced over tiles of so many logical positions, and tiles are merged from left to
/// right. Neither the batch nor the threads move a tile's border, so they change no bit.
inline constexpr int tile_positions = 256;
/// Of attend()'s workspace, in bytes: what operator new gives.
inline constexpr int workspace_alignment = alignof(std::max_align_t);
/// Queries of one row that share what is read of a key.
inline constexpr int query_block = 16;

/// What the plan depends on besides the batch.
struct AttendConfig {
  std::int32_t query_heads = 0;  ///< a multiple of the view's kv_heads
  std::int32_t concurrency = 1;  ///< the executor's
};

/// Whether attend() can do it: the same answer at compile time and at run time.
template <class Layout, class Quant>
constexpr bool supported(int query_heads, int kv_heads) {
  return kv_heads > 0 && query_heads > 0 && query_heads % kv_heads == 0;
}

struct AttendPlan {
  /// Queries [query_begin, query_end) of a row for one KV head, over tiles [tile_begin, tile_end).
  struct Task {
    std::int32_t row;
    std::int32_t head;
    std::int32_t query_begin;
    std::int32_t query_end;
    std::int64_t tile_begin;
    std::int64_t tile_end;
    std::int64_t partial;  ///< where its tiles' states go; -1: the task writes the output itself
  };

  /// What a batch must still have when the plan is used.
  struct Row {
    std::int32_t queries;
    std::int32_t length;
    LogicalPos first_query;
    std::int64_t tiles;  ///< over all tables of the row
    friend bool operator==(Row, Row) = default;
  };

  std::vector<Task> tasks;
  std::vector<Task> merges;  ///< over all tiles of what tasks left as states
  AttendConfig config;
  std::vector<Row> rows;
  std::int32_t kv_heads = 0;
  std::int32_t page_tokens = 0;
  std::int32_t key_dim = 0;
  std::int32_t value_dim = 0;
  std::int64_t scratch_rows = 0;    ///< queries times heads of a group that a worker keeps at a time
  std::int64_t scratch_floats = 0;  ///< of one worker
  std::int64_t states = 0;          ///< of one query, head and tile each

  /// Maximum, sum and accumulated values.
  static constexpr std::int64_t state_floats(int value_dim) { return value_dim + 2; }
  std::int64_t state_floats() const { return state_floats(value_dim); }

  /// Exactly what attend() needs, aligned to workspace_alignment.
  std::size_t workspace_bytes() const {
    return static_cast<std::size_t>(config.concurrency * scratch_floats + states * state_floats()) *
           sizeof(float);
  }
};

namespace detail {

/// Where one worker's arrays lie, in floats. `rows` counts queries times heads of a group.
template <class Layout, class Quant>
struct Scratch {
  std::int64_t rows;

  constexpr std::int64_t queries() const { return 0; }
  constexpr std::int64_t tile() const { return rows * Layout::key_dim; }
  constexpr std::int64_t total() const { return tile() + rows * AttendPlan::state_floats(Layout::value_dim); }
  constexpr std::int64_t chunk() const {
    return total() + rows * AttendPlan::state_floats(Layout::value_dim);
  }
  constexpr std::int64_t size() const { return chunk() + Chunk<Layout, Quant>::floats; }
};

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

}  // namespace detail

/// Checks view and batch and plans attend() for all layers of this shape. Reads tables and lengths
/// only; keeps no pointer. Throws nothing but std::bad_alloc.
template <class Layout, class Quant>
Result<AttendPlan> plan_attend(const PagedView<Layout, Quant>& view, const BatchView& batch,
                               const AttendConfig& config) {
  if (auto ok = validate(view, batch); !ok) return ok.error();
  if (!supported<Layout, Quant>(config.query_heads, view.kv_heads))
    return Error{Errc::unsupported, "config.query_heads", config.query_heads, view.kv_heads};
  if (config.concurrency < 1)
    return kvfolia::detail::bad_argument("config.concurrency", config.concurrency, 1);

  AttendPlan plan;
  plan.config = config;
  plan.kv_heads = view.kv_heads;
  plan.page_tokens = view.page_tokens;
  plan.key_dim = Layout::key_dim;
  plan.value_dim = Layout::value_dim;
  const int group = config.query_heads / view.kv_heads;
  std::int32_t block = 0;
  std::int64_t items = 0;
  for (int row = 0; row < batch.rows; ++row) {
    plan.rows.push_back(detail::plan_row(batch, row, view.kv_heads, view.page_tokens));
    block = std::max(block, std::min(batch.query_tokens(row), query_block));
    items += (batch.query_tokens(row) + query_block - 1) / query_block * view.kv_heads;
  }
  plan.scratch_rows = std::int64_t{block} * group;
  plan.scratch_floats = detail::Scratch<Layout, Quant>{plan.scratch_rows}.size();

  // With enough items for all threads nothing is gained by cutting one into several.
  const bool split = items < std::int64_t{4} * config.concurrency && config.concurrency > 1;
  for (int row = 0; row < batch.rows; ++row) {
    const std::int32_t queries = batch.query_tokens(row);
    for (int head = 0; head < view.kv_heads; ++head) {
      const std::int64_t tiles = detail::tile_count(row_table(batch, row, head, view.page_tokens));
      for (std::int32_t begin = 0; begin < queries; begin += query_block) {
        const std::int32_t end = std::min(begin + query_block, queries);
        if (!split || tiles < 2) {
          plan.tasks.push_back({row, head, begin, end, 0, tiles, -1});
          continue;
        }
        plan.merges.push_back({row, head, begin, end, 0, tiles, plan.states});
        const std::int64_t parts = std::min<std::int64_t>(tiles, std::int64_t{4} * config.concurrency);
        for (std::int64_t part = 0; part < parts; ++part)
          plan.tasks.push_back(
              {row, head, begin, end, tiles * part / parts, tiles * (part + 1) / parts, plan.states});
        plan.states += tiles * (end - begin) * group;
      }
    }
  }
  return plan;
}

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET
