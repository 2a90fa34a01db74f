// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Appending by a GPU to pages that lie in the host's memory.

#include <cstdint>

#include "cuda/gpu_attend.hpp"
#include "support/arrays.hpp"

namespace kvfolia_tests::gpu {

/// Brings pages, batch and rows to the GPU, appends there, and brings pages back. Rows are packed floats.
template <class Quant>
Result<> append(PagedView<Layout, Quant> view, BatchView batch, AppendArgs args, std::int32_t tokens,
                const Arrays& pages);

}  // namespace kvfolia_tests::gpu
