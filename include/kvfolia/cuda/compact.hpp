// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Compaction: the tokens of a table that a mask keeps move to its front, in place; codes, parameters and
// positions as they are.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/cuda/append_args.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/decode_args.hpp"
#include "kvfolia/cuda/encode.hpp"
#include "kvfolia/layout/orders.hpp"

namespace kvfolia::inline KVF_ABI::cuda {

/// Who stays. Bit i % 32 of keep[row][head][i / 32] is the i-th slot's of the row's table; where heads share
/// a table, keep's head stride is 0, too. Afterwards the first `kept` slots of a table are in use, its other
/// pages are not. No two tables may share a page: what one moves the other would read.
struct CompactArgs {
  const std::uint32_t* keep = nullptr;
  std::int64_t keep_row_stride = 0;   ///< words
  std::int64_t keep_head_stride = 0;  ///< words
  std::int32_t* positions =
      nullptr;                   ///< as BatchView::slot_pos, which it may be: where kept tokens' go, or null
  std::int32_t* kept = nullptr;  ///< [rows][tables of a row], how many have stayed, or null
};

/// Whether compact() can do it: pages in slot-major order that are coded token by token. All pages of a table
/// must be of one format, and none absent: what is moved is not coded anew.
template <class Layout, class Quant>
constexpr bool compact_supported() {
  return std::is_same_v<typename Layout::KeyOrder, SlotMajor> &&
         std::is_same_v<typename Layout::ValueOrder, SlotMajor> && kvfolia::detail::largest_block<Quant> == 1;
}

namespace detail {

template <class Layout, class Quant>
struct CompactionArgs {
  PagedView<Layout, Quant> view;
  BatchView batch;
  CompactArgs args;
};

/// What rows of so many bytes are moved in.
KVF_INLINE KVF_HD constexpr int move_unit(int bytes) { return bytes % 4 == 0 ? 4 : 1; }

template <int Format, class Layout, class Quant>
Result<> check_rows(const PagedView<Layout, Quant>& view) {
  if constexpr (Format < format_count<Quant>) {
    using Key = KeySide<FormatQuant<Format, Quant>>;
    using Value = ValueSide<FormatQuant<Format, Quant>>;
    const FormatView& format = view.formats[Format];
    const auto fits = [](const PlaneView& plane, int bytes) {
      return bytes == 0 || kvfolia::detail::is_aligned(plane, move_unit(bytes));
    };
    const bool keys = fits(format.keys, code_bytes<Key>(Layout::key_dim)) &&
                      fits(format.key_params, token_param_bytes<Key>(Layout::key_dim));
    const bool values =
        Layout::shares_key_value || (fits(format.values, code_bytes<Value>(Layout::value_dim)) &&
                                     fits(format.value_params, token_param_bytes<Value>(Layout::value_dim)));
    if (format.pages > 0 && !(keys && values))
      return kvfolia::detail::bad_argument("view.formats (alignment)");
    return check_rows<Format + 1>(view);
  }
  return {};
}

template <class Layout, class Quant>
Result<> check_compact(const PagedView<Layout, Quant>& view, const BatchView& batch,
                       const CompactArgs& args) {
  using kvfolia::detail::bad_argument;
  if (auto ok = validate(view); !ok) return ok;
  constexpr std::int64_t most = 65535;  // of a grid's second and third dimension
  if (batch.rows < 0 || batch.rows > most) return bad_argument("batch.rows", batch.rows, most);
  if (view.kv_heads > most) return bad_argument("view.kv_heads", view.kv_heads, most);
  if (batch.rows == 0) return {};
  if (auto ok = kvfolia::detail::validate_arrays(batch); !ok) return ok;
  if (!args.keep) return bad_argument("args.keep");
  if (!batch.table.entries) return bad_argument("batch.table.entries");
  if (!batch.table.indptr && batch.rows > 1 && batch.table.row_stride <= 0)
    return bad_argument("batch.table.row_stride", batch.table.row_stride, 1);
  if (batch.table.head_stride == 0 && args.keep_head_stride != 0)
    return bad_argument("args.keep_head_stride (heads share a table)", args.keep_head_stride);
  if (batch.slot_pos && !args.positions) return bad_argument("args.positions (slots have positions)");
  return check_rows<0>(view);
}

inline constexpr int compact_rows = 32;  ///< slots that a block moves at a time: those of a word of the mask
inline constexpr std::uint32_t compact_shared_bytes = 2 * compact_rows * 8;

/// Rows of one plane, from their old slots to their new ones: all are read before one is written.
template <class Unit, class Ctx>
KVF_INLINE KVF_HD void move_rows(Ctx& ctx, const PlaneView& plane, int bytes, int head) {
  // Long rows in parts, so that registers hold them; short ones side by side in a warp.
  constexpr int part = 32, turns = compact_rows * part / write_threads;
  const int units = bytes / static_cast<int>(sizeof(Unit));
  int shift = 0;
  while (1 << shift < units && 1 << shift < part) ++shift;
  const auto at = [&](int places, int i, int first) -> Unit* {
    const int row = i >> shift, unit = first + (i & ((1 << shift) - 1));
    if (row >= compact_rows) return nullptr;
    const auto to = ctx.template load_shared<Place>(static_cast<std::uint32_t>(places + row) * 8);
    if (to.entry < 0 || unit >= units) return nullptr;
    return reinterpret_cast<Unit*>(plane.tile(TableEntry{to.entry}.page(), head) +
                                   to.slot * plane.slot_stride) +
           unit;
  };
  KVF_NO_UNROLL
  for (int first = 0; first < units; first += part) {
    Unit moved[turns];
    KVF_UNROLLED (turn, turns) {
      if (const Unit* from = at(0, turn * write_threads + ctx.thread(), first)) moved[turn] = ctx.load(from);
    }
    ctx.sync();
    KVF_UNROLLED (turn, turns) {
      if (Unit* to = at(compact_rows, turn * write_threads + ctx.thread(), first)) ctx.store(to, moved[turn]);
    }
  }
}

/// A plane, and the bytes that a token has there.
struct RowsOf {
  const PlaneView* plane;
  int bytes;
};
template <class Layout, class Quant>
KVF_INLINE KVF_HD RowsOf rows_of(const PagedView<Layout, Quant>& view, TableEntry entry, int plane) {
  const FormatView& format = view.formats[entry.format()];
  RowsOf rows{nullptr, 0};
  visit_format(view, entry, [&](const auto& quant) {
    using Q = std::remove_cvref_t<decltype(quant)>;
    constexpr bool has_values = !Layout::shares_key_value;
    switch (plane) {
      case 0: rows = {&format.keys, code_bytes<KeySide<Q>>(Layout::key_dim)}; break;
      case 1: rows = {&format.key_params, token_param_bytes<KeySide<Q>>(Layout::key_dim)}; break;
      case 2: rows = {&format.values, has_values ? code_bytes<ValueSide<Q>>(Layout::value_dim) : 0}; break;
      default:
        rows = {&format.value_params, has_values ? token_param_bytes<ValueSide<Q>>(Layout::value_dim) : 0};
    }
  });
  return rows;
}

}  // namespace detail

/// A block has the table of one row (x) for one head (y), and goes through it word by word of the mask: what
/// is moved never lies in front of where it goes.
template <class Ctx, class Layout, class Quant>
KVF_HD void compact(Ctx& ctx, const detail::CompactionArgs<Layout, Quant>& all) {
  using namespace detail;
  const PagedView<Layout, Quant>& view = all.view;
  const BatchView& batch = all.batch;
  const int row = ctx.block_x(), head = ctx.block_y(), size = view.page_tokens;
  const DecodeRow table = read_row(ctx, batch, row, head, size);
  const std::uint32_t* keep =
      all.args.keep + row * all.args.keep_row_stride + head * all.args.keep_head_stride;
  const bool is_first = batch.table.head_stride != 0 || head == 0;  // of those that share a table
  const TableEntry first_page{table.length > 0 ? ctx.load(batch.table.entries + table.first_entry) : 0};
  KVF_ASSERT(!first_page.absent());
  int base = 0;
  KVF_NO_UNROLL
  for (int first = 0; first < table.length; first += compact_rows) {
    std::uint32_t bits = ctx.load(keep + first / compact_rows);
    const int left = table.length - first;
    if (left < compact_rows) bits &= (1u << left) - 1u;
    if (bits == 0) continue;
    const int kept = Ctx::popc(bits);
    if (base == first && bits == ~0u && !all.args.positions) {
      base += kept;
      continue;
    }
    std::int32_t position = 0;
    const int slot = first + ctx.thread();
    const bool moves = ctx.thread() < compact_rows && (bits >> ctx.thread() & 1u) != 0;
    const int to = base + Ctx::popc(bits & ((1u << (ctx.thread() & 31)) - 1u));
    if (ctx.thread() < compact_rows) {
      const auto place = [&](int at) {
        return Place{moves ? ctx.load(batch.table.entries + table.first_entry + at / size) : -1, at % size};
      };
      ctx.store_shared(8 * static_cast<std::uint32_t>(ctx.thread()), place(slot));
      ctx.store_shared(8 * static_cast<std::uint32_t>(compact_rows + ctx.thread()), place(to));
      if (moves && all.args.positions && is_first) {
        const std::int64_t entry = table.first_entry + slot / size;
        if (batch.slot_pos)
          position = ctx.load(batch.slot_pos + entry * size + slot % size);
        else
          position = (batch.entry_pos ? ctx.load(batch.entry_pos + entry) : slot - slot % size) + slot % size;
      }
    }
    ctx.sync();
    if (moves && all.args.positions && is_first)
      ctx.store(all.args.positions + (table.first_entry + to / size) * size + to % size, position);
    KVF_NO_UNROLL
    for (int plane = 0; plane < 4; ++plane) {
      const RowsOf rows = rows_of(view, first_page, plane);
      if (move_unit(rows.bytes) == 4)
        move_rows<std::uint32_t>(ctx, *rows.plane, rows.bytes, head);
      else
        move_rows<std::uint8_t>(ctx, *rows.plane, rows.bytes, head);
    }
    base += kept;
    ctx.sync();
  }
  if (all.args.kept && is_first && ctx.thread() == 0)
    ctx.store(all.args.kept + (batch.table.head_stride == 0 ? row : row * view.kv_heads + head), base);
}

}  // namespace kvfolia::inline KVF_ABI::cuda
