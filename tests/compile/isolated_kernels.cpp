// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What an engine compiles once for every instruction set: kernels, over views that come from elsewhere.

#include "kvfolia/cpu.hpp"
#include "kvfolia/layout/gqa.hpp"
#include "kvfolia/quant/int8.hpp"

using namespace kvfolia;
using View = PagedView<Gqa<64, 16>, Int8>;

Result<> unit_append(const View& view, const BatchView& batch, const AppendArgs& args) {
  return cpu::append(view, batch, args, cpu::serial);
}
Result<cpu::AttendPlan> unit_plan(const View& view, const BatchView& batch, const cpu::AttendConfig& config) {
  return cpu::plan_attend(view, batch, config);
}
Result<> unit_attend(const View& view, const BatchView& batch, const AttendArgs& args,
                     const cpu::AttendPlan& plan, std::span<std::byte> workspace) {
  return cpu::attend(view, batch, args, plan, workspace, cpu::serial);
}
Result<> unit_merge(const MergeArgs& args) { return cpu::merge(args, cpu::serial); }
Result<> unit_finish(const FinishArgs& args) { return cpu::finish(args, cpu::serial); }
