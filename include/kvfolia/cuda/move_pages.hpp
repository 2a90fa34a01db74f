// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Moving whole pages: copies within a store, and between pages and one contiguous buffer. Knows neither
// layouts nor quantizers: a page's scales and metadata go with it.

#include <cstddef>
#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/store_view.hpp"
#include "kvfolia/cuda/context.hpp"

namespace kvfolia::inline KVF_ABI::cuda {

enum class PageMove : std::uint8_t {
  copy,     ///< from page to page
  gather,   ///< from pages of one format to a buffer, [page][layer][slice_bytes]
  scatter,  ///< from such a buffer to pages
};

namespace detail {

inline constexpr int move_threads = 256;
inline constexpr int move_bytes = move_threads * 16 * 4;  ///< of a slice, by one block

/// Every array is the device's.
struct MoveArgs {
  StoreView store{};
  const PageCopy* copies = nullptr;  ///< [count], of PageMove::copy
  const std::int32_t* pages =
      nullptr;  ///< [count], of the others: page numbers of `format`; negative ones are skipped
  std::byte* buffer = nullptr;
  std::int32_t count = 0;
  int format = 0;
  int chunks = 1;  ///< of a slice
};

inline std::int64_t largest_slice(const StoreView& store) {
  std::int64_t bytes = 0;
  for (const PageSlices& format : store.formats)
    if (format.slice_bytes > bytes) bytes = format.slice_bytes;
  return bytes;
}
inline int move_chunks(std::int64_t slice_bytes) {
  return static_cast<int>((slice_bytes + move_bytes - 1) / move_bytes);
}

inline Result<> check_slices(const PageSlices& slices) {
  using kvfolia::detail::bad_argument;
  const bool whole = reinterpret_cast<std::uintptr_t>(slices.base) % 16 == 0 &&
                     slices.layer_stride % 16 == 0 && slices.page_stride % 16 == 0 &&
                     slices.slice_bytes % 16 == 0;
  if (!whole) return bad_argument("store.formats (alignment)", 0, 16);
  return slices.pages < 0 || slices.slice_bytes < 0 || (slices.pages > 0 && !slices.base)
             ? bad_argument("store.formats")
             : Result<>();
}
/// What the host sees of a move.
inline Result<> check_move(const MoveArgs& args, PageMove move) {
  using kvfolia::detail::bad_argument;
  if (args.count < 0) return bad_argument("count", args.count);
  constexpr std::int64_t most_layers = 65535;  // of a grid's second dimension
  if (args.store.layers < 1 || args.store.layers > most_layers)
    return bad_argument("store.layers", args.store.layers, most_layers);
  for (const PageSlices& format : args.store.formats)
    if (auto ok = check_slices(format); !ok) return ok;
  if (std::int64_t{args.count} * args.chunks > INT32_MAX)
    return bad_argument("count", args.count, INT32_MAX / args.chunks);
  if (args.count == 0) return {};
  if (move == PageMove::copy) return args.copies ? Result<>() : bad_argument("copies");
  if (args.format < 0 || args.format >= TableEntry::max_formats)
    return bad_argument("format", args.format, TableEntry::max_formats);
  if (!args.pages) return bad_argument("pages");
  if (!args.buffer || reinterpret_cast<std::uintptr_t>(args.buffer) % 16 != 0)
    return bad_argument("buffer (alignment)", 0, 16);
  return {};
}

}  // namespace detail

/// A block has a part of one slice: of a page (x), and a layer (y).
template <PageMove Move, class Ctx>
KVF_HD void move_pages(Ctx& ctx, const detail::MoveArgs& args) {
  using detail::move_threads;
  const int index = ctx.block_x() / args.chunks, layer = ctx.block_y();
  const std::byte* from;
  std::byte* to;
  std::int64_t bytes;
  if constexpr (Move == PageMove::copy) {
    static_assert(sizeof(PageCopy) == 3 * sizeof(std::int32_t));
    std::int32_t field = 0;
    if (ctx.lane() < 3)
      field = ctx.load(reinterpret_cast<const std::int32_t*>(args.copies + index) + ctx.lane());
    const int format = ctx.shfl(field, 0);
    if (format < 0) return;
    const PageSlices& slices = args.store.formats[format];
    from = slices.slice(layer, PageId{ctx.shfl(field, 1)});
    to = slices.slice(layer, PageId{ctx.shfl(field, 2)});
    bytes = slices.slice_bytes;
  } else {
    const PageSlices& slices = args.store.formats[args.format];
    const PageId page{ctx.load(args.pages + index)};
    if (page.value < 0) return;
    bytes = slices.slice_bytes;
    std::byte* packed = args.buffer + (std::int64_t{index} * args.store.layers + layer) * bytes;
    from = Move == PageMove::gather ? slices.slice(layer, page) : packed;
    to = Move == PageMove::gather ? packed : slices.slice(layer, page);
  }
  const std::int64_t first = std::int64_t{ctx.block_x() % args.chunks} * detail::move_bytes;
  // All loads are on their way before the first store.
  Words4 words[4];
  KVF_UNROLLED (i, 4) {
    const std::int64_t at = first + 16 * (i * move_threads + ctx.thread());
    if (at < bytes) words[i] = ctx.load(reinterpret_cast<const Words4*>(from + at));
  }
  KVF_UNROLLED (i, 4) {
    const std::int64_t at = first + 16 * (i * move_threads + ctx.thread());
    if (at < bytes) ctx.store(reinterpret_cast<Words4*>(to + at), words[i]);
  }
}

}  // namespace kvfolia::inline KVF_ABI::cuda
