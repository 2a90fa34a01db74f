// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// All memory that attention's kernels touch for one call: to watch over it, or to bring it elsewhere.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvfolia/core/attend_args.hpp"
#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/page_format.hpp"
#include "kvfolia/core/paged_view.hpp"

namespace kvfolia_tests {

using namespace kvfolia;

/// A call's view, batch and arguments, whose pointers may be replaced.
template <class Layout, class Quant>
struct KernelCall {
  PagedView<Layout, Quant> view;
  BatchView batch;
  AttendArgs args;
  int query_heads;

  /// Calls f(pointer, bytes, name, whether kernels write there) for every array, with exactly the bytes that
  /// belong to it. Queries and results are packed. The host reads the batch's arrays.
  template <class F>
  void each_array(F&& f) {
    const BatchView host = batch;
    const auto rows = static_cast<std::size_t>(host.rows);
    const auto tokens = static_cast<std::size_t>(host.total_queries());
    const std::int64_t of_head =
        host.table.indptr ? std::int64_t{host.table.indptr[host.rows]} : host.table.row_stride * host.rows;
    const auto entries = static_cast<std::size_t>(of_head + (view.kv_heads - 1) * host.table.head_stride);
    const auto heads = static_cast<std::size_t>(query_heads);
    const auto mask_size = args.mask.bits ? mask_bytes() : 0;
    const auto input = [&](auto*& pointer, std::size_t count, const char* name) {
      if (pointer) f(pointer, count * sizeof(*pointer), name, false);
    };
    input(batch.query_indptr, rows + 1, "query_indptr");
    input(batch.table.entries, entries, "table.entries");
    input(batch.table.indptr, rows + 1, "table.indptr");
    input(batch.lengths, rows, "lengths");
    input(batch.last_page_tokens, rows, "last_page_tokens");
    input(batch.query_pos, rows, "query_pos");
    input(batch.entry_pos, entries, "entry_pos");
    input(batch.entry_tokens, entries, "entry_tokens");
    input(batch.slot_pos, entries * static_cast<std::size_t>(view.page_tokens), "slot_pos");
    input(args.alibi_slopes, heads, "alibi_slopes");
    input(args.sink_logits, heads, "sink_logits");
    input(args.mask.bits, mask_size, "mask.bits");
    input(args.mask.row_offset, rows, "mask.row_offset");
    f(args.queries.data, tokens * heads * Layout::key_dim * bytes_of(args.queries.type), "queries", false);
    f(args.out.data, tokens * heads * Layout::value_dim * bytes_of(args.out.type), "out", true);
    if (args.lse.data) f(args.lse.data, tokens * heads * sizeof(NaturalLse), "lse", true);
    each_plane<0>(f);
    if constexpr (1 < format_count<Quant>) each_plane<1>(f);
    if constexpr (2 < format_count<Quant>) each_plane<2>(f);
  }

 private:
  static std::size_t bytes_of(DType type) { return type == DType::fp32 ? 4 : 2; }

  std::size_t mask_bytes() const {
    std::int64_t end = 0;
    for (int row = 0; row < batch.rows; ++row) {
      const std::int64_t queries = batch.query_tokens(row);
      const std::int64_t first = batch.query_pos ? std::int64_t{batch.query_pos[row]}
                                                 : batch.length(row, view.page_tokens) - queries;
      end = std::max(end, args.mask.row_offset[row] + (queries * (first + queries) + 7) / 8);
    }
    return static_cast<std::size_t>(end);
  }

  template <int Format, class F>
  void each_plane(F&& f) {
    FormatView& format = view.formats[Format];
    if (format.pages == 0) return;
    const PageFormat pages = page_format<Layout, FormatQuant<Format, Quant>>(view.kv_heads, view.page_tokens);
    const auto plane = [&](PlaneView& p, const PlaneFormat& packed, const char* name) {
      // Slots of an engine's own pages may lie further apart.
      const std::int64_t tile =
          std::max(packed.tile_bytes, (view.page_tokens - 1) * p.slot_stride + packed.slot_stride);
      if (packed.tile_bytes > 0)
        f(p.base,
          static_cast<std::size_t>((format.pages - 1) * p.page_stride + (view.kv_heads - 1) * p.head_stride +
                                   tile),
          name, false);
    };
    plane(format.keys, pages.keys, "keys");
    plane(format.values, pages.values, "values");
    plane(format.key_params, pages.key_params, "key_params");
    plane(format.value_params, pages.value_params, "value_params");
  }
};

}  // namespace kvfolia_tests
