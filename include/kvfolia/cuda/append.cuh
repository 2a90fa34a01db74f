// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Writing pages on a GPU: the kernels, and what launches them.

#include <cuda_runtime.h>

#include <cstdint>

#include "kvfolia/core/attend_args.hpp"
#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/cuda/append.hpp"
#include "kvfolia/cuda/append_args.hpp"
#include "kvfolia/cuda/device_context.cuh"
#include "kvfolia/cuda/launch.cuh"

namespace kvfolia::inline KVF_ABI::cuda {

namespace detail {

/// Told nothing of blocks, the compiler saves registers by spilling some.
template <class Layout, class Quant, WriteKind Kind>
__global__ void __launch_bounds__(write_threads, write_blocks)
    write_kernel(const __grid_constant__ WriteArgs<Layout, Quant> args) {
  DeviceContext ctx;
  if constexpr (Kind == WriteKind::tokens)
    write_tokens(ctx, args);
  else
    write_recodes(ctx, args);
}

template <WriteKind Kind, class Layout, class Quant>
Result<> launch_write(const WriteArgs<Layout, Quant>& args, int blocks, cudaStream_t stream,
                      const char* what) {
  constexpr ShareSizes sizes = share_sizes<Layout, Quant, Kind>();
  if (blocks == 0 || sizes.count == 0) return {};
  constexpr auto kernel = write_kernel<Layout, Quant, Kind>;
  if constexpr (sizes.shared_bytes > (48u << 10))
    if (auto ok = allow_shared_bytes(kernel, sizes.shared_bytes); !ok) return ok;
  return launch(kernel, {blocks, args.view.kv_heads, sizes.count}, {write_threads, sizes.shared_bytes}, args,
                stream, what);
}

}  // namespace detail

/// Encodes the batch's new tokens into the slots that `batch.slots` names, and carries out its recodes, in
/// the order of `stream`; the bytes are those that cpu::append writes, but for the payload of a NaN. All that
/// `view`, `batch` and `args` point to is the device's; `config` has what the host must know of it. The
/// batch's copies must have been carried out. Allocates nothing, does not synchronise, throws nothing and can
/// be captured in a graph; launches nothing when an argument is refused. Slots and recodes are trusted (checked
/// in KVF_CHECKED builds, as is that values are finite: then the kernel traps).
template <class Layout, class Quant>
Result<> append(const PagedView<Layout, Quant>& view, const BatchView& batch, const AppendArgs& args,
                const AppendConfig& config, cudaStream_t stream) noexcept {
  if constexpr (!append_supported<Layout, Quant>()) {
    return Error{Errc::unsupported, "layout or quantizer"};
  } else {
    if (auto ok = detail::check_write(view, batch, args, config.tokens); !ok) return ok;
    const detail::WriteArgs<Layout, Quant> all{view,          args,          batch.slots,
                                               config.tokens, batch.recodes, batch.recode_count};
    // First: another sequence's new tokens may overwrite what is kept.
    if constexpr (format_count < Quant >> 1)
      if (auto ok = detail::launch_write<detail::WriteKind::recodes>(all, batch.recode_count, stream,
                                                                     "recode kernel");
          !ok)
        return ok;
    constexpr int rows = detail::share_sizes<Layout, Quant, detail::WriteKind::tokens>().rows;
    return detail::launch_write<detail::WriteKind::tokens>(all, (config.tokens + rows - 1) / rows, stream,
                                                           "append kernel");
  }
}

}  // namespace kvfolia::inline KVF_ABI::cuda
