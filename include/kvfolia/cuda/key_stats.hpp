// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What policies that read pages by their keys ask of them: smallest, largest and mean key of every channel.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/cuda/append_args.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/page_values.hpp"
#include "kvfolia/layout/orders.hpp"

namespace kvfolia::inline KVF_ABI::cuda {

/// Pages whose statistics are asked for, and where those go. Of a page without tokens, as one that is reused,
/// min is infinity, max -infinity and mean 0. Keys count as pages hold them: decoded, rotated where they are.
struct KeyStatsArgs {
  const std::int32_t* entries = nullptr;  ///< [count], see TableEntry; negative ones are skipped
  const std::int32_t* tokens = nullptr;   ///< [count], slots in use, the first ones; null: all
  std::int32_t count = 0;
  // Each [entries' formats: format_offset + page][kv_heads][key_dim], or null where nobody asks.
  float* min = nullptr;
  float* max = nullptr;
  float* mean = nullptr;
  std::int64_t format_offset[TableEntry::max_formats] = {};  ///< pages in front of a format's first one
};

namespace detail {

template <class Layout, class Quant>
Result<> check_key_stats(const PagedView<Layout, Quant>& view, const KeyStatsArgs& args) {
  using kvfolia::detail::bad_argument;
  if (auto ok = validate(view); !ok) return ok;
  if (args.count < 0) return bad_argument("args.count", args.count);
  if (args.count > 0 && !args.entries) return bad_argument("args.entries");
  constexpr std::int64_t most_heads = 65535;  // of a grid's second dimension
  return view.kv_heads <= most_heads ? Result<>() : bad_argument("view.kv_heads", view.kv_heads, most_heads);
}

}  // namespace detail

/// Whether key_stats() can read keys.
template <class Layout, class Quant>
constexpr bool key_stats_supported() {
  return std::is_same_v<typename Layout::KeyOrder, SlotMajor> && detail::reads_keys<Layout, Quant>();
}

/// A block has a head (y) of one page (x), its threads channels.
template <class Ctx, class Layout, class Quant>
KVF_HD void key_stats(Ctx& ctx, const PagedView<Layout, Quant>& view, const KeyStatsArgs& args) {
  using namespace detail;
  const TableEntry entry{ctx.load(args.entries + ctx.block_x())};
  if (entry.absent()) return;
  const int head = ctx.block_y();
  const int tokens = args.tokens ? ctx.load(args.tokens + ctx.block_x()) : view.page_tokens;
  const FormatView& format = view.formats[entry.format()];
  KVF_ASSERT(entry.page().value < format.pages && 0 <= tokens && tokens <= view.page_tokens);
  const LoadedTile<Ctx> tile(ctx, format.keys, format.key_params, entry.page(), head, Layout::key_dim,
                             view.page_tokens);
  const std::int64_t page = args.format_offset[entry.format()] + entry.page().value;
  visit_format(view, entry, [&](const auto& quant) {
    each_thread(ctx, Layout::key_dim, [&](int dim) {
      float low = __builtin_huge_valf(), high = -__builtin_huge_valf(), sum = 0.0f;
      KVF_UNROLL_4
      for (int slot = 0; slot < tokens; ++slot) {
        const float x = stored_value(key_side(quant), tile, slot, dim);
        low = x < low ? x : low;
        high = x > high ? x : high;
        sum += x;
      }
      const std::int64_t at = (page * view.kv_heads + head) * Layout::key_dim + dim;
      if (args.min) ctx.store(args.min + at, low);
      if (args.max) ctx.store(args.max + at, high);
      if (args.mean) ctx.store(args.mean + at, tokens == 0 ? 0.0f : sum / static_cast<float>(tokens));
    });
  });
}

}  // namespace kvfolia::inline KVF_ABI::cuda
