// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "cuda/gpu_attend.hpp"

#include <cstddef>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "cuda/gpu_copies.cuh"
#include "kvfolia/cuda.cuh"

namespace kvfolia_tests::gpu {

bool is_available() {
  int devices = 0, major = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0 &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess && major >= 8;
}

template <class Quant>
Result<> attend(KernelCall<Layout, Quant> call, const cuda::AttendPlan& plan, bool captured) {
  Copies copies;
  call.each_array([&](auto*& pointer, std::size_t bytes, const char*, bool written) {
    pointer = static_cast<std::remove_reference_t<decltype(pointer)>>(
        copies.bring(static_cast<const void*>(pointer), bytes, written));
  });
  // NaN, as what nobody wrote.
  const std::vector<std::byte> nans(plan.workspace_bytes(), std::byte{0xff});
  const std::span<std::byte> workspace{static_cast<std::byte*>(copies.bring(nans.data(), nans.size(), false)),
                                       nans.size()};
  if (auto ok = copies.result(); !ok) return ok;
  cudaStream_t stream = nullptr;
  copies.note(cudaStreamCreate(&stream));
  if (captured) copies.note(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  const auto launched = cuda::attend(call.view, call.batch, call.args, plan, workspace, stream);
  if (captured) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replayed = nullptr;
    copies.note(cudaStreamEndCapture(stream, &graph));
    copies.note(cudaGraphInstantiate(&replayed, graph, 0));
    copies.note(cudaGraphLaunch(replayed, stream));
    copies.note(cudaGraphLaunch(replayed, stream));
    copies.note(cudaStreamSynchronize(stream));
    cudaGraphExecDestroy(replayed);
    cudaGraphDestroy(graph);
  }
  copies.note(cudaStreamSynchronize(stream));
  cudaStreamDestroy(stream);
  if (!launched) return launched;
  copies.bring_back();
  return copies.result();
}

#define KVF_INSTANTIATE(...) \
  template Result<> attend<__VA_ARGS__>(KernelCall<Layout, __VA_ARGS__>, const cuda::AttendPlan&, bool);
KVF_GPU_QUANTIZERS(KVF_INSTANTIATE)

}  // namespace kvfolia_tests::gpu
