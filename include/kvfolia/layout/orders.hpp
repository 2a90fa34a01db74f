// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Orders of the elements in a tile.

#include <cstdint>

#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/tile.hpp"

namespace kvfolia::inline KVF_ABI {

/// [slot][dim]: a token's vector is contiguous. What CUDA wants, and what engines bring.
struct SlotMajor {
  static constexpr int dim_multiple = 1;
  static constexpr int slot_multiple = 1;
  static constexpr bool strided = true;

  KVF_HD static constexpr std::int64_t index(int slot, int dim, TileShape shape) {
    return slot * shape.slot_stride + dim;
  }
};
static_assert(ElementOrder<SlotMajor>);

/// [dim / X][slot][X]: neighbouring slots lie side by side, so scores need no horizontal sums. What
/// a CPU wants for keys.
template <int X>
struct DimMajor {
  static_assert(X > 0);
  static constexpr int dim_multiple = X;
  static constexpr int slot_multiple = 1;
  static constexpr bool strided = false;

  KVF_HD static constexpr std::int64_t index(int slot, int dim, TileShape shape) {
    return (std::int64_t{dim / X} * shape.page_tokens + slot) * X + dim % X;
  }
};
static_assert(ElementOrder<DimMajor<4>>);

/// [slot / X][dim][X]: X neighbouring slots of a dimension lie side by side, as dot products of
/// probabilities with values want them. What a CPU wants for values.
template <int X>
struct SlotPairs {
  static_assert(X > 0);
  static constexpr int dim_multiple = 1;
  static constexpr int slot_multiple = X;
  static constexpr bool strided = false;

  KVF_HD static constexpr std::int64_t index(int slot, int dim, TileShape shape) {
    return (std::int64_t{slot / X} * shape.dims + dim) * X + slot % X;
  }
};
static_assert(ElementOrder<SlotPairs<2>>);

}  // namespace kvfolia::inline KVF_ABI
