// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Decode and merge kernels over pages of a cache, run by the host's context and held against ref.

#include <vector>

#include "kvfolia/cuda/decode.hpp"
#include "kvfolia/cuda/merge.hpp"
#include "kvfolia/cuda/plan.hpp"
#include "simt/host_context.hpp"
#include "support/scenario.hpp"

namespace kvfolia_tests::simt {

template <int Format, class Layout, class Quant>
void add_pages(GlobalMemory& global, const PagedView<Layout, Quant>& view) {
  const FormatView& format = view.formats[Format];
  if (format.pages == 0) return;
  const PageFormat pages = page_format<Layout, FormatQuant<Format, Quant>>(view.kv_heads, view.page_tokens);
  const auto add = [&](const PlaneView& plane, std::int64_t tile_bytes, const char* name) {
    if (tile_bytes > 0)
      global.add(plane.base,
                 static_cast<std::size_t>((format.pages - 1) * plane.page_stride +
                                          (view.kv_heads - 1) * plane.head_stride + tile_bytes),
                 name, false);
  };
  add(format.keys, pages.keys.tile_bytes, "keys");
  add(format.values, pages.values.tile_bytes, "values");
  add(format.key_params, pages.key_params.tile_bytes, "key_params");
  add(format.value_params, pages.value_params.tile_bytes, "value_params");
}

/// Gives the kernels all arrays of a batch and a view, and no byte more.
template <class Layout, class Quant>
void add_memory(GlobalMemory& global, const PagedView<Layout, Quant>& view, const BatchView& batch) {
  const auto rows = static_cast<std::size_t>(batch.rows);
  const auto add = [&](const auto* data, std::size_t count, const char* name) {
    if (data) global.add(data, count * sizeof(*data), name, false);
  };
  std::size_t entries = 0;
  if (batch.table.indptr)
    entries = static_cast<std::size_t>(batch.table.indptr[batch.rows]);
  else
    entries = static_cast<std::size_t>(batch.table.row_stride) * rows;
  add(batch.query_indptr, rows + 1, "query_indptr");
  add(batch.table.entries, entries, "table.entries");
  add(batch.table.indptr, rows + 1, "table.indptr");
  add(batch.lengths, rows, "lengths");
  add(batch.last_page_tokens, rows, "last_page_tokens");
  add(batch.query_pos, rows, "query_pos");
  add(batch.entry_pos, entries, "entry_pos");
  add(batch.entry_tokens, entries, "entry_tokens");
  add(batch.slot_pos, entries * static_cast<std::size_t>(view.page_tokens), "slot_pos");
  add_pages<coded_format>(global, view);
  if constexpr (1 < format_count<Quant>) add_pages<1>(global, view);
  if constexpr (2 < format_count<Quant>) add_pages<2>(global, view);
}

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
  const auto tokens = static_cast<std::size_t>(batch.total_queries());
  const auto heads = static_cast<std::size_t>(plan.config.query_heads);
  const auto bytes_of = [](const auto& tensor, std::size_t count, int dims) {
    const std::size_t element = tensor.type == DType::fp32 ? 4 : 2;
    return count == 0
               ? 0
               : (static_cast<std::size_t>(tensor.offset(0, 0)) + count * static_cast<std::size_t>(dims)) *
                     element;
  };
  GlobalMemory global;
  add_memory(global, view, batch);
  global.add(args.queries.data, bytes_of(args.queries, tokens * heads, Layout::key_dim), "queries", false);
  global.add(args.out.data, bytes_of(args.out, tokens * heads, Layout::value_dim), "out", true);
  if (args.lse.data) global.add(args.lse.data, tokens * heads * sizeof(NaturalLse), "lse", true);
  if (args.alibi_slopes) global.add(args.alibi_slopes, heads * sizeof(float), "alibi_slopes", false);
  if (args.sink_logits) global.add(args.sink_logits, heads * sizeof(float), "sink_logits", false);
  if (args.mask.bits) {
    global.add(args.mask.row_offset, static_cast<std::size_t>(batch.rows) * sizeof(std::int64_t),
               "mask.row_offset", false);
    global.add(args.mask.bits, std::size_t{1} << 20, "mask.bits", false);
  }
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
