// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Two 4-bit codes a byte, the even dimension in the low half.

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/tile.hpp"

namespace kvfolia::inline KVF_ABI::detail {

/// Writes the codes code_of(dim) for the dims [begin, end) of a slot; both are even.
template <class Tile, class CodeOf>
KVF_INLINE KVF_HD void write_nibbles(Tile tile, int slot, int begin, int end, CodeOf&& code_of) {
  if constexpr (requires { Tile::is_staged; }) {  // of a GPU's thread, whose arrays should be registers
    for (int d = begin; d < end; d += 2)
      tile.code_pair(slot, d) = static_cast<std::uint8_t>(code_of(d) | (code_of(d + 1) << 4));
  } else {
    // Codes first, then pairs: two loops that become vector instructions.
    constexpr int width = 32;
    for (int first = begin; first < end; first += width) {
      const int count = end - first < width ? end - first : width;
      std::uint8_t codes[width];
      for (int i = 0; i < count; ++i) codes[i] = static_cast<std::uint8_t>(code_of(first + i));
      for (int i = 0; i < count; i += 2)
        tile.code_pair(slot, first + i) = static_cast<std::uint8_t>(codes[i] | (codes[i + 1] << 4));
    }
  }
}

/// Numbers value_of(code) of all dims of a slot.
template <class Tile, class ValueOf>
KVF_INLINE KVF_HD void read_nibbles(Tile tile, int slot, float* values, ValueOf&& value_of) {
  for (int d = 0; d < tile.dims; d += 2) {
    const std::uint32_t pair = tile.code_pair(slot, d);
    values[d] = value_of(pair & 15u);
    values[d + 1] = value_of(pair >> 4);
  }
}

/// The codes themselves, 0 to 15.
template <class Tile>
KVF_INLINE KVF_HD void read_nibbles(Tile tile, int slot, float* codes) {
  read_nibbles(tile, slot, codes,
               [](std::uint32_t code) { return static_cast<float>(static_cast<int>(code)); });
}

}  // namespace kvfolia::inline KVF_ABI::detail
