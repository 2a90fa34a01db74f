// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include <cstdint>
#include <vector>

#include "kvfolia/core/page_format.hpp"
#include "kvfolia/layout/gqa.hpp"
#include "kvfolia/layout/mla.hpp"
#include "kvfolia/layout/orders.hpp"
#include "kvfolia/quant/identity.hpp"
#include "kvfolia/quant/int8.hpp"
#include "support/catch.hpp"

using namespace kvfolia;

TEST_CASE("element orders put each element where they say") {
  const TileShape shape{8, 6, 8};
  CHECK(SlotMajor::index(3, 5, shape) == 3 * 8 + 5);
  CHECK(DimMajor<4>::index(3, 5, shape) == (1 * 6 + 3) * 4 + 1);
  CHECK(SlotPairs<2>::index(3, 5, shape) == (1 * 8 + 5) * 2 + 1);
  const auto covers = [&](auto order) {
    std::vector<int> hits(48, 0);
    for (int slot = 0; slot < 6; ++slot)
      for (int dim = 0; dim < 8; ++dim)
        ++hits[static_cast<std::size_t>(decltype(order)::index(slot, dim, shape))];
    for (const int h : hits) CHECK(h == 1);
  };
  covers(SlotMajor{});
  covers(DimMajor<2>{});
  covers(DimMajor<8>{});
  covers(SlotPairs<3>{});
}

TEST_CASE("page formats count every byte and keep planes aligned") {
  // Head dim 96, 19 slots, 3 heads: codes 1824 bytes a tile, 38 bytes of scales padded to 40.
  constexpr PageFormat f = page_format<Gqa<96, 19>, Int8>(3, 19);
  static_assert(f.keys.tile_bytes == 1824 && f.values.tile_bytes == 1824);
  static_assert(f.key_params.tile_bytes == 40 && f.value_params.tile_bytes == 40);
  static_assert(f.slice_bytes() == 3 * 2 * 1824 + 2 * 128);
  static_assert(f.value_offset() % 16 == 0 && f.key_param_offset() % 16 == 0 &&
                f.value_param_offset() % 16 == 0);
  // A latent vector is stored once.
  static_assert(page_format<Mla<512, 64, 32>, Identity<bf16>>(1, 32).slice_bytes() == 576 * 32 * 2);
  CHECK(f.heads == 3);
}

TEST_CASE("a page size fits when it fills the orders' groups and is the layout's") {
  static_assert(page_tokens_fit<Gqa<64, dynamic>>(1) && page_tokens_fit<Gqa<64, dynamic>>(19));
  static_assert(!page_tokens_fit<Gqa<64, dynamic>>(0) && !page_tokens_fit<Gqa<64, dynamic>>(-4));
  static_assert(page_tokens_fit<Gqa<64, 16>>(16) && !page_tokens_fit<Gqa<64, 16>>(32));
  using Pairs = Gqa<64, dynamic, DimMajor<4>, SlotPairs<4>>;
  CHECK((page_tokens_fit<Pairs>(12) && !page_tokens_fit<Pairs>(6)));
}
