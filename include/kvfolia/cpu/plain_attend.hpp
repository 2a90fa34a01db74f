// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Attention over pages, the plain path: dims and tokens in ascending order, every multiply-add an
// explicit fma, so that no page size, element order, batch or thread count changes a bit.

#include <math.h>

#include <cstdint>
#include <type_traits>

#include "kvfolia/core/attend_args.hpp"
#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/core/softmax_state.hpp"
#include "kvfolia/cpu/accumulators.hpp"
#include "kvfolia/cpu/attend_plan.hpp"
#include "kvfolia/cpu/chunk.hpp"
#include "kvfolia/cpu/target.hpp"
#include "kvfolia/cpu/task_rows.hpp"
#include "kvfolia/cpu/tile_walk.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

/// Where one worker's arrays lie, in floats. `rows` counts queries times heads of a group.
template <class Layout, class Quant>
struct PlainScratch {
  std::int64_t rows;

  static constexpr std::int64_t state_floats = Accumulators<Layout::value_dim>::floats;
  constexpr std::int64_t queries() const { return 0; }
  constexpr std::int64_t tile() const { return rows * Layout::key_dim; }
  constexpr std::int64_t total() const { return tile() + rows * state_floats; }
  constexpr std::int64_t chunk() const { return total() + rows * state_floats; }
  constexpr std::int64_t size() const { return chunk() + Chunk<Layout, Quant>::floats; }
};

/// Some queries of one row against one KV head. Keys are gathered in chunks that cross page borders but
/// never a tile's.
template <class Layout, class Quant>
class PlainTask {
 public:
  using Task = AttendPlan::Task;
  using Rows = Accumulators<Layout::value_dim>;

  PlainTask(const PagedView<Layout, Quant>& view, const BatchView& batch, const AttendArgs& args,
            const AttendPlan& plan, const Task& task, float* scratch)
      : view_(view),
        args_(args),
        task_(task),
        rows_(view, batch, args, plan, task),
        walk_(rows_.table(), rows_.sight()),
        chunk_(view, task.head, scratch + PlainScratch<Layout, Quant>{plan.scratch_rows}.chunk()) {
    const PlainScratch<Layout, Quant> at{plan.scratch_rows};
    queries_ = scratch + at.queries();
    tile_.data = scratch + at.tile();
    total_.data = scratch + at.total();
  }

  /// Reduces the task's tiles: into the output, or into states of their own.
  void run(float* states) {
    for (std::int64_t row = 0; row < rows_.count(); ++row)
      rows_.load_query(row, queries_ + row * Layout::key_dim);
    total_.clear(rows_.count());
    for (std::int64_t tile = task_.tile_begin; tile < task_.tile_end; ++tile) {
      if (task_.partial >= 0) tile_.data = state(states, tile);
      tile_.clear(rows_.count());
      reduce_tile(tile);
      if (task_.partial < 0) merge_tile(tile_);
    }
    if (task_.partial < 0) write();
  }

  /// Merges what run() left in `states`.
  void merge(float* states) {
    total_.clear(rows_.count());
    for (std::int64_t tile = task_.tile_begin; tile < task_.tile_end; ++tile)
      merge_tile({state(states, tile)});
    write();
  }

 private:
  float* state(float* states, std::int64_t tile) const {
    return states + (task_.partial + tile * rows_.count()) * Rows::floats;
  }

  void merge_tile(const Rows& tile) {
    total_.merge(tile, rows_.count(), [](float* to, float old_part, const float* from, float new_part) {
      for (int d = 0; d < Layout::value_dim; ++d) to[d] = ::fmaf(from[d], new_part, to[d] * old_part);
    });
  }

  void reduce_tile(std::int64_t tile) {
    TileRuns runs;
    walk_.collect(tile, runs);
    for (int i = 0; i < runs.count; ++i)
      for (int t = 0; t < runs.runs[i].count; ++t) {
        const TableEntry entry = runs.runs[i].entry;
        const int slot = runs.runs[i].slot + t;
        if (!chunk_.takes(entry, slot)) flush();
        chunk_.add(entry, slot, tile * tile_positions + runs.offsets[runs.runs[i].column + t]);
        if (chunk_.full()) flush();
      }
    flush();
  }

  /// Scores the gathered tokens for all queries and adds them in order.
  void flush() {
    if (chunk_.count() == 0) return;
    chunk_.visit([&](const auto& keys, const auto& values) {
      using Keys = std::remove_cvref_t<decltype(keys)>;
      using Values = std::remove_cvref_t<decltype(values)>;
      for (std::int64_t row = 0; row < rows_.count(); ++row) {
        const auto query = rows_.query(row / rows_.group());
        float scores[chunk_tokens];
        chunk_.template score<Keys>(queries_ + row * Layout::key_dim, scores);
        SoftmaxState state = tile_.state(row);
        float* out = tile_.values(row);
        float weights = 0.0f;
        chunk_.template begin<Values>();
        for (int t = 0; t < chunk_.count(); ++t) {
          const std::int64_t position = chunk_.position(t);
          if (!rows_.sees(query, position)) continue;
          const auto [old_part, new_part] = state.add(logit(scores[t], row, position - query.position));
          if (old_part != 1.0f) chunk_.template rescale<Values>(old_part, out, weights);
          chunk_.template add<Values>(t, new_part, out, weights);
        }
        chunk_.template end<Values>(out, weights);
        tile_.set(row, state);
      }
    });
    chunk_.clear();
  }

  float logit(float score, std::int64_t row, std::int64_t distance) const {
    float x = score * rows_.scale();
    if (args_.soft_cap > 0.0f) x = args_.soft_cap * ::tanhf(x / args_.soft_cap);
    if (args_.alibi_slopes) x = ::fmaf(args_.alibi_slopes[rows_.head(row)], static_cast<float>(distance), x);
    return x;
  }

  void write() {
    for (std::int64_t row = 0; row < rows_.count(); ++row)
      rows_.write(row, total_.state(row), total_.values(row));
  }

  const PagedView<Layout, Quant>& view_;
  const AttendArgs& args_;
  const Task& task_;
  const TaskRows<Layout, Quant> rows_;
  TileWalk walk_;
  Chunk<Layout, Quant> chunk_;
  float* queries_ = nullptr;  ///< [rows][key_dim]
  Rows tile_{};
  Rows total_{};
};

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
