// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Attention over pages, the fast path: a tile's scores for all rows, their softmax, then its values. Tile
// by tile; what is read next is prefetched through the block table meanwhile.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kvfolia/core/attend_args.hpp"
#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/core/softmax_state.hpp"
#include "kvfolia/cpu/accumulators.hpp"
#include "kvfolia/cpu/attend_plan.hpp"
#include "kvfolia/cpu/fast_scratch.hpp"
#include "kvfolia/cpu/prefetch.hpp"
#include "kvfolia/cpu/simd.hpp"
#include "kvfolia/cpu/target.hpp"
#include "kvfolia/cpu/task_rows.hpp"
#include "kvfolia/cpu/tile_scores.hpp"
#include "kvfolia/cpu/tile_values.hpp"
#include "kvfolia/cpu/tile_walk.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

/// Cache lines of tiles' keys or values, as regions in the order in which they are read.
class TileRegions {
 public:
  void clear() { count_ = lines_ = 0; }

  /// Of what is added next, takes `room` lines behind the first `skip` ones.
  void select(int skip, int room) {
    skip_ = skip;
    room_ = room;
  }
  template <class Q, class Order, class Tile>
  void add(const Tile& tile, const Run& run) {
    const std::int64_t token_bytes = code_bytes<Q>(tile.dims);
    if (!Order::strided) {
      push(tile.codes, token_bytes * tile.page_tokens);
    } else if (tile.code_stride == token_bytes) {
      push(tile.codes + run.slot * token_bytes, token_bytes * run.count);
    } else {
      for (int t = 0; t < run.count; ++t) push(tile.codes + (run.slot + t) * tile.code_stride, token_bytes);
    }
    if (Q::param_bytes(tile.dims, tile.page_tokens) == 0) return;
    if (Q::seal_tokens > 1)
      push(tile.params, Q::param_bytes(tile.dims, tile.page_tokens));
    else
      push(tile.params + run.slot * tile.param_stride, tile.param_stride * run.count);
  }
  /// Of all but the last lines, which whoever prefetches next asks for.
  Prefetch prefetch(int left) const { return {regions_, count_, lines_ - left}; }

 private:
  void push(const std::byte* begin, std::int64_t bytes) {
    const int all = static_cast<int>((bytes + cache_line - 1) / cache_line);
    const int skipped = std::min(all, skip_), taken = std::min(all - skipped, room_);
    skip_ -= skipped;
    room_ -= taken;
    if (taken == 0) return;
    regions_[count_++] = {begin + std::int64_t{skipped} * cache_line, std::int64_t{taken} * cache_line};
    lines_ += taken;
  }

  // Of a slot's codes and its parameters at most, for keys and for values.
  Region regions_[4 * tile_positions];
  int count_ = 0;
  int lines_ = 0;
  int skip_ = 0;
  int room_ = 0;
};

template <class Layout, class Quant>
class FastTask {
 public:
  using Task = AttendPlan::Task;
  using Scratch = FastScratch<Layout, Quant>;
  using Rows = Accumulators<static_cast<int>(Scratch::value_stride)>;

  FastTask(const PagedView<Layout, Quant>& view, const BatchView& batch, const AttendArgs& args,
           const AttendPlan& plan, const Task& task, float* scratch)
      : view_(view),
        args_(args),
        rows_(view, batch, args, plan, task),
        task_(task),
        amx_(plan.amx && !task.streams),
        at_(round_up<std::int64_t>(rows_.count(), amx_ ? amx_tile : row_block)),
        probabilities_(scratch + at_.scores()),
        tile_{scratch + at_.tile()},
        total_{scratch + at_.total()},
        scores_(view, task.head, task.streams, at_, scratch),
        values_(view, task.head, task.streams, at_, scratch) {}

  /// Reduces the task's tiles: into the output, or into states of their own.
  void run(float* states) {
    load_queries();
#if KVF_CPU_AMX
    if (amx_) {
      const AmxScope amx;
      scores_.use_amx();
      values_.use_amx();
      return reduce_all(states);
    }
#endif
    reduce_all(states);
  }

  /// Merges what run() left in `states`.
  void merge(float* states) {
    total_.clear(rows_.count());
    for (std::int64_t tile = task_.tile_begin; tile < task_.tile_end; ++tile)
      merge_tile({states + (task_.partial + tile * rows_.count()) * Rows::floats});
    write();
  }

 private:
  void reduce_all(float* states) {
    total_.clear(rows_.count());
    TileWalk walk(rows_.table(), rows_.sight());
    TileRuns buffers[2];
    walk.collect(task_.tile_begin, buffers[0]);
    for (std::int64_t tile = task_.tile_begin; tile < task_.tile_end; ++tile) {
      const int now = static_cast<int>((tile - task_.tile_begin) & 1);
      TileRuns& next = buffers[1 - now];
      next.count = 0;
      if (tile + 1 < task_.tile_end) walk.collect(tile + 1, next);
      reduce(tile, buffers[now], next);
      if (task_.partial < 0) {
        merge_tile(tile_);
        continue;
      }
      rows_.each_state(tile, [&](std::int64_t state, std::int64_t row, std::int64_t count) {
        std::copy_n(tile_.data + row * Rows::floats, count * Rows::floats, states + state * Rows::floats);
      });
    }
    if (task_.partial < 0) write();
  }

