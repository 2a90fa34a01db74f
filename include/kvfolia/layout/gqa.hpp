// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Keys and values per head: multi-head, grouped-query and multi-query attention.

#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/layout/orders.hpp"

namespace kvfolia::inline KVF_ABI {

/// Head counts are run-time numbers; query head h reads KV head h / group. `PageTokens` may be
/// `dynamic`.
template <int HeadDim, int PageTokens = 32, ElementOrder Key = SlotMajor, ElementOrder Value = SlotMajor>
struct Gqa {
  static_assert(HeadDim > 0, "Gqa: HeadDim must be positive");
  static_assert(PageTokens >= 0, "Gqa: PageTokens must be positive, or dynamic");
  static_assert(HeadDim % Key::dim_multiple == 0 && HeadDim % Value::dim_multiple == 0,
                "Gqa: HeadDim must be a multiple of what the element order groups");
  static_assert(PageTokens % Key::slot_multiple == 0 && PageTokens % Value::slot_multiple == 0,
                "Gqa: PageTokens must be a multiple of what the element order groups");

  using KeyOrder = Key;
  using ValueOrder = Value;
  static constexpr int key_dim = HeadDim;
  static constexpr int value_dim = HeadDim;
  static constexpr int page_tokens = PageTokens;
  static constexpr bool shares_key_value = false;
};
static_assert(LayoutPolicy<Gqa<128>>);
static_assert(LayoutPolicy<Gqa<64, dynamic, DimMajor<4>, SlotPairs<2>>>);

}  // namespace kvfolia::inline KVF_ABI
