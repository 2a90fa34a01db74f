// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The same kernel, compiled in two translation units with other flags and checks.

#include <vector>

#include "kvfolia/cpu.hpp"
#include "kvfolia/kvfolia.hpp"

/// What a unit is: its checks, and the address of its own copy of attend().
struct Unit {
  bool checked;
  const void* kernel;
  std::vector<float> out;
};

inline namespace KVF_TEST_UNIT {

/// Attention of one query over three tokens, on this unit's kernels.
inline Unit run_unit() {
  using namespace kvfolia;
  using Cache = PagedCache<Gqa<64, 4>, Int8>;
  Cache cache({.shape = {1, 1, dynamic}, .pages = 2});
  Step step = cache.begin_step();
  static_cast<void>(step.extend(*step.create(), 3));
  const Batch batch = step.commit();
  std::vector<float> keys(3 * 64), values(3 * 64), queries(3 * 64), out(3 * 64);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    keys[i] = static_cast<float>(i % 7) - 3.0f;
    values[i] = static_cast<float>(i % 11);
    queries[i] = static_cast<float>(i % 5) * 0.25f;
  }
  AppendArgs append;
  append.keys = {keys.data(), 64, 64};
  append.values = {values.data(), 64, 64};
  const auto view = cache.view(LayerId{0});
  static_cast<void>(cpu::append(view, batch, append, cpu::serial));
  AttendArgs args;
  args.queries = {queries.data(), 64, 64};
  args.out = {out.data(), 64, 64};
  const auto plan = cpu::plan_attend(view, batch, {1, 1, cpu::AttendPath::plain});
  std::vector<std::byte> workspace(plan->workspace_bytes());
  static_cast<void>(cpu::attend(view, batch, args, *plan, workspace, cpu::serial));
  using Kernel = Result<> (*)(const Cache::View&, const BatchView&, const AttendArgs&, const cpu::AttendPlan&,
                              std::span<std::byte>, const cpu::Serial&) noexcept;
  const Kernel kernel = &cpu::attend<Cache::Layout, Int8, const cpu::Serial&>;
  return {is_checked, reinterpret_cast<const void*>(kernel), out};
}

}  // namespace KVF_TEST_UNIT
