// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The first tokens and the newest ones stay.

#include <cstdint>

#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/mask.hpp"

namespace kvfolia::inline KVF_ABI {

/// The query at position i attends exactly {j < sink_tokens} and {i - window < j <= i}. A page leaves
/// when no query of this step or a later one can see any of its slots.
/// Source: StreamingLLM, arXiv:2309.17453.
struct SinkWindow {
  std::int32_t sink_tokens = 4;
  std::int32_t window = 1024;  ///< at least 1: a query sees itself

  /// A window below 1 gives a `left` that a cache refuses; -1 would read as unlimited.
  KVF_HD constexpr Window visible() const { return {window >= 1 ? window - 1 : -2, sink_tokens}; }
};
static_assert(EvictPolicy<SinkWindow>);
static_assert(SinkWindow{4, 8}.visible().sees(20, 13) && !SinkWindow{4, 8}.visible().sees(20, 12));

}  // namespace kvfolia::inline KVF_ABI
