// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// A sequence's block table and the rules that decide which pages it needs.

#include <cstdint>
#include <vector>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/mask.hpp"

namespace kvfolia::inline KVF_ABI {

/// A table entry and the logical position of its page's first slot.
struct TablePage {
  TableEntry entry;
  LogicalPos begin;
  friend bool operator==(TablePage, TablePage) = default;
};

/// What all sequences of a cache have in common.
struct TableRules {
  std::int32_t page_tokens = 1;
  std::int32_t exact_sink_pages = 0;  ///< so many first pages get the exact format
  int exact_format = 0;
  int coded_format = 0;
  int low_format = -1;  ///< where demoted pages go; -1: nowhere
  bool seals = false;   ///< a coded page is written at once, so an unfinished one is exact
  Window window{};

  bool is_sink(std::int32_t begin) const { return begin / page_tokens < exact_sink_pages; }
  /// The format that a page gets when tokens are added to it.
  int format_at(std::int32_t begin, bool full) const {
    return is_sink(begin) || (seals && !full) ? exact_format : coded_format;
  }
  /// Whether a page of a table may have this format.
  bool allows(int format, std::int32_t begin, bool full) const {
    return format == format_at(begin, full) || (format == low_format && full && !is_sink(begin));
  }
};

/// Pages are ascending in `begin`; all but the last are full. Positions in [gap_begin, gap_end) were
/// evicted: their pages are not listed.
struct Sequence {
  std::vector<TablePage> pages;
  std::int32_t length = 0;  ///< logical positions, evicted ones counted
  std::int32_t gap_begin = 0;
  std::int32_t gap_end = 0;

  /// Whether the last page has slots left.
  bool has_tail(const TableRules& rules) const { return length % rules.page_tokens != 0; }

  /// Slots in use over all pages.
  std::int32_t retained() const { return length - (gap_end - gap_begin); }

  /// Pages [first, first + count) that no query at `query` or later sees, all adjacent to the gap.
  struct Dead {
    std::size_t first;
    std::size_t count;
  };
  Dead dead_pages(std::int32_t query, const TableRules& rules) const {
    if (rules.window.left < 0) return {0, 0};
    const std::int64_t size = rules.page_tokens;
    const std::int64_t sinks = (rules.window.sink_tokens + size - 1) / size;
    Dead dead{static_cast<std::size_t>(sinks), 0};
    for (std::size_t i = dead.first; i < pages.size(); ++i, ++dead.count)
      if (pages[i].begin.value + size > query - rules.window.left) break;
    return dead;
  }

  /// Whether a query at position `to` could still see all that it should, and its slot exists.
  bool can_truncate(std::int32_t to, const TableRules& rules) const {
    if (gap_begin == gap_end || to <= gap_begin) return true;
    return to >= gap_end && to - rules.window.left >= gap_end;
  }
};

}  // namespace kvfolia::inline KVF_ABI
