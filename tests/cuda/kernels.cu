// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// All kernels of one layout and quantizer: what kernel_resources.py reads, and has a case.hpp for.

#include "case.hpp"
#include "kvfolia/cuda.cuh"
#include "kvfolia/layout/gqa.hpp"
#include "kvfolia/quant/key_value.hpp"
#include "kvfolia/quant/mixed.hpp"

using namespace kvfolia;

Result<> attend(const PagedView<KVF_TEST_LAYOUT, KVF_TEST_QUANT>& view, const BatchView& batch,
                const AttendArgs& args, const cuda::AttendPlan& plan, std::span<std::byte> workspace,
                cudaStream_t stream) {
  return cuda::attend(view, batch, args, plan, workspace, stream);
}
