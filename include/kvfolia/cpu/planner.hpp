// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Cutting a batch's attention into tasks: by rows, heads and queries, long rows by tiles, and what several
// rows' tables have in common into tasks of all of them.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/mask.hpp"
#include "kvfolia/cpu/attend_plan.hpp"
#include "kvfolia/cpu/target.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

/// Queries of one row that share what is read of a key on the plain path.
inline constexpr std::int32_t plain_query_block = 16;
/// Rows with up to so many queries have their pages read in place.
inline constexpr std::int32_t streaming_queries = 4;
/// Queries times heads of a group that a task of the fast path takes at most.
inline constexpr std::int32_t task_rows = 256;

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

/// How many entries of two tables are the same full pages at the same positions.
inline int common_entries(const RowTable& a, const RowTable& b) {
  const int most = std::min({a.count, b.count, a.length / a.page_tokens, b.length / b.page_tokens});
  int i = 0;
  while (i < most && a.entries[i] == b.entries[i] && a.position(i, 0) == b.position(i, 0)) ++i;
  return i;
}
/// How many tiles two rows have in common.
inline std::int64_t common_tiles(const RowTable& a, const RowTable& b) {
  const int entries = common_entries(a, b);
  return entries == 0 ? 0 : (a.position(entries - 1, 0) + a.page_tokens) / tile_positions;
}

class Planner {
 public:
  Planner(AttendPlan& plan, const BatchView& batch, Window window)
      : plan_(plan), batch_(batch), window_(window), group_(plan.config.query_heads / plan.kv_heads) {}

  void run() {
    const std::int64_t concurrency = plan_.config.concurrency;
    std::int64_t items = 0;
    for (int row = 0; row < batch_.rows; ++row) {
      const std::int32_t queries = batch_.query_tokens(row), block = query_block(queries);
      plan_.scratch_rows = std::max(plan_.scratch_rows, std::int64_t{std::min(queries, block)} * group_);
      items += (queries + block - 1) / block * plan_.kv_heads;
    }
    // With enough items for all threads nothing is gained by cutting one into several.
    parts_ = items < 4 * concurrency && concurrency > 1 ? 4 * concurrency : 1;
    share_tables();
    for (int row = 0; row < batch_.rows; ++row)
      if (!done_[static_cast<std::size_t>(row)]) add_row(row);
  }

 private:
  using Task = AttendPlan::Task;
  using Sharer = AttendPlan::Sharer;

  bool streams(std::int32_t queries) const {
    return plan_.config.path == AttendPath::fast && queries <= streaming_queries;
  }
  /// Queries of a row that a task takes at a time.
  std::int32_t query_block(std::int32_t queries) const {
    if (plan_.config.path == AttendPath::plain) return plain_query_block;
    return streams(queries) ? streaming_queries : std::max(1, task_rows / group_);
  }
  RowTable table(int row, int head) const { return row_table(batch_, row, head, plan_.page_tokens); }

  /// Later queries see more keys: they come first, so that no thread is left with a long one.
  void add_row(int row) {
    const std::int32_t queries = batch_.query_tokens(row), block = query_block(queries);
    for (std::int32_t begin = (queries - 1) / block * block; begin >= 0 && queries > 0; begin -= block)
      for (int head = 0; head < plan_.kv_heads; ++head) {
        const std::int32_t end = std::min(begin + block, queries);
        const std::int64_t tiles = tile_count(table(row, head));
        Task task{row, head, begin, end, 0, tiles, -1, streams(queries)};
        if (parts_ > 1 && tiles > 1) {
          task.partial = add_states(tiles * (end - begin));
          plan_.merges.push_back(task);
        }
        add_tiles(task, 0, tiles, parts_);
      }
  }

  /// Tiles of one task, in some parts where their states are kept.
  void add_tiles(Task task, std::int64_t begin, std::int64_t end, std::int64_t parts) {
    parts = task.partial < 0 ? 1 : std::min(end - begin, parts);
    for (std::int64_t part = 0; part < parts; ++part) {
      task.tile_begin = begin + (end - begin) * part / parts;
      task.tile_end = begin + (end - begin) * (part + 1) / parts;
      plan_.tasks.push_back(task);
    }
  }

  /// States of some tiles and queries; gives the first one.
  std::int64_t add_states(std::int64_t count) {
    const std::int64_t first = plan_.states;
    plan_.states += count * group_;
    return first;
  }

  // ---- tables that begin alike ----

  /// Whether rows' table entries can be compared: all heads share them, full pages look alike, and nothing
  /// but its position decides what a row sees of them.
  bool comparable() const {
    return plan_.config.path == AttendPath::fast && batch_.table.head_stride == 0 && !batch_.entry_tokens &&
           window_.left < 0 && !batch_.slot_pos;
  }

