// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The sequences of one step as a kernel sees them: block tables, lengths, positions, slots.

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/paged_view.hpp"

namespace kvfolia::inline KVF_ABI {

/// Block tables of all rows. CSR where `indptr` is given: row r has entries [indptr[r], indptr[r + 1]).
/// Padded otherwise: row r starts at r * row_stride. A head's table starts head * head_stride further
/// on; 0 where heads share one.
struct TableView {
  const std::int32_t* entries = nullptr;  ///< see TableEntry; negative entries are skipped
  const std::int32_t* indptr = nullptr;
  std::int64_t row_stride = 0;  ///< must be given for several padded rows
  std::int64_t head_stride = 0;

  KVF_HD std::int64_t first(int row, int head) const {
    return (indptr ? std::int64_t{indptr[row]} : row * row_stride) + head * head_stride;
  }
};

/// Arrays of one step. Trivially copyable; comes from Batch, or is filled in over an engine's own
/// arrays. Row r has the packed query tokens [query_indptr[r], query_indptr[r + 1]).
///
/// Of a row's entries all are full but the last one. How full that is comes from `lengths` or from
/// `last_page_tokens`, or, for compacted pages, from `entry_tokens`, which needs table.indptr. Positions
/// ascend strictly along a table, over absent entries too. Where entry_pos, slot_pos or entry_tokens is
/// given, so must be query_pos.
struct BatchView {
  std::int32_t rows = 0;
  const std::int32_t* query_indptr = nullptr;  ///< [rows + 1]; null: one query a row
  TableView table{};
  const std::int32_t* lengths = nullptr;           ///< [rows], slots in use, those of absent entries counted
  const std::int32_t* last_page_tokens = nullptr;  ///< [rows], 1 to page_tokens; needs table.indptr
  const std::int32_t* query_pos = nullptr;         ///< [rows], logical position of the row's first query;
                                                   ///< null: the queries are the row's newest tokens; with
                                                   ///< a causal mask, more of them see no key
  const std::int32_t* entry_pos = nullptr;         ///< one per table entry, the logical position of its first
                                                   ///< slot; null: entry i starts at i * page_tokens
  const std::int32_t* entry_tokens = nullptr;      ///< one per table entry, slots in use
  const std::int32_t* slot_pos = nullptr;  ///< page_tokens per table entry, for compacted pages; null:
                                           ///< positions run on from entry_pos
  const std::int64_t* slots = nullptr;     ///< [query tokens], where append writes; see PhysSlot
  const PageRecode* recodes = nullptr;  ///< [recode_count], carried out by append in every layer; tokens that
                                        ///< they name have slots in the page that they fill
  std::int32_t recode_count = 0;

  KVF_INLINE KVF_HD std::int32_t query_begin(int row) const { return query_indptr ? query_indptr[row] : row; }
  KVF_INLINE KVF_HD std::int32_t query_tokens(int row) const {
    return query_begin(row + 1) - query_begin(row);
  }
  KVF_INLINE KVF_HD std::int32_t total_queries() const { return query_begin(rows); }

  KVF_INLINE KVF_HD std::int32_t entry_count(int row, int page_tokens) const {
    if (table.indptr) return table.indptr[row + 1] - table.indptr[row];
    return static_cast<std::int32_t>((std::int64_t{lengths[row]} + page_tokens - 1) / page_tokens);
  }
  /// Slots in use, over all entries.
  KVF_INLINE KVF_HD std::int32_t length(int row, int page_tokens) const {
    if (lengths) return lengths[row];
    const std::int32_t entries = entry_count(row, page_tokens);
    return entries == 0 ? 0 : (entries - 1) * page_tokens + last_page_tokens[row];
  }
  KVF_INLINE KVF_HD LogicalPos first_query(int row, int page_tokens) const {
    return LogicalPos{query_pos ? query_pos[row] : length(row, page_tokens) - query_tokens(row)};
  }
};

/// One row's table for one KV head, entry by entry.
struct RowTable {
  const std::int32_t* entries;
  const std::int32_t* pos;       ///< or null
  const std::int32_t* tokens;    ///< or null
  const std::int32_t* slot_pos;  ///< or null
  std::int32_t count;
  std::int32_t length;
  std::int32_t page_tokens;

