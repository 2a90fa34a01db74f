// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Operations by a GPU on pages that lie in the host's memory: each brings what it is given arrays of to the
// GPU, and what is written there back.

#include "cuda/gpu_attend.hpp"
#include "kvfolia/cuda/compact.hpp"
#include "kvfolia/cuda/key_stats.hpp"
#include "kvfolia/cuda/move_pages.hpp"
#include "support/arrays.hpp"

namespace kvfolia_tests::gpu {

/// Quantizers whose tokens are moved in pages of `Layout`.
#define KVF_GPU_COMPACTS(X) \
  X(Identity<fp16>)         \
  X(Int4<0>)
/// Quantizers whose keys are looked at, in pages of `StatsLayout`.
#define KVF_GPU_STATS(X) \
  X(Identity<fp16>)      \
  X(Kivi)
using StatsLayout = Gqa<64, 64>;

Result<> move(cuda::PageMove move, cuda::detail::MoveArgs args, const Arrays& arrays);
template <class Quant>
Result<> compact(PagedView<Layout, Quant> view, BatchView batch, cuda::CompactArgs args,
                 const Arrays& arrays);
template <class Quant>
Result<> key_stats(PagedView<StatsLayout, Quant> view, cuda::KeyStatsArgs args, const Arrays& arrays);

}  // namespace kvfolia_tests::gpu
