// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Launching kernels, and what the runtime says of it.

#include <cuda_runtime.h>

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/cuda/plan.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

inline Result<> launched(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  static_cast<void>(cudaGetLastError());  // it has been told: the engine's next call is not to meet it
  return Error{Errc::device_error, what, static_cast<std::int64_t>(error)};
}

/// What the blocks of a launch have.
struct BlockSize {
  int threads;
  std::uint32_t shared_bytes;
};

/// More than 48 KiB have to be asked for, on every device. Neither synchronises nor allocates.
template <class Kernel>
Result<> allow_shared_bytes(Kernel* kernel, std::uint32_t bytes) {
  return launched(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
      "cudaFuncSetAttribute (shared memory)");
}

template <class Kernel, class Args>
Result<> launch(Kernel* kernel, Grid grid, BlockSize block, const Args& args, cudaStream_t stream,
                const char* what) {
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z));
  config.blockDim = dim3(static_cast<unsigned>(block.threads));
  config.dynamicSmemBytes = block.shared_bytes;
  config.stream = stream;
  return launched(cudaLaunchKernelEx(&config, kernel, args), what);
}

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
