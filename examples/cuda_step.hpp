// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What cuda_step computes, and what checks it: the latter is compiled for the host alone.

#include <kvfolia/kvfolia.hpp>

namespace kvfolia_examples {

inline constexpr int kv_heads = 2, query_heads = 8, head_dim = 128;
inline constexpr int kv_row = kv_heads * head_dim, query_row = query_heads * head_dim;
using StepLayout = kvfolia::Gqa<head_dim, 16>;

/// The relative L2 error of one layer's outputs against attention in double precision over the same pages,
/// all in the host's memory.
kvfolia::Result<double> step_error(const kvfolia::PagedView<StepLayout, kvfolia::Int8>& view,
                                   const kvfolia::BatchView& batch, const kvfolia::fp16* queries,
                                   const kvfolia::fp16* out);

}  // namespace kvfolia_examples