  /// Rows in the order of their tables: those that begin alike become neighbours.
  void share_tables() {
    done_.assign(static_cast<std::size_t>(batch_.rows), false);
    if (!comparable()) return;
    std::vector<std::int32_t> rows;
    for (int row = 0; row < batch_.rows; ++row)
      if (batch_.query_tokens(row) == 1 && batch_.length(row, plan_.page_tokens) >= tile_positions)
        rows.push_back(row);
    std::sort(rows.begin(), rows.end(), [&](int a, int b) {
      const RowTable x = table(a, 0), y = table(b, 0);
      const int i = common_entries(x, y);
      if (i < x.count && i < y.count && x.entries[i] != y.entries[i]) return x.entries[i] < y.entries[i];
      if (i < x.count && i < y.count && x.position(i, 0) != y.position(i, 0))
        return x.position(i, 0) < y.position(i, 0);
      return x.count != y.count ? x.count < y.count : a < b;
    });
    each_family(rows.data(), rows.data() + rows.size(), 0,
                [&](const std::int32_t* first, const std::int32_t* last) { share(first, last); });
  }

  /// f(first, last) for runs of two and more rows that have tile `tile` in common.
  template <class F>
  void each_family(const std::int32_t* first, const std::int32_t* last, std::int64_t tile, F&& f) const {
    while (first != last) {
      const std::int32_t* next = first + 1;
      while (next != last && common_tiles(table(*first, 0), table(*next, 0)) > tile) ++next;
      if (next - first > 1) f(first, next);
      first = next;
    }
  }

  /// All tasks of rows that begin alike.
  void share(const std::int32_t* first, const std::int32_t* last) {
    std::vector<std::int64_t> states, own;  // of each row: of its first head; the first tile of its own
    for (const std::int32_t* row = first; row != last; ++row) {
      done_[static_cast<std::size_t>(*row)] = true;
      const std::int64_t tiles = tile_count(table(*row, 0));
      states.push_back(add_states(tiles * plan_.kv_heads));
      own.push_back(0);
    }
    share_tiles(first, last, first, 0, states, own);
    for (int head = 0; head < plan_.kv_heads; ++head)
      for (const std::int32_t* row = first; row != last; ++row) {
        const auto i = static_cast<std::size_t>(row - first);
        const std::int64_t tiles = tile_count(table(*row, 0));
        const Task task{*row, head, 0, 1, 0, tiles, states[i] + head * tiles * group_, true};
        plan_.merges.push_back(task);
        if (own[i] < tiles) add_tiles(task, own[i], tiles, parts_);
      }
  }

  /// Tiles from `tile` on that all rows of [first, last) have, then those that some of them have.
  void share_tiles(const std::int32_t* first, const std::int32_t* last, const std::int32_t* all,
                   std::int64_t tile, const std::vector<std::int64_t>& states,
                   std::vector<std::int64_t>& own) {
    const std::int64_t until =
        common_tiles(table(*first, 0), table(*(last - 1), 0));  // those between have them, too
    const std::int32_t most = std::max(1, task_rows / group_);
    for (int head = 0; head < plan_.kv_heads; ++head)
      for (const std::int32_t* part = first; part < last; part += most) {
        Task task{*part, head, 0, 1, 0, 0, 0, true};
        task.first_sharer = static_cast<std::int32_t>(plan_.sharers.size());
        task.sharer_count = static_cast<std::int32_t>(std::min<std::int64_t>(most, last - part));
        for (const std::int32_t* row = part; row < part + task.sharer_count; ++row)
          plan_.sharers.push_back({*row, states[static_cast<std::size_t>(row - all)] +
                                             head * tile_count(table(*row, 0)) * group_});
        plan_.scratch_rows = std::max(plan_.scratch_rows, std::int64_t{task.sharer_count} * group_);
        const std::int64_t concurrency = plan_.config.concurrency;
        add_tiles(task, tile, until, concurrency == 1 ? 1 : (4 * concurrency - 1) / plan_.kv_heads + 1);
      }
    for (const std::int32_t* row = first; row != last; ++row) {
      own[static_cast<std::size_t>(row - all)] = until;
      if (row != first) plan_.commons.push_back({*first, *row, until});
    }
    each_family(first, last, until, [&](const std::int32_t* from, const std::int32_t* to) {
      share_tiles(from, to, all, until, states, own);
    });
  }

  AttendPlan& plan_;
  const BatchView& batch_;
  const Window window_;
  const int group_;
  std::int64_t parts_ = 1;  ///< of a long row's tiles
  std::vector<bool> done_;  ///< rows whose tasks are there
};

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
