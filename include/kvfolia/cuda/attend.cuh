// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Attention over pages on a GPU: the kernels, and what launches them.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvfolia/core/attend_args.hpp"
#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/cuda/decode.hpp"
#include "kvfolia/cuda/device_context.cuh"
#include "kvfolia/cuda/merge.hpp"
#include "kvfolia/cuda/plan.hpp"

namespace kvfolia::inline KVF_ABI::cuda {

namespace detail {

template <class Layout, class Quant, int Tiles, bool General, int Format>
__global__ void __launch_bounds__(DecodeShape<Layout, Quant, Tiles, Format>::threads,
                                  DecodeShape<Layout, Quant, Tiles, Format>::blocks)
    decode_kernel(const __grid_constant__ DecodeArgs<Layout, Quant> args) {
  DeviceContext ctx;
  decode<Layout, Quant, Tiles, General, Format>(ctx, args);
}

template <class Layout, class Quant>
__global__ void __launch_bounds__(merge_threads)
    merge_kernel(const __grid_constant__ DecodeArgs<Layout, Quant> args) {
  DeviceContext ctx;
  merge_splits(ctx, args);
}

inline Result<> launched(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return Error{Errc::device_error, what, static_cast<std::int64_t>(error)};
}

template <int Tiles, bool General, int Format, class Layout, class Quant>
Result<> launch_decode(const DecodeArgs<Layout, Quant>& args, Grid grid, cudaStream_t stream) {
  using Shape = DecodeShape<Layout, Quant, Tiles, Format>;
  constexpr auto kernel = decode_kernel<Layout, Quant, Tiles, General, Format>;
  // Neither synchronises nor allocates; more than 48 KiB have to be asked for, on every device.
  if (const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::shared_bytes);
      error != cudaSuccess)
    return launched(error, "cudaFuncSetAttribute (shared memory)");
  kernel<<<dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z)),
           Shape::threads, Shape::shared_bytes, stream>>>(args);
  return launched(cudaGetLastError(), "decode kernel");
}

/// The kernel of a pass: with two coded formats there is a general one alone.
template <int Tiles, int Pass, class Layout, class Quant>
Result<> launch_pass(const DecodeArgs<Layout, Quant>& args, Grid grid, bool plain, cudaStream_t stream) {
  constexpr int format = pass_format<Quant>(Pass);
  if constexpr (pass_count<Quant> == 1)
    if (plain) return launch_decode<Tiles, false, format>(args, grid, stream);
  if (auto ok = launch_decode<Tiles, true, format>(args, grid, stream); !ok) return ok;
  if constexpr (Pass + 1 < pass_count<Quant>) return launch_pass<Tiles, Pass + 1>(args, grid, plain, stream);
  return {};
}

}  // namespace detail

/// Computes `args.out` and `args.lse` for every query of the batch, in the order of `stream`. The pages that
/// `view`, `batch` and `args` point to are the device's; so is `workspace`, of at least
/// plan.workspace_bytes(), aligned to 16. Allocates nothing, does not synchronise, throws nothing and can be
/// captured in a graph; launches nothing when it returns an error. What only the device can read is trusted:
/// lengths within plan.config, entries that are pages of the view.
template <class Layout, class Quant>
Result<> attend(const PagedView<Layout, Quant>& view, const BatchView& batch, const AttendArgs& args,
                const AttendPlan& plan, std::span<std::byte> workspace, cudaStream_t stream) noexcept {
  if (auto ok = detail::check_attend(view, batch, args, plan, workspace.size()); !ok) return ok;
  if (reinterpret_cast<std::uintptr_t>(workspace.data()) % 16 != 0)
    return kvfolia::detail::bad_argument("workspace (alignment)", 0, 16);
  if (batch.rows == 0 || plan.config.queries == 0) return {};
  const auto kernel_args =
      detail::decode_args(view, batch, args, plan, reinterpret_cast<float*>(workspace.data()));
  const Grid grid = plan.decode_grid(batch.rows);
  if (plan.splits > 0) {
    const bool plain = detail::is_plain(args, view.window);
    Result<> ok;
    if (plan.tiles == 1)
      ok = detail::launch_pass<1, 0>(kernel_args, grid, plain, stream);
    else if constexpr (Layout::key_dim <= 128)
      ok = detail::launch_pass<2, 0>(kernel_args, grid, plain, stream);
    if (!ok) return ok;
  }
  const Grid merge = plan.merge_grid(batch.rows);
  detail::merge_kernel<Layout, Quant><<<
      dim3(static_cast<unsigned>(merge.x), static_cast<unsigned>(merge.y), static_cast<unsigned>(merge.z)),
      detail::merge_threads, detail::merge_shared_bytes<Layout, Quant>, stream>>>(kernel_args);
  return detail::launched(cudaGetLastError(), "merge kernel");
}

}  // namespace kvfolia::inline KVF_ABI::cuda
