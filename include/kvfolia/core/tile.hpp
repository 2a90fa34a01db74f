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

/// The axis along which a quantizer's parameters are constant, so that a kernel may fold them.
enum class Axis : std::uint8_t { none, token, channel, block };

/// `Byte` is std::byte, or const std::byte for a tile that is only read.
template <class Order, class Byte>
struct Tile {
  Byte* codes;
  Byte* params;
  TileShape shape;
  std::int64_t param_stride;  ///< bytes between the parameters of consecutive slots

  /// The stored element of type T (const when the tile is) for one slot and dimension.
  template <class T>
  KVF_HD auto& code(int slot, int dim) const {
    KVF_ASSERT(0 <= slot && slot < shape.page_tokens && 0 <= dim && dim < shape.dims);
    return reinterpret_cast<Same<T>*>(codes)[Order::index(slot, dim, shape)];
  }

  /// The parameter of type T that belongs to one slot.
  template <class T>
  KVF_HD auto& param(int slot) const {
    KVF_ASSERT(0 <= slot && slot < shape.page_tokens);
    return *reinterpret_cast<Same<T>*>(params + slot * param_stride);
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

}  // namespace kvfolia::inline KVF_ABI
