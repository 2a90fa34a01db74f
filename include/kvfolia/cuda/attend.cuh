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
#include "kvfolia/cuda/launch.cuh"
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

/// What a decode kernel is launched with, which depends on the capability that it was compiled for: that of
/// the device, or an older one.
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

/// Makes a kernel ready for the current device, and says what it is launched with. Neither synchronises nor
/// allocates.
template <int Tiles, bool General, int Format, class Layout, class Quant>
Result<> prepare_decode(BlockSize& block) {
  constexpr auto kernel = decode_kernel<Layout, Quant, Tiles, General, Format>;
  cudaFuncAttributes compiled{};
  if (const cudaError_t error = cudaFuncGetAttributes(&compiled, kernel); error != cudaSuccess)
    return launched(error, "cudaFuncGetAttributes");
  block = decode_block<Layout, Quant, Tiles, Format>(compiled.ptxVersion);
  return allow_shared_bytes(kernel, block.shared_bytes);
}

/// All kernels are ready before the first one is launched.
template <class Layout, class Quant>
Result<> launch_attend(const DecodeArgs<Layout, Quant>& args, const AttendPlan& plan, cudaStream_t stream) {
  const std::int32_t rows = args.batch.rows;
  const bool plain = is_plain(args.args, args.view.window);
  BlockSize blocks[2 * pass_count<Quant>]{};
  int prepared = 0, next = 0;
  auto ok = launch_kernels<Layout, Quant>(plan, rows, plain, [&](auto kernel, Grid) {
    using Kernel = decltype(kernel);
    return prepare_decode<Kernel::tiles, Kernel::general, Kernel::format, Layout, Quant>(blocks[prepared++]);
  });
  if (!ok) return ok;
  ok = launch_kernels<Layout, Quant>(plan, rows, plain, [&](auto kernel, Grid grid) {
    using Kernel = decltype(kernel);
    return launch(decode_kernel<Layout, Quant, Kernel::tiles, Kernel::general, Kernel::format>, grid,
                  blocks[next++], args, stream, "decode kernel");
  });
  if (!ok) return ok;
  return launch(merge_kernel<Layout, Quant>, plan.merge_grid(rows),
                BlockSize{merge_threads, merge_shared_bytes<Layout, Quant>}, args, stream, "merge kernel");
}

}  // namespace detail

/// Computes `args.out` and `args.lse` for every query of the batch, in the order of `stream`. The pages that
/// `view`, `batch` and `args` point to are the device's; so is `workspace`, of at least
/// plan.workspace_bytes(), aligned to 16. Allocates nothing, does not synchronise, throws nothing and can be
/// captured in a graph; launches nothing when it returns an error. What only the device can read is trusted:
/// lengths within plan.config, entries that are pages of the view. A value that is not finite may reach
/// queries that a mask hides it from. Code for one compute capability that runs on another takes the first
/// one's shared memory: device_error where there is less.
template <class Layout, class Quant>
Result<> attend(const PagedView<Layout, Quant>& view, const BatchView& batch, const AttendArgs& args,
                const AttendPlan& plan, std::span<std::byte> workspace, cudaStream_t stream) noexcept {
  if constexpr (!supported<Layout, Quant>()) {
    return Error{Errc::unsupported, "layout or quantizer"};
  } else {
    if (auto ok = detail::check_attend(view, batch, args, plan, workspace.size()); !ok) return ok;
    if (reinterpret_cast<std::uintptr_t>(workspace.data()) % 16 != 0)
      return kvfolia::detail::bad_argument("workspace (alignment)", 0, 16);
    if (batch.rows == 0 || plan.config.queries == 0) return {};
    return detail::launch_attend(
        detail::decode_args(view, batch, args, plan, reinterpret_cast<float*>(workspace.data())), plan,
        stream);
  }
}

}  // namespace kvfolia::inline KVF_ABI::cuda
