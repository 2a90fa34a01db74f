// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Appending by a GPU to pages that lie in the host's memory.

#include <cstddef>
#include <vector>

#include "cuda/gpu_attend.hpp"

namespace kvfolia_tests::gpu {

/// The memory that a view's planes are in.
struct PageMemory {
  std::byte* data;
  std::size_t bytes;
};

/// Brings pages, batch and rows to the GPU, appends there, and brings pages back. Rows are packed floats.
template <class Quant>
Result<> append(PagedView<Layout, Quant> view, BatchView batch, AppendArgs args, std::int32_t tokens,
                const std::vector<PageMemory>& pages);

}  // namespace kvfolia_tests::gpu
