// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Two coded formats in one cache: pages that matter less take fewer bits.

#include <type_traits>

#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/quant/identity.hpp"
#include "kvfolia/quant/int8.hpp"

namespace kvfolia::inline KVF_ABI {

/// New pages are coded by `HighT`; Step::demote moves full ones to `LowT`, never back.
template <class HighT, class LowT>
struct Mixed {
  static_assert(std::is_same_v<typename HighT::Exact, typename LowT::Exact>,
                "both formats must hold the same kind of vectors: rotate both or none");
  using High = HighT;
  using Low = LowT;
  using Exact = typename High::Exact;
  static constexpr int seal_tokens = High::seal_tokens;

  High high{};
  Low low{};
};

static_assert(QuantPolicy<Mixed<Identity<fp16>, Int8>>);

}  // namespace kvfolia::inline KVF_ABI
