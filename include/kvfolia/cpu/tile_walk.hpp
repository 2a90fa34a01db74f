// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Which slots of which pages make up a tile: a block table walked once, in order of positions.

#include <algorithm>
#include <cstdint>

#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/mask.hpp"
#include "kvfolia/cpu/attend_plan.hpp"
#include "kvfolia/cpu/target.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

/// What some of a task's queries may see; what none sees is not even read.
struct Sight {
  std::int64_t first_query;  ///< position of the earliest one
  std::int64_t last_key;     ///< the last position that any may see
  Window window;

  bool any_sees(std::int64_t position) const {
    return position <= last_key &&
           (window.left < 0 || position < window.sink_tokens || position >= first_query - window.left);
  }
};

/// Neighbouring slots of a page that are neighbouring columns of a tile.
struct Run {
  TableEntry entry;
  std::int32_t slot;
  std::int32_t count;
  std::int32_t column;
};

/// Neighbouring runs of one format; not empty.
struct Segment {
  const Run* first;
  const Run* last;

  const Run* begin() const { return first; }
  const Run* end() const { return last; }
  TableEntry entry() const { return first->entry; }
  int column() const { return first->column; }
  int columns() const { return (last - 1)->column + (last - 1)->count - column(); }
};

/// One tile's tokens: a column each, in order of their positions.
struct TileRuns {
  Run runs[tile_positions];
  std::int32_t offsets[tile_positions + 16];  ///< position of each column, from the tile's first one on
  int count = 0;
  int columns = 0;

  /// Adds a slot; `next` is the one that the newest run can take, -1 if none.
  void add(TableEntry entry, int slot, std::int32_t offset, int& next) {
    if (slot != next) runs[count++] = {entry, slot, 0, columns};
    ++runs[count - 1].count;
    offsets[columns++] = offset;
    next = slot + 1;
  }

  /// f(segment) for all segments in order.
  template <class F>
  void each_segment(F&& f) const {
    for (const Run *run = runs, *end = runs + count; run != end;) {
      const Run* next = run;
      while (next != end && next->entry.format() == run->entry.format()) ++next;
      f(Segment{run, next});
      run = next;
    }
  }
};

class TileWalk {
 public:
  TileWalk(const RowTable& table, const Sight& sight) : table_(table), sight_(sight) {}

  /// The runs of a tile. Tiles must be asked for in ascending order.
  void collect(std::int64_t tile, TileRuns& to) {
    to.count = to.columns = 0;
    const std::int64_t begin = tile * tile_positions, end = begin + tile_positions;
    for (; entry_ < table_.count; ++entry_) {
      const int used = table_.used(entry_);
      const TableEntry entry = table_.entry(entry_);
      if (used == 0 || entry.absent() || table_.position(entry_, used - 1) < begin) continue;
      if (table_.position(entry_, 0) >= end) return;
      if (table_.slot_pos)
        add_slots(entry, used, begin, end, to);
      else
        add_range(entry, used, begin, end, to);
      if (table_.position(entry_, used - 1) >= end) return;  // the next tile has a part of it, too
    }
  }

 private:
  /// Positions run on from that of the first slot.
  void add_range(TableEntry entry, int used, std::int64_t begin, std::int64_t end, TileRuns& to) const {
    const std::int64_t first = table_.position(entry_, 0);
    const std::int64_t from = std::max(begin, first);
    const std::int64_t until = std::min({end, first + used, sight_.last_key + 1});
    const Window& w = sight_.window;
    if (w.left < 0) return add(entry, first, from, until, begin, to);
    const std::int64_t sinks = std::min<std::int64_t>(until, w.sink_tokens);
    add(entry, first, from, sinks, begin, to);
    add(entry, first, std::max({from, sinks, sight_.first_query - w.left}), until, begin, to);
  }
  static void add(TableEntry entry, std::int64_t first, std::int64_t from, std::int64_t until,
                  std::int64_t tile_begin, TileRuns& to) {
    if (from >= until) return;
    const auto count = static_cast<std::int32_t>(until - from);
    to.runs[to.count++] = {entry, static_cast<std::int32_t>(from - first), count, to.columns};
    const auto offset = static_cast<std::int32_t>(from - tile_begin);
    for (std::int32_t i = 0; i < count; ++i) to.offsets[to.columns + i] = offset + i;
    to.columns += count;
  }

  /// Every slot has a position of its own.
  void add_slots(TableEntry entry, int used, std::int64_t begin, std::int64_t end, TileRuns& to) const {
    int next = -1;
    for (int slot = 0; slot < used; ++slot) {
      const std::int64_t position = table_.position(entry_, slot);
      if (position < begin || position >= end || !sight_.any_sees(position)) continue;
      to.add(entry, slot, static_cast<std::int32_t>(position - begin), next);
    }
  }

  RowTable table_;
  Sight sight_;
  int entry_ = 0;
};

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
