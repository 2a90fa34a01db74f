// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// One latent vector a token: multi-head latent attention in its absorbed form.

#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/layout/orders.hpp"

namespace kvfolia::inline KVF_ABI {

/// Stores [latent | rope] once. The key is the whole vector, the value its latent part; queries have
/// LatentDim + RopeDim dims, outputs LatentDim. Normally one KV head serves all query heads.
/// Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
template <int LatentDim, int RopeDim, int PageTokens = 32, ElementOrder Order = SlotMajor>
struct Mla {
  static_assert(LatentDim > 0, "Mla: LatentDim must be positive");
  static_assert(RopeDim >= 0, "Mla: RopeDim must not be negative");
  static_assert(PageTokens >= 0, "Mla: PageTokens must be positive, or dynamic");
  static_assert((LatentDim + RopeDim) % Order::dim_multiple == 0,
                "Mla: LatentDim + RopeDim must be a multiple of what the element order groups");
  static_assert(PageTokens % Order::slot_multiple == 0,
                "Mla: PageTokens must be a multiple of what the element order groups");

  using KeyOrder = Order;
  using ValueOrder = Order;
  static constexpr int key_dim = LatentDim + RopeDim;
  static constexpr int value_dim = LatentDim;
  static constexpr int page_tokens = PageTokens;
  static constexpr bool shares_key_value = true;
};
static_assert(LayoutPolicy<Mla<512, 64>>);

}  // namespace kvfolia::inline KVF_ABI
