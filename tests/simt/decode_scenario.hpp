// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Decode and merge kernels over pages of a cache, run by the host's context and held against ref.

#include <vector>

#include "kvfolia/cuda/decode.hpp"
#include "kvfolia/cuda/merge.hpp"
#include "kvfolia/cuda/plan.hpp"
#include "simt/host_context.hpp"
#include "support/kernel_memory.hpp"
#include "support/scenario.hpp"

namespace kvfolia_tests::simt {

/// What both kernels did.
struct Ran {
  Counts decode;
  Counts merge;
};

/// Plans and runs attend() as a GPU of a compute capability would, with blocks and threads in an order that
/// the seed chooses.
template <int Capability = 90, class Layout, class Quant>
Ran attend(const PagedView<Layout, Quant>& view, const BatchView& batch, const AttendArgs& args,
           const cuda::AttendPlan& plan, std::uint64_t seed, bool counts_requests = false) {
  std::vector<float> workspace(plan.workspace_bytes() / sizeof(float), NAN);
  REQUIRE(cuda::detail::check_attend(view, batch, args, plan, plan.workspace_bytes()));
  const auto kernel_args = cuda::detail::decode_args(view, batch, args, plan, workspace.data());
  GlobalMemory global;
  KernelCall<Layout, Quant>{view, batch, args, plan.config.query_heads}.each_array(
      [&](auto* data, std::size_t bytes, const char* name, bool writable) {
        global.add(data, bytes, name, writable);
      });
  global.add(workspace.data(), workspace.size() * sizeof(float), "workspace", true);

  Ran ran;
  const auto launch_decode = [&](auto kernel, cuda::Grid grid) -> Result<> {
    using Shape = cuda::detail::DecodeShape<Layout, Quant, kernel.tiles, kernel.format, Capability>;
    ran.decode =
        launch({.grid = {grid.x, grid.y, grid.z},
                .threads = Shape::threads,
                .shared_bytes = Shape::shared_bytes,
                .counts_requests = counts_requests},
               global, seed, [&](HostContext& ctx) {
                 cuda::detail::decode<Layout, Quant, kernel.tiles, kernel.general, kernel.format, Capability>(
                     ctx, kernel_args);
               });
    return {};
  };
  REQUIRE(cuda::detail::launch_kernels<Layout, Quant>(
      plan, batch.rows, cuda::detail::is_plain(args, view.window), launch_decode));
  const cuda::Grid grid = plan.merge_grid(batch.rows);
  ran.merge =
      launch({.grid = {grid.x, grid.y, grid.z},
              .threads = cuda::detail::merge_threads,
              .shared_bytes = cuda::detail::merge_shared_bytes<Layout, Quant>},
             global, seed + 1, [&](HostContext& ctx) { cuda::detail::merge_splits(ctx, kernel_args); });
  return ran;
}

/// What a batch needs of a plan.
inline cuda::AttendConfig config_of(const BatchView& batch, int page_tokens, int query_heads) {
  cuda::AttendConfig config{.query_heads = query_heads, .rows = batch.rows, .queries = batch.total_queries()};
  for (int row = 0; row < batch.rows; ++row) {
    config.row_queries = std::max(config.row_queries, batch.query_tokens(row));
    config.row_slots =
        std::max(config.row_slots, batch.entry_tokens ? batch.entry_count(row, page_tokens) * page_tokens
                                                      : batch.length(row, page_tokens));
  }
  return config;
}

}  // namespace kvfolia_tests::simt
