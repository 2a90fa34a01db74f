// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The rows of a task, a query and one head of its group each: where they come from, what they see, where
// their results go.

#include <math.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kvfolia/core/attend_args.hpp"
#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/core/softmax_state.hpp"
#include "kvfolia/cpu/attend_plan.hpp"
#include "kvfolia/cpu/target.hpp"
#include "kvfolia/cpu/tile_walk.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

template <class Layout, class Quant>
class TaskRows {
 public:
  using Task = AttendPlan::Task;

  TaskRows(const PagedView<Layout, Quant>& view, const BatchView& batch, const AttendArgs& args,
           const AttendPlan& plan, const Task& task)
      : view_(view),
        batch_(batch),
        args_(args),
        task_(task),
        shared_(task.sharer_count > 0 ? plan.sharers.data() + task.first_sharer : nullptr),
        group_(plan.config.query_heads / view.kv_heads),
        queries_(task.sharer_count > 0 ? task.sharer_count : task.query_end - task.query_begin) {
    scale_ = args.scale != 0.0f ? args.scale : 1.0f / ::sqrtf(static_cast<float>(Layout::key_dim));
    std::int64_t last = first_query_ = query(0).position;
    for (std::int64_t i = 1; i < queries_; ++i) {
      first_query_ = std::min(first_query_, query(i).position);
      last = std::max(last, query(i).position);
    }
    last_key_ = args.causal ? last : std::numeric_limits<std::int64_t>::max() - 1;
  }

  std::int64_t count() const { return queries_ * group_; }
  std::int64_t queries() const { return queries_; }
  int group() const { return group_; }
  float scale() const { return scale_; }
  int head(std::int64_t row) const { return task_.head * group_ + static_cast<int>(row % group_); }
  RowTable table() const {
    return row_table(batch_, shared_ ? shared_[0].row : task_.row, task_.head, view_.page_tokens);
  }
  Sight sight() const { return {first_query_, last_key_, view_.window}; }

  /// f(state, row, count): which of the plan's states hold a tile of which of the task's rows.
  template <class F>
  void each_state(std::int64_t tile, F&& f) const {
    if (!shared_) return f(task_.partial + tile * count(), std::int64_t{0}, count());
    for (std::int64_t i = 0; i < queries_; ++i)
      f(shared_[i].partial + tile * group_, i * group_, std::int64_t{group_});
  }

  /// One query of the task.
  struct Query {
    int row;             ///< of the batch
    std::int32_t index;  ///< in that row
    std::int64_t token;  ///< of the packed queries
    std::int64_t position;
    std::int64_t row_keys;  ///< one past the last position of the row's queries
  };
  Query query(std::int64_t i) const {
    const int row = shared_ ? shared_[i].row : task_.row;
    const auto index = shared_ ? 0 : task_.query_begin + static_cast<std::int32_t>(i);
    const std::int64_t first = batch_.first_query(row, view_.page_tokens).value;
    return {row, index, std::int64_t{batch_.query_begin(row)} + index, first + index,
            first + batch_.query_tokens(row)};
  }

  bool sees(const Query& query, std::int64_t key) const {
    if (args_.causal && key > query.position) return false;
    if (!view_.window.sees(query.position, key)) return false;
    return !args_.mask.bits || args_.mask.sees(query.row, query.index, key, query.row_keys);
  }

  /// A row's query as pages hold keys.
  void load_query(std::int64_t row, float* to) const {
    load_row(args_.queries, query(row / group_).token, head(row), Layout::key_dim, to);
    to_stored(key_side(format_quant<coded_format>(view_.quant)), to, Layout::key_dim);
  }

  /// Finishes a row and writes it out. `values` are scratch from then on.
  void write(std::int64_t row, SoftmaxState state, float* values) const {
    float old_part = 1.0f;
    if (args_.sink_logits && !args_.partial) old_part = state.add(args_.sink_logits[head(row)]).old_part;
    const float factor = old_part * state.normalizer();
    for (int d = 0; d < Layout::value_dim; ++d) values[d] *= factor;
    unrotate(values);
    const std::int64_t token = query(row / group_).token;
    store_row(values, args_.out, token, head(row), Layout::value_dim);
    if (args_.lse.data) args_.lse.at(token, head(row)) = state.lse();
  }

 private:
  /// From a value as pages hold it. Partial results, too: it is linear, and merging knows no quantizer.
  void unrotate(float* values) const {
    from_stored(value_quant<Layout>(format_quant<coded_format>(view_.quant)), values, Layout::value_dim);
  }

  const PagedView<Layout, Quant>& view_;
  const BatchView& batch_;
  const AttendArgs& args_;
  const Task& task_;
  const AttendPlan::Sharer* shared_;  ///< where several rows share the task's tiles
  const int group_;
  const std::int64_t queries_;
  float scale_ = 0.0f;
  std::int64_t first_query_ = 0;
  std::int64_t last_key_ = 0;
};

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
