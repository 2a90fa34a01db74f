// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Operations on pages that a GPU holds: copies, buffers, compaction, statistics of keys. None of them
// allocates, synchronises or throws, all can be captured in a graph, and nothing is launched when an error is
// returned.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/cuda/compact.hpp"
#include "kvfolia/cuda/device_context.cuh"
#include "kvfolia/cuda/key_stats.hpp"
#include "kvfolia/cuda/launch.cuh"
#include "kvfolia/cuda/move_pages.hpp"

namespace kvfolia::inline KVF_ABI::cuda {

namespace detail {

/// Templates all, so that a unit has only the kernels that it calls.
template <PageMove Move>
__global__ void __launch_bounds__(move_threads) move_kernel(const __grid_constant__ MoveArgs args) {
  DeviceContext ctx;
  move_pages<Move>(ctx, args);
}
template <class Layout, class Quant>
__global__ void __launch_bounds__(write_threads, write_blocks)
    compact_kernel(const __grid_constant__ CompactionArgs<Layout, Quant> args) {
  DeviceContext ctx;
  compact(ctx, args);
}
template <class Layout, class Quant>
struct StatsOf {
  PagedView<Layout, Quant> view;
  KeyStatsArgs args;
};
template <class Layout, class Quant>
__global__ void __launch_bounds__(write_threads, write_blocks)
    key_stats_kernel(const __grid_constant__ StatsOf<Layout, Quant> of) {
  DeviceContext ctx;
  key_stats(ctx, of.view, of.args);
}

template <PageMove Move>
Result<> move(const MoveArgs& args, cudaStream_t stream, const char* what) {
  if (auto ok = check_move(args, Move); !ok) return ok;
  if (args.count == 0 || args.chunks == 0) return {};
  return launch(move_kernel<Move>, {args.count * args.chunks, args.store.layers, 1}, {move_threads, 0}, args,
                stream, what);
}

/// Between pages of one format and a buffer.
template <PageMove Move>
Result<> move_packed(const StoreView& store, int format, const std::int32_t* pages, std::int32_t count,
                     std::byte* buffer, cudaStream_t stream, const char* what) {
  const bool known = 0 <= format && format < TableEntry::max_formats;  // others are refused
  const int chunks = known ? move_chunks(store.formats[format].slice_bytes) : 1;
  return move<Move>({store, nullptr, pages, buffer, count, format, chunks}, stream, what);
}

}  // namespace detail

/// Carries out `count` copies of pages, which are the device's, as are the pages: what a batch has for
/// HostStore::copy. No page is the target of two copies, or of one and the source of another.
inline Result<> copy_pages(const StoreView& store, const PageCopy* copies, std::int32_t count,
                           cudaStream_t stream) noexcept {
  const int chunks = detail::move_chunks(detail::largest_slice(store));
  return detail::move<PageMove::copy>({store, copies, nullptr, nullptr, count, 0, chunks}, stream,
                                      "copy kernel");
}

/// Pages of one format into a buffer, [count][layers][slice_bytes], aligned to 16; negative pages are
/// skipped.
inline Result<> gather_pages(const StoreView& store, int format, const std::int32_t* pages,
                             std::int32_t count, std::byte* to, cudaStream_t stream) noexcept {
  return detail::move_packed<PageMove::gather>(store, format, pages, count, to, stream, "gather kernel");
}
/// The same, from such a buffer into pages.
inline Result<> scatter_pages(const StoreView& store, int format, const std::int32_t* pages,
                              std::int32_t count, const std::byte* from, cudaStream_t stream) noexcept {
  return detail::move_packed<PageMove::scatter>(store, format, pages, count, const_cast<std::byte*>(from),
                                                stream, "scatter kernel");
}

/// Moves the tokens that a mask keeps to the front of their tables, see CompactArgs; lengths are the
/// caller's.
template <class Layout, class Quant>
Result<> compact(const PagedView<Layout, Quant>& view, const BatchView& batch, const CompactArgs& args,
                 cudaStream_t stream) noexcept {
  if constexpr (!compact_supported<Layout, Quant>()) {
    return Error{Errc::unsupported, "layout or quantizer"};
  } else {
    if (auto ok = detail::check_compact(view, batch, args); !ok) return ok;
    if (batch.rows == 0) return {};
    return detail::launch(detail::compact_kernel<Layout, Quant>, {batch.rows, view.kv_heads, 1},
                          {detail::write_threads, detail::compact_shared_bytes},
                          detail::CompactionArgs<Layout, Quant>{view, batch, args}, stream, "compact kernel");
  }
}

/// Statistics of pages' keys, see KeyStatsArgs.
template <class Layout, class Quant>
Result<> key_stats(const PagedView<Layout, Quant>& view, const KeyStatsArgs& args,
                   cudaStream_t stream) noexcept {
  if constexpr (!key_stats_supported<Layout, Quant>()) {
    return Error{Errc::unsupported, "layout or quantizer"};
  } else {
    if (auto ok = detail::check_key_stats(view, args); !ok) return ok;
    if (args.count == 0) return {};
    return detail::launch(detail::key_stats_kernel<Layout, Quant>, {args.count, view.kv_heads, 1},
                          {detail::write_threads, 0}, detail::StatsOf<Layout, Quant>{view, args}, stream,
                          "statistics kernel");
  }
}

}  // namespace kvfolia::inline KVF_ABI::cuda
