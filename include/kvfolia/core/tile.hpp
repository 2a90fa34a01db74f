// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// A tile: one head's share of one page, in one plane. What quantizers write to and read from.

#include <cstddef>
#include <cstdint>

#include "kvfolia/core/config.hpp"

namespace kvfolia::inline KVF_ABI {

/// What an element order needs to find an element.
struct TileShape {
  int dims;
  int page_tokens;
  std::int64_t slot_stride;  ///< elements between slots; only SlotMajor tiles can be strided
};

/// `Byte` is std::byte, or const std::byte for a tile that is only read.
template <class Order, class Byte>
struct Tile {
  Byte* codes;
  Byte* params;
  int dims;
  int page_tokens;
  std::int64_t code_stride;   ///< bytes between slots, for orders that can be strided
  std::int64_t param_stride;  ///< bytes between the parameters of consecutive slots

  /// The stored element of type T (const when the tile is) for one slot and dimension.
  template <class T>
  KVF_INLINE KVF_HD auto& code(int slot, int dim) const {
    KVF_ASSERT(0 <= slot && slot < page_tokens && 0 <= dim && dim < dims);
    const TileShape shape{dims, page_tokens, code_stride / static_cast<std::int64_t>(sizeof(T))};
    return reinterpret_cast<Same<T>*>(codes)[Order::index(slot, dim, shape)];
  }

  /// The byte that holds the 4-bit elements of an even dimension (low half) and the next one.
  KVF_INLINE KVF_HD auto& code_pair(int slot, int dim) const {
    static_assert(Order::strided || Order::dim_multiple % 2 == 0,
                  "4-bit codes need two dims of a slot side by side: SlotMajor or DimMajor<2n>");
    KVF_ASSERT(0 <= slot && slot < page_tokens && 0 <= dim && dim < dims && dim % 2 == 0);
    return reinterpret_cast<Same<std::uint8_t>*>(
        codes)[Order::index(slot, dim, {dims, page_tokens, 2 * code_stride}) / 2];
  }

  /// One byte of a slot's codes, for codes that are not all alike.
  KVF_INLINE KVF_HD auto& code_byte(int slot, int byte) const {
    static_assert(Order::strided, "blocks of bytes need an order that can be strided: SlotMajor");
    KVF_ASSERT(0 <= slot && slot < page_tokens && 0 <= byte);
    return reinterpret_cast<Same<std::uint8_t>*>(codes)[slot * code_stride + byte];
  }

  /// Parameter number `index` of one slot.
  template <class T>
  KVF_INLINE KVF_HD auto& param(int slot, int index = 0) const {
    KVF_ASSERT(0 <= slot && slot < page_tokens);
    return reinterpret_cast<Same<T>*>(params + slot * param_stride)[index];
  }

  /// Parameter number `index` of all parameters of the tile, which lie behind one another.
  template <class T>
  KVF_INLINE KVF_HD auto& tile_param(std::int64_t index) const {
    return reinterpret_cast<Same<T>*>(params)[index];
  }

 private:
  template <class T, class B>
  struct Qualified {
    using type = T;
  };
  template <class T, class B>
  struct Qualified<T, const B> {
    using type = const T;
  };
  template <class T>
  using Same = typename Qualified<T, Byte>::type;
};

namespace detail {

template <class Tile>
inline constexpr bool always_strided = false;
template <class Order, class Byte>
inline constexpr bool always_strided<Tile<Order, Byte>> = Order::strided;

}  // namespace detail

/// Packed rows of numbers, [token][dim]: what quantizers encode.
struct Rows {
  const float* data;
  std::int64_t stride;

  KVF_INLINE KVF_HD float operator()(int token, int dim) const { return data[token * stride + dim]; }
};

}  // namespace kvfolia::inline KVF_ABI
