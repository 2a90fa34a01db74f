// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// All kernels of one layout and quantizer: what kernel_resources.py reads, and has a case.hpp for.

#include "case.hpp"
#include "kvfolia/cuda.cuh"
#include "kvfolia/layout/gqa.hpp"
#include "kvfolia/quant/key_value.hpp"
#include "kvfolia/quant/mixed.hpp"

using namespace kvfolia;

using View = PagedView<KVF_TEST_LAYOUT, KVF_TEST_QUANT>;

Result<> append(const View& view, const BatchView& batch, const AppendArgs& args,
                const cuda::AppendConfig& config, cudaStream_t stream) {
  return cuda::append(view, batch, args, config, stream);
}
Result<> attend(const View& view, const BatchView& batch, const AttendArgs& args,
                const cuda::AttendPlan& plan, std::span<std::byte> workspace, cudaStream_t stream) {
  return cuda::attend(view, batch, args, plan, workspace, stream);
}
Result<> compact(const View& view, const BatchView& batch, const cuda::CompactArgs& args,
                 cudaStream_t stream) {
  return cuda::compact(view, batch, args, stream);
}
Result<> key_stats(const View& view, const cuda::KeyStatsArgs& args, cudaStream_t stream) {
  return cuda::key_stats(view, args, stream);
}
