// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Attention over pages, the plain path: dims and tokens in ascending order, every multiply-add an
// explicit fma, so that no page size, element order, batch or thread count changes a bit.

#include <math.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "kvfolia/core/attend_args.hpp"
#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/core/softmax_state.hpp"
#include "kvfolia/cpu/chunk.hpp"
#include "kvfolia/cpu/executor.hpp"
#include "kvfolia/cpu/plan.hpp"
#include "kvfolia/cpu/target.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET {

namespace detail {

/// Softmax states of several queries and heads, each with its accumulator of values.
template <int Dims>
struct Accumulators {
  float* data;  ///< [rows][max, sum, values]

  static constexpr std::int64_t floats = AttendPlan::state_floats(Dims);

  float* values(std::int64_t row) const { return data + row * floats + 2; }
  SoftmaxState state(std::int64_t row) const { return {data[row * floats], data[row * floats + 1]}; }
  void set(std::int64_t row, SoftmaxState state) const {
    data[row * floats] = state.max;
    data[row * floats + 1] = state.sum;
  }
  void clear(std::int64_t rows) const {
    for (std::int64_t row = 0; row < rows; ++row) {
      set(row, {});
      for (int d = 0; d < Dims; ++d) values(row)[d] = 0.0f;
    }
  }
  /// Adds another set of keys' results, row by row.
  void merge(const Accumulators& other, std::int64_t rows) const {
    for (std::int64_t row = 0; row < rows; ++row) {
      SoftmaxState merged = state(row);
      const auto [old_part, new_part] = merged.merge(other.state(row));
      set(row, merged);
      float* to = values(row);
      const float* from = other.values(row);
      for (int d = 0; d < Dims; ++d) to[d] = ::fmaf(from[d], new_part, to[d] * old_part);
    }
  }
};

/// Some queries of one row against one KV head. Keys are gathered in chunks that cross page borders but
/// never a tile's.
template <class Layout, class Quant>
class AttendTask {
 public:
  using Task = AttendPlan::Task;
  using Rows = Accumulators<Layout::value_dim>;

  AttendTask(const PagedView<Layout, Quant>& view, const BatchView& batch, const AttendArgs& args,
             const AttendPlan& plan, const Task& task, float* scratch)
      : view_(view),
        args_(args),
        task_(task),
        table_(row_table(batch, task.row, task.head, view.page_tokens)),
        group_(plan.config.query_heads / view.kv_heads),
        rows_(std::int64_t{task.query_end - task.query_begin} * group_),
        first_token_(batch.query_begin(task.row) + task.query_begin),
        first_pos_(std::int64_t{batch.first_query(task.row, view.page_tokens).value} + task.query_begin),
        row_keys_(first_pos_ - task.query_begin + batch.query_tokens(task.row)),
        chunk_(view, task.head, scratch + Scratch<Layout, Quant>{plan.scratch_rows}.chunk()) {
    const Scratch<Layout, Quant> at{plan.scratch_rows};
    queries_ = scratch + at.queries();
    tile_.data = scratch + at.tile();
    total_.data = scratch + at.total();
    scale_ = args.scale != 0.0f ? args.scale : 1.0f / ::sqrtf(static_cast<float>(Layout::key_dim));
  }

  /// Reduces the task's tiles: into the output, or into one state a tile from `states` on.
  void run(float* states) {
    for (std::int64_t row = 0; row < rows_; ++row) {
      float* query = queries_ + row * Layout::key_dim;
      load_row(args_.queries, first_token_ + row / group_, head(row), Layout::key_dim, query);
      to_stored(key_side(format_quant<coded_format>(view_.quant)), query, Layout::key_dim);
    }
    total_.clear(rows_);
    for (std::int64_t tile = task_.tile_begin; tile < task_.tile_end; ++tile) {
      if (states) tile_.data = states + tile * rows_ * Rows::floats;
      tile_.clear(rows_);
      reduce_tile(tile);
      if (!states) total_.merge(tile_, rows_);
    }
    if (!states) write();
  }

  /// Merges what run() left in `states`.
  void merge(float* states) {
    total_.clear(rows_);
    for (std::int64_t tile = task_.tile_begin; tile < task_.tile_end; ++tile)
      total_.merge({states + tile * rows_ * Rows::floats}, rows_);
    write();
  }

 private:
  int head(std::int64_t row) const { return task_.head * group_ + static_cast<int>(row % group_); }
  std::int64_t query_pos(std::int64_t row) const { return first_pos_ + row / group_; }