  /// Of all rows, and zeros that complete the last block.
  void load_queries() {
    for (std::int64_t row = 0; row < at_.rows(); ++row) {
      float* query = scores_.queries() + row * Layout::key_dim;
      std::fill_n(query, Layout::key_dim, 0.0f);
      if (row >= rows_.count()) continue;
      rows_.load_query(row, query);
      for (int d = 0; d < Layout::key_dim; ++d) query[d] *= rows_.scale();
    }
  }

  void reduce(std::int64_t tile, const TileRuns& runs, const TileRuns& next) {
    tile_.clear(rows_.count());
    if (runs.columns == 0) return;
    const RowRange all{0, rows_.count(), at_.rows()};
    regions_.clear();
    if (task_.streams) {
      add_key_regions<Part::rest>(runs);
      add_value_regions<Part::lead>(runs);
    }
    scores_.compute(runs, all, regions_.prefetch(left_lines));
    for (std::int64_t row = 0; row < rows_.count(); ++row) softmax(row, tile, runs);
    for (std::int64_t row = rows_.count(); row < all.end; ++row)
      std::fill_n(probabilities_ + row * score_stride, runs.columns, 0.0f);
    regions_.clear();
    if (task_.streams) {
      add_value_regions<Part::rest>(runs);
      add_key_regions<Part::lead>(next);
    }
    values_.add(runs, all, tile_.values(0), Rows::floats, regions_.prefetch(next.count > 0 ? left_lines : 0));
    for (std::int64_t row = 0; row < rows_.count(); ++row)
      if (!is_finite(tile_.values(row))) leave_out_unseen(row, tile, runs);
  }

  // Data is asked for shortly before it is read, so that it is still in the first cache then: while a tile's
  // keys or values are read, the rest of them, and the first ones of what is read next.
  enum class Part { lead, rest };

  /// Cache lines that are asked for before the first of them is read.
  template <class Q, class Order, class Tile>
  static int lead_lines(const Tile& tile) {
    if (Layout::shares_key_value) return most_lines;  // the values of a tile are its keys: in a cache already
    constexpr int least = 16384 / cache_line;
    if (Order::strided) return least;
    // All of a page is read at once, one of its dims after the other.
    return std::max(least,
                    code_bytes<Q>(tile.dims) * std::min(tile.page_tokens, tile_positions) / cache_line);
  }
  static constexpr int most_lines = 1 << 29;
  /// Lines of the next lead that are asked for ahead only.
  static constexpr int left_lines = Layout::shares_key_value ? 0 : Prefetch::lines_ahead;

  template <Part part>
  void add_key_regions(const TileRuns& runs) {
    each_run(runs, [&](const Run& run, const auto& quant) {
      add_region<part, std::remove_cvref_t<decltype(key_side(quant))>, typename Layout::KeyOrder>(
          view_.key_tile(run.entry, task_.head), run, &run == runs.runs);
    });
  }
  template <Part part>
  void add_value_regions(const TileRuns& runs) {
    if constexpr (!Layout::shares_key_value)
      each_run(runs, [&](const Run& run, const auto& quant) {
        add_region<part, std::remove_cvref_t<decltype(value_side(quant))>, typename Layout::ValueOrder>(
            view_.value_tile(run.entry, task_.head), run, &run == runs.runs);
      });
  }
  /// The first run's format says for all of a tile where the lead ends.
  template <Part part, class Q, class Order, class Tile>
  void add_region(const Tile& tile, const Run& run, bool is_first) {
    if (is_first) {
      const int lead = lead_lines<Q, Order>(tile);
      part == Part::lead ? regions_.select(0, lead + Prefetch::lines_ahead)
                         : regions_.select(lead, most_lines);
    }
    regions_.template add<Q, Order>(tile, run);
  }
  template <class F>
  void each_run(const TileRuns& runs, F&& f) const {
    for (int i = 0; i < runs.count; ++i)
      visit_format(view_, runs.runs[i].entry, [&](const auto& quant) { f(runs.runs[i], quant); });
  }

  /// Gives -infinity to the columns that a row does not see. Those that no row sees are not there.
  void hide_unseen(std::int64_t row, std::int64_t tile, const TileRuns& runs) {
    if (rows_.queries() == 1 && !args_.mask.bits) return;
    const auto query = rows_.query(row / rows_.group());
    float* scores = probabilities_ + row * score_stride;
    const std::int64_t begin = tile * tile_positions;
    const auto column_of = [&](std::int64_t position) {
      const std::int32_t* end = runs.offsets + runs.columns;
      return static_cast<int>(std::lower_bound(runs.offsets, end, position - begin) - runs.offsets);
    };
    const auto hide = [&](int from, int until) {
      for (int c = from; c < until; ++c) scores[c] = kvfolia::detail::negative_infinity;
    };
    if (args_.causal) hide(column_of(query.position + 1), runs.columns);
    const Window& window = view_.window;
    if (window.left >= 0) hide(column_of(window.sink_tokens), column_of(query.position - window.left));
    if (args_.mask.bits)
      for (int c = 0; c < runs.columns; ++c)
        if (!args_.mask.sees(query.row, query.index, begin + runs.offsets[c], query.row_keys)) hide(c, c + 1);
  }

