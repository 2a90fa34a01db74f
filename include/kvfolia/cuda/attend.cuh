// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Attention over pages on a GPU: the kernels, and what launches them.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "kvfolia/core/attend_args.hpp"
#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/cuda/decode.hpp"
#include "kvfolia/cuda/device_context.cuh"
#include "kvfolia/cuda/merge.hpp"
#include "kvfolia/cuda/plan.hpp"
#include "kvfolia/cuda/tuning.hpp"

namespace kvfolia::inline KVF_ABI::cuda {

namespace detail {

/// The compute capability that code is compiled for.
#if defined(__CUDA_ARCH__)
inline constexpr int target_capability = tuned_capability(__CUDA_ARCH__ / 10);
#else
inline constexpr int target_capability = 90;
#endif

/// A kernel's registers must suffice for so many blocks of 128 threads, whatever the capability.
template <class Layout, class Quant, int Tiles, bool General, int Format>
__global__ void __launch_bounds__(128, DecodeShape<Layout, Quant, Tiles, Format, 90>::blocks)
    decode_kernel(const __grid_constant__ DecodeArgs<Layout, Quant> args) {
  DeviceContext ctx;
  decode<Layout, Quant, Tiles, General, Format, target_capability>(ctx, args);
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

/// What a kernel is launched with, which depends on the capability that it was compiled for: that of the device,
/// or an older one.
struct BlockSize {
  int threads;
  std::uint32_t shared_bytes;
};
template <class Layout, class Quant, int Tiles, int Format>
BlockSize decode_block(int capability) {
  const auto of = [](auto shape) {
    using Shape = typename decltype(shape)::type;
    return BlockSize{Shape::threads, Shape::shared_bytes};
  };
  switch (tuned_capability(capability)) {
    case 80: return of(std::type_identity<DecodeShape<Layout, Quant, Tiles, Format, 80>>());
    case 86: return of(std::type_identity<DecodeShape<Layout, Quant, Tiles, Format, 86>>());
    case 89: return of(std::type_identity<DecodeShape<Layout, Quant, Tiles, Format, 89>>());
    case 90: return of(std::type_identity<DecodeShape<Layout, Quant, Tiles, Format, 90>>());
    default: return of(std::type_identity<DecodeShape<Layout, Quant, Tiles, Format, 100>>());
  }
}

/// Neither synchronises nor allocates.
template <int Tiles, bool General, int Format, class Layout, class Quant>
Result<> launch_decode(const DecodeArgs<Layout, Quant>& args, Grid grid, cudaStream_t stream) {
  constexpr auto kernel = decode_kernel<Layout, Quant, Tiles, General, Format>;
  cudaFuncAttributes compiled{};
  if (const cudaError_t error = cudaFuncGetAttributes(&compiled, kernel); error != cudaSuccess)
    return launched(error, "cudaFuncGetAttributes");
  const BlockSize block = decode_block<Layout, Quant, Tiles, Format>(compiled.ptxVersion);
  // More than 48 KiB have to be asked for, on every device.
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                     static_cast<int>(block.shared_bytes));
      error != cudaSuccess)
    return launched(error, "cudaFuncSetAttribute (shared memory)");
  kernel<<<dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z)),
           static_cast<unsigned>(block.threads), block.shared_bytes, stream>>>(args);
  return launched(cudaGetLastError(), "decode kernel");
}

}  // namespace detail

/// Computes `args.out` and `args.lse` for every query of the batch, in the order of `stream`. The pages that
/// `view`, `batch` and `args` point to are the device's; so is `workspace`, of at least
/// plan.workspace_bytes(), aligned to 16. Allocates nothing, does not synchronise, throws nothing and can be
/// captured in a graph; launches nothing when it returns an error. What only the device can read is trusted:
/// lengths within plan.config, entries that are pages of the view. A value that is not finite may reach queries
/// that a mask hides it from. Code for one compute capability that runs on another takes the first one's shared
/// memory: device_error where there is less.
template <class Layout, class Quant>
Result<> attend(const PagedView<Layout, Quant>& view, const BatchView& batch, const AttendArgs& args,
                const AttendPlan& plan, std::span<std::byte> workspace, cudaStream_t stream) noexcept {
  if (auto ok = detail::check_attend(view, batch, args, plan, workspace.size()); !ok) return ok;
  if (reinterpret_cast<std::uintptr_t>(workspace.data()) % 16 != 0)
    return kvfolia::detail::bad_argument("workspace (alignment)", 0, 16);
  if (batch.rows == 0 || plan.config.queries == 0) return {};
  const auto kernel_args =
      detail::decode_args(view, batch, args, plan, reinterpret_cast<float*>(workspace.data()));
  const auto launch = [&](auto kernel, Grid grid) {
    return detail::launch_decode<kernel.tiles, kernel.general, kernel.format>(kernel_args, grid, stream);
  };
  if (auto ok = detail::launch_kernels<Layout, Quant>(plan, batch.rows, detail::is_plain(args, view.window), launch);
      !ok)
    return ok;
  const Grid merge = plan.merge_grid(batch.rows);
  detail::merge_kernel<Layout, Quant><<<
      dim3(static_cast<unsigned>(merge.x), static_cast<unsigned>(merge.y), static_cast<unsigned>(merge.z)),
      detail::merge_threads, detail::merge_shared_bytes<Layout, Quant>, stream>>>(kernel_args);
  return detail::launched(cudaGetLastError(), "merge kernel");
}

}  // namespace kvfolia::inline KVF_ABI::cuda