  bool sees(std::int64_t row, std::int64_t key) const {
    const std::int64_t query = query_pos(row);
    if (args_.causal && key > query) return false;
    if (!view_.window.sees(query, key)) return false;
    return !args_.mask.bits || args_.mask.sees(task_.row, task_.query_begin + row / group_, key, row_keys_);
  }

  /// Whether some query may see some key at [begin, end): pages that none sees are not even decoded.
  bool any_sees(std::int64_t begin, std::int64_t end) const {
    const std::int64_t last = query_pos(rows_ - 1);
    if (args_.causal && begin > last) return false;
    const Window& w = view_.window;
    return w.left < 0 || begin < w.sink_tokens || end > first_pos_ - w.left;
  }

  void reduce_tile(std::int64_t tile) {
    const std::int64_t begin = tile * tile_positions;
    const std::int64_t end = begin + tile_positions;
    for (; entry_ < table_.count; ++entry_) {
      const int used = table_.used(entry_);
      const TableEntry entry = table_.entry(entry_);
      if (used == 0 || entry.absent() || table_.position(entry_, used - 1) < begin) continue;
      if (table_.position(entry_, 0) >= end) break;
      if (any_sees(table_.position(entry_, 0), table_.position(entry_, used - 1) + 1))
        gather(entry, used, begin, end);
      if (table_.position(entry_, used - 1) >= end) break;  // the next tile has a part of it, too
    }
    flush();
  }

  void gather(TableEntry entry, int used, std::int64_t begin, std::int64_t end) {
    for (int slot = 0; slot < used; ++slot) {
      const std::int64_t position = table_.position(entry_, slot);
      if (position < begin || position >= end || !any_sees(position, position + 1)) continue;
      if (!chunk_.takes(entry, slot)) flush();
      chunk_.add(entry, slot, position);
      if (chunk_.full()) flush();
    }
  }

  /// Scores the gathered tokens for all queries and adds them in order.
  void flush() {
    if (chunk_.count() == 0) return;
    chunk_.visit([&](const auto& keys, const auto& values) {
      using Keys = std::remove_cvref_t<decltype(keys)>;
      using Values = std::remove_cvref_t<decltype(values)>;
      for (std::int64_t row = 0; row < rows_; ++row) {
        float scores[chunk_tokens];
        chunk_.template score<Keys>(queries_ + row * Layout::key_dim, scores);
        SoftmaxState state = tile_.state(row);
        float* out = tile_.values(row);
        float weights = 0.0f;
        chunk_.template begin<Values>();
        for (int t = 0; t < chunk_.count(); ++t) {
          const std::int64_t position = chunk_.position(t);
          if (!sees(row, position)) continue;
          const auto [old_part, new_part] = state.add(logit(scores[t], row, position));
          if (old_part != 1.0f) chunk_.template rescale<Values>(old_part, out, weights);
          chunk_.template add<Values>(t, new_part, out, weights);
        }
        chunk_.template end<Values>(out, weights);
        tile_.set(row, state);
      }
    });
    chunk_.clear();
  }

  float logit(float score, std::int64_t row, std::int64_t position) const {
    float x = score * scale_;
    if (args_.soft_cap > 0.0f) x = args_.soft_cap * ::tanhf(x / args_.soft_cap);
    if (args_.alibi_slopes)
      x = ::fmaf(args_.alibi_slopes[head(row)], static_cast<float>(position - query_pos(row)), x);
    return x;
  }

  void write() {
    for (std::int64_t row = 0; row < rows_; ++row) {
      SoftmaxState state = total_.state(row);
      float* values = total_.values(row);
      float old_part = 1.0f;
      if (args_.sink_logits && !args_.partial) old_part = state.add(args_.sink_logits[head(row)]).old_part;
      const float factor = old_part * state.normalizer();
      for (int d = 0; d < Layout::value_dim; ++d) values[d] *= factor;
      unrotate(values);
      const std::int64_t token = first_token_ + row / group_;
      store_row(values, args_.out, token, head(row), Layout::value_dim);
      if (args_.lse.data) args_.lse.at(token, head(row)) = state.lse();
    }
  }

  /// From a value as pages hold it. Partial results, too: it is linear, and merging knows no quantizer.
  void unrotate(float* values) const {
    const auto& quant = format_quant<coded_format>(view_.quant);
    if constexpr (Layout::shares_key_value)
      from_stored(key_side(quant), values, Layout::value_dim);
    else
      from_stored(value_side(quant), values, Layout::value_dim);
  }