  /// Turns a row's scores into probabilities, up to the tile's sum.
  void softmax(std::int64_t row, std::int64_t tile, const TileRuns& runs) {
    float* scores = probabilities_ + row * score_stride;
    const int padded = round_up(runs.columns, lanes);
    if (args_.soft_cap > 0.0f) cap(scores, padded);
    if (args_.alibi_slopes) add_slope(row, tile, runs, scores);
    hide_unseen(row, tile, runs);
    std::fill(scores + runs.columns, scores + padded, kvfolia::detail::negative_infinity);
    Floats most = broadcast(kvfolia::detail::negative_infinity);
    for (int c = 0; c < padded; c += lanes) most = hn::Max(most, load(scores + c));
    SoftmaxState state;
    state.max = max_of(most);
    // Of scores that are all -infinity, each weighs nothing; NaN must stay.
    const Floats max = broadcast(state.max == kvfolia::detail::negative_infinity ? 0.0f : state.max);
    Floats sum = zeros();
    for (int c = 0; c < padded; c += lanes) {
      const Floats probability = exp(hn::Sub(load(scores + c), max));
      store(probability, scores + c);
      sum = hn::Add(sum, probability);
    }
    state.sum = sum_of(sum);
    tile_.set(row, state);
  }

  void cap(float* scores, int count) const {
    const Floats most = broadcast(args_.soft_cap), inverse = broadcast(1.0f / args_.soft_cap);
    for (int c = 0; c < count; c += lanes) {
      const Floats score = load(scores + c);
      store(hn::Mul(most, tanh(hn::Mul(score, inverse))), scores + c);
    }
  }

  void add_slope(std::int64_t row, std::int64_t tile, const TileRuns& runs, float* scores) const {
    const auto distance =
        static_cast<std::int32_t>(tile * tile_positions - rows_.query(row / rows_.group()).position);
    const Floats slope = broadcast(args_.alibi_slopes[rows_.head(row)]);
    for (int c = 0; c < runs.columns; c += lanes) {
      const Int32s offset = hn::LoadU(Int32Tag(), runs.offsets + c);
      const Floats x = hn::ConvertTo(FloatTag(), hn::Add(offset, hn::Set(Int32Tag(), distance)));
      store(hn::MulAdd(slope, x, load(scores + c)), scores + c);
    }
  }

  static bool is_finite(const float* values) {
    Floats zero = zeros();  // x - x, or NaN
    int d = 0;
    for (; d + lanes <= Layout::value_dim; d += lanes) {
      const Floats x = load(values + d);
      zero = hn::Add(zero, hn::Sub(x, x));
    }
    float rest = sum_of(zero);
    for (; d < Layout::value_dim; ++d) rest += values[d] - values[d];
    return rest == 0.0f;
  }

  /// 0 times a value that is not finite is no number. So such a tile is reduced again for this row, without
  /// what it does not see.
  void leave_out_unseen(std::int64_t row, std::int64_t tile, const TileRuns& runs) {
    const auto query = rows_.query(row / rows_.group());
    TileRuns seen;
    for (int i = 0; i < runs.count; ++i) {
      int next = -1;  // the slot that the newest run can take
      for (int t = 0; t < runs.runs[i].count; ++t) {
        const std::int32_t offset = runs.offsets[runs.runs[i].column + t];
        if (!rows_.sees(query, tile * tile_positions + offset)) continue;
        seen.add(runs.runs[i].entry, runs.runs[i].slot + t, offset, next);
      }
    }
    if (seen.columns == runs.columns) return;
    tile_.clear_row(row);
    if (seen.columns == 0) return;
    const RowRange one{row, 1, row + 1};
    scores_.compute(seen, one, {});
    softmax(row, tile, seen);
    values_.add(seen, one, tile_.values(0), Rows::floats, {});
  }

  void merge_tile(const Rows& tile) {
    total_.merge(tile, rows_.count(), [](float* to, float old_part, const float* from, float new_part) {
      const Floats old_factor = broadcast(old_part), new_factor = broadcast(new_part);
      for (int d = 0; d < Scratch::value_stride; d += lanes)
        store(hn::MulAdd(load(from + d), new_factor, hn::Mul(load(to + d), old_factor)), to + d);
    });
  }

  void write() {
    for (std::int64_t row = 0; row < rows_.count(); ++row)
      rows_.write(row, total_.state(row), total_.values(row));
  }

  const PagedView<Layout, Quant>& view_;
  const AttendArgs& args_;
  const TaskRows<Layout, Quant> rows_;
  const Task& task_;
  const bool amx_;
  const Scratch at_;
  float* probabilities_;
  Rows tile_;
  Rows total_;
  TileScores<Layout, Quant> scores_;
  TileValues<Layout, Quant> values_;
  TileRegions regions_;
};

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