  KVF_HD TableEntry entry(int i) const { return {entries[i]}; }
  KVF_HD int used(int i) const {
    if (tokens) return tokens[i];
    const std::int32_t rest = length - i * page_tokens;
    return rest < page_tokens ? rest : page_tokens;
  }
  KVF_HD std::int64_t position(int i, int slot) const {
    if (slot_pos) return slot_pos[std::int64_t{i} * page_tokens + slot];
    return (pos ? std::int64_t{pos[i]} : std::int64_t{i} * page_tokens) + slot;
  }
};

KVF_INLINE KVF_HD RowTable row_table(const BatchView& batch, int row, int head, int page_tokens) {
  const std::int64_t at = batch.table.first(row, head);
  return {batch.table.entries + at,
          batch.entry_pos ? batch.entry_pos + at : nullptr,
          batch.entry_tokens ? batch.entry_tokens + at : nullptr,
          batch.slot_pos ? batch.slot_pos + at * page_tokens : nullptr,
          batch.entry_count(row, page_tokens),
          batch.length(row, page_tokens),
          page_tokens};
}

namespace detail {

/// Checks which arrays are there, without reading one: they may be a device's.
KVF_INLINE Result<> validate_arrays(const BatchView& batch) {
  if (batch.rows > 0 && !batch.lengths && !(batch.last_page_tokens && batch.table.indptr))
    return bad_argument("batch.lengths");
  if (batch.entry_tokens && !batch.table.indptr)
    return bad_argument("batch.table.indptr (entry_tokens needs it)");
  // Where rows are not where their number says, the newest row's number is not a position.
  if ((batch.entry_pos || batch.slot_pos || batch.entry_tokens) && !batch.query_pos)
    return bad_argument("batch.query_pos (entry_pos, slot_pos and entry_tokens need it)");
  return {};
}

}  // namespace detail

/// Checks everything that a kernel on the host would otherwise have to trust: array combinations,
/// lengths, page numbers and formats. Takes time in proportion to the table entries.
template <class Layout, class Quant>
KVF_INLINE Result<> validate(const PagedView<Layout, Quant>& view, const BatchView& batch) {
  using detail::bad_argument;
  if (auto ok = validate(view); !ok) return ok;
  const int page_tokens = view.page_tokens;
  if (batch.rows < 0) return bad_argument("batch.rows", batch.rows);
  if (batch.rows == 0) return {};
  if (auto ok = detail::validate_arrays(batch); !ok) return ok;
  if (batch.query_indptr && batch.query_indptr[0] != 0) return bad_argument("batch.query_indptr");
  const int tables = batch.table.head_stride == 0 ? 1 : view.kv_heads;
  for (int row = 0; row < batch.rows; ++row) {
    if (batch.query_tokens(row) < 0) return bad_argument("batch.query_indptr", batch.query_tokens(row), 0);
    if (batch.table.indptr && batch.table.indptr[row + 1] < batch.table.indptr[row])
      return bad_argument("batch.table.indptr", batch.table.indptr[row + 1], batch.table.indptr[row]);
    const std::int64_t entries = batch.entry_count(row, page_tokens);
    if (entries > 0 && !batch.table.entries) return bad_argument("batch.table.entries");
    if (entries * page_tokens > INT32_MAX)
      return bad_argument("batch.table.indptr (positions)", entries * page_tokens, INT32_MAX);
    if (batch.last_page_tokens && !batch.lengths && entries > 0 &&
        (batch.last_page_tokens[row] < 1 || batch.last_page_tokens[row] > page_tokens))
      return bad_argument("batch.last_page_tokens", batch.last_page_tokens[row], page_tokens);
    const std::int64_t length = batch.length(row, page_tokens);
    const bool fits = batch.entry_tokens ? 0 <= length && length <= entries * page_tokens
                                         : (length + page_tokens - 1) / page_tokens == entries && length >= 0;
    if (!fits) return bad_argument("batch.lengths", length, entries * page_tokens);
    if (batch.query_pos && batch.query_pos[row] < 0)
      return bad_argument("batch.query_pos", batch.query_pos[row], 0);
    if (!batch.table.indptr && entries > batch.table.row_stride &&
        (batch.rows > 1 || batch.table.row_stride > 0))
      return bad_argument("batch.lengths (pages beyond table.row_stride)", entries, batch.table.row_stride);
    if (!batch.table.indptr && tables > 1 && entries > batch.table.head_stride)
      return bad_argument("batch.lengths (pages beyond table.head_stride)", entries, batch.table.head_stride);
    for (int head = 0; head < tables; ++head) {
      const RowTable table = row_table(batch, row, head, page_tokens);
      std::int64_t next = 0, used = 0;
      for (int i = 0; i < table.count; ++i) {
        const TableEntry entry = table.entry(i);
        if (table.used(i) < 0 || table.used(i) > page_tokens)
          return bad_argument("batch.entry_tokens", table.used(i), page_tokens);
        used += table.used(i);
        for (int slot = 0; slot < table.used(i); slot += table.slot_pos ? 1 : table.used(i)) {
          if (table.position(i, slot) < next)
            return bad_argument("batch.entry_pos (must ascend)", table.position(i, slot), next);
          next = table.position(i, table.slot_pos ? slot : table.used(i) - 1) + 1;
        }
        if (entry.absent()) continue;
        if (entry.format() >= PagedView<Layout, Quant>::formats_count)
          return bad_argument("batch.table.entries (format)", entry.format(),
                              PagedView<Layout, Quant>::formats_count);
        if (view.formats[entry.format()].pages == 0) return bad_argument("view.formats.pages", 0, 1);
        if (entry.page().value >= view.formats[entry.format()].pages)
          return bad_argument("batch.table.entries (page)", entry.page().value,
                              view.formats[entry.format()].pages);
      }
      // Heads with tables of their own may have kept fewer tokens than the row's longest.
      const bool adds_up = tables == 1 ? used == length : used <= length;
      if (!adds_up) return bad_argument("batch.lengths (entry_tokens add up to other ones)", length, used);
    }
  }
  return {};
}

}  // namespace kvfolia::inline KVF_ABI