  const PagedView<Layout, Quant>& view_;
  const AttendArgs& args_;
  const Task& task_;
  const RowTable table_;
  const int group_;
  const std::int64_t rows_;
  const std::int64_t first_token_;
  const std::int64_t first_pos_;
  const std::int64_t row_keys_;
  Chunk<Layout, Quant> chunk_;
  float scale_ = 0.0f;
  float* queries_ = nullptr;  ///< [rows][key_dim]
  Rows tile_{};
  Rows total_{};
  int entry_ = 0;  ///< tiles ascend, so the table is walked once
};

/// Everything attend() could be given wrongly that plan_attend() has not seen.
template <class Layout, class Quant>
Result<> check_attend(const PagedView<Layout, Quant>& view, const BatchView& batch, const AttendArgs& args,
                      const AttendPlan& plan) {
  using kvfolia::detail::bad_argument;
  if (plan.key_dim != Layout::key_dim || plan.value_dim != Layout::value_dim ||
      plan.kv_heads != view.kv_heads || plan.page_tokens != view.page_tokens ||
      (plan.scratch_floats != Scratch<Layout, Quant>{plan.scratch_rows}.size()))
    return bad_argument("plan (made for another view)");
  if (batch.rows != static_cast<std::int32_t>(plan.rows.size()))
    return bad_argument("plan (made for another batch)", batch.rows,
                        static_cast<std::int64_t>(plan.rows.size()));
  for (int row = 0; row < batch.rows; ++row)
    if (plan_row(batch, row, view.kv_heads, view.page_tokens) != plan.rows[static_cast<std::size_t>(row)])
      return bad_argument("plan (made for another batch)");
  const std::int32_t tokens = batch.total_queries();
  if (tokens == 0) return {};
  const auto fits = [&](std::int64_t token_stride, std::int64_t head_stride) {
    return (tokens == 1 || token_stride != 0) && (plan.config.query_heads == 1 || head_stride != 0);
  };
  if (!args.queries.data) return bad_argument("args.queries");
  if (!args.out.data) return bad_argument("args.out");
  if (!fits(args.out.token_stride, args.out.head_stride)) return bad_argument("args.out (strides)");
  if (args.lse.data && !fits(args.lse.token_stride, args.lse.head_stride))
    return bad_argument("args.lse (strides)");
  if (args.partial && args.out.type != DType::fp32)
    return bad_argument("args.out (partial results are float)");
  if (args.mask.bits && !args.mask.row_offset) return bad_argument("args.mask.row_offset");
  return kvfolia::detail::validate_scale<Layout>(args);
}

}  // namespace detail

/// Computes `args.out` and `args.lse` for every query of the batch: decode and prefill rows together.
/// `workspace` has at least plan.workspace_bytes(), aligned as operator new aligns. Allocates nothing,
/// throws nothing; writes nothing when it returns an error.
template <class Layout, class Quant, class Exec>
Result<> attend(const PagedView<Layout, Quant>& view, const BatchView& batch, const AttendArgs& args,
                const AttendPlan& plan, std::span<std::byte> workspace, Exec&& exec) noexcept {
  if (auto ok = detail::check_attend(view, batch, args, plan); !ok) return ok;
  if (exec.concurrency() > plan.config.concurrency)
    return kvfolia::detail::bad_argument("exec.concurrency", exec.concurrency(), plan.config.concurrency);
  if (workspace.size() < plan.workspace_bytes())
    return Error{Errc::workspace_too_small, "workspace", static_cast<std::int64_t>(plan.workspace_bytes()),
                 static_cast<std::int64_t>(workspace.size())};
  if (reinterpret_cast<std::uintptr_t>(workspace.data()) % workspace_alignment != 0)
    return kvfolia::detail::bad_argument("workspace (alignment)", 0, workspace_alignment);

  auto* floats = reinterpret_cast<float*>(workspace.data());
  float* states = floats + plan.config.concurrency * plan.scratch_floats;
  const auto each = [&](const std::vector<AttendPlan::Task>& tasks, auto&& body) {
    exec.parallel_for(static_cast<std::int64_t>(tasks.size()), [&](std::int64_t i, int worker) {
      const AttendPlan::Task& task = tasks[static_cast<std::size_t>(i)];
      detail::AttendTask<Layout, Quant> work(view, batch, args, plan, task,
                                             floats + worker * plan.scratch_floats);
      body(work, task.partial < 0 ? nullptr : states + task.partial * plan.state_floats());
    });
  };
  each(plan.tasks, [](auto& work, float* to) { work.run(to); });
  each(plan.merges, [](auto& work, float* from) { work.merge(from); });
  return {};
}

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET
