// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Attention over pages: checks, and who runs a plan's tasks.

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "kvfolia/core/attend_args.hpp"
#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/cpu/executor.hpp"
#include "kvfolia/cpu/fast_attend.hpp"
#include "kvfolia/cpu/plain_attend.hpp"
#include "kvfolia/cpu/plan.hpp"
#include "kvfolia/cpu/simd.hpp"
#include "kvfolia/cpu/target.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET {

namespace detail {

/// Everything attend() could be given wrongly that plan_attend() has not seen.
template <class Layout, class Quant>
Result<> check_attend(const PagedView<Layout, Quant>& view, const BatchView& batch, const AttendArgs& args,
                      const AttendPlan& plan) {
  using kvfolia::detail::bad_argument;
  if (plan.key_dim != Layout::key_dim || plan.value_dim != Layout::value_dim ||
      plan.kv_heads != view.kv_heads || plan.page_tokens != view.page_tokens ||
      plan.scratch_floats != scratch_floats<Layout, Quant>(plan))
    return bad_argument("plan (made for another view)");
  if (batch.rows != static_cast<std::int32_t>(plan.rows.size()))
    return bad_argument("plan (made for another batch)", batch.rows,
                        static_cast<std::int64_t>(plan.rows.size()));
  for (int row = 0; row < batch.rows; ++row)
    if (plan_row(batch, row, view.kv_heads, view.page_tokens) != plan.rows[static_cast<std::size_t>(row)])
      return bad_argument("plan (made for another batch)");
  for (const AttendPlan::Common& common : plan.commons)
    if (common_tiles(row_table(batch, common.row, 0, view.page_tokens),
                     row_table(batch, common.other, 0, view.page_tokens)) < common.tiles)
      return bad_argument("plan (made for a batch whose rows share pages)");
  const std::int32_t tokens = batch.total_queries();
  if (tokens == 0) return {};
  if (auto ok = kvfolia::detail::validate(args, tokens, plan.config.query_heads); !ok) return ok;
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

  // From a cache line on: vectors that cross two take twice as long.
  const auto begin = reinterpret_cast<std::uintptr_t>(workspace.data());
  auto* floats = reinterpret_cast<float*>(workspace.data() + (cache_line - begin % cache_line) % cache_line);
  float* states = floats + plan.config.concurrency * plan.scratch_floats;
  const auto each = [&]<class Task>(const std::vector<AttendPlan::Task>& tasks, auto&& body,
                                    std::type_identity<Task>) {
    exec.parallel_for(static_cast<std::int64_t>(tasks.size()), [&](std::int64_t i, int worker) {
      const AttendPlan::Task& task = tasks[static_cast<std::size_t>(i)];
      Task work(view, batch, args, plan, task, floats + worker * plan.scratch_floats);
      body(work);
    });
  };
  const auto all = [&](auto path) {
    each(
        plan.tasks, [&](auto& work) { work.run(states); }, path);
    each(
        plan.merges, [&](auto& work) { work.merge(states); }, path);
  };
  if constexpr (has_vectors)
    if (plan.config.path == AttendPath::fast) {
      all(std::type_identity<detail::FastTask<Layout, Quant>>());
      return {};
    }
  all(std::type_identity<detail::PlainTask<Layout, Quant>>());
  return {};
}

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET
