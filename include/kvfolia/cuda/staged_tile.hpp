// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Values, codes and parameters of some tokens in a block's shared memory, placed so that neither threads that
// have a token each nor threads that have a channel each meet in a bank.

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/tile.hpp"
#include "kvfolia/cuda/context.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

/// Numbers [token][dim] as floats. Even dims lie in front of odd ones, which begin half the banks further on:
/// so lanes that have a dim each, and lanes that have two neighbours each, meet in no bank. Nor do lanes that
/// have a row each, for a row is an odd number of words.
template <int Dims>
struct ValueRows {
  static constexpr int odd_dims = (Dims / 2 + 15) / 32 * 32 + 16;  ///< word at which they begin
  static constexpr std::uint32_t pitch = 4 * ((odd_dims + Dims / 2) | 1);
  KVF_INLINE KVF_HD static constexpr std::uint32_t bytes(int rows) {
    return static_cast<std::uint32_t>(rows) * pitch;
  }

  SharedOffset base;

  KVF_INLINE KVF_HD SharedOffset at(int row, int dim) const {
    return base + static_cast<std::uint32_t>(row) * pitch +
           4 * static_cast<std::uint32_t>((dim & 1) * odd_dims + (dim >> 1));
  }
};

/// Rows of bytes, word by word: rows of which 32 words are whole ones, and of multiples of 32, lie behind one
/// another, each begun at another word; others have an odd number of words.
template <int Bytes>
struct ByteRows {
  static constexpr int words = (Bytes + 3) / 4;
  static constexpr bool turns = words % 32 == 0 || (words < 32 && 32 % words == 0);
  static constexpr int rows_a_turn = words < 32 ? 32 / words : 1;
  static constexpr int unit = Bytes % 4 == 0   ? 4
                              : Bytes % 2 == 0 ? 2
                                               : 1;  ///< that a thread brings to a page
  static constexpr std::uint32_t pitch = 4 * (turns ? words : words | 1);
  KVF_INLINE KVF_HD static constexpr std::uint32_t bytes(int rows) {
    return (static_cast<std::uint32_t>(rows) * pitch + 15) / 16 * 16;
  }

  SharedOffset base;

  KVF_INLINE KVF_HD SharedOffset at(int row, int byte) const {
    int word = byte >> 2;
    if constexpr (turns) word = (word + row / rows_a_turn) % words;
    return base + static_cast<std::uint32_t>(row) * pitch + static_cast<std::uint32_t>(4 * word + (byte & 3));
  }
};

/// A parameter of each channel: those of odd channels lie apart, half the banks away.
template <int Dims, int Bytes>
struct ChannelCells {
  static constexpr std::uint32_t half = (Dims / 2 * Bytes + 63) / 128 * 128 + 64;
  static constexpr std::uint32_t bytes = 2 * half;

  SharedOffset base;

  KVF_INLINE KVF_HD SharedOffset at(int dim) const {
    return base + static_cast<std::uint32_t>(dim & 1) * half + static_cast<std::uint32_t>((dim >> 1) * Bytes);
  }
};

/// What a tile in pages has a reference for.
template <class Ctx, class T>
class StagedCell {
  static_assert(sizeof(T) <= 4, "rows are placed word by word: no code or parameter may be wider");

 public:
  KVF_INLINE KVF_HD StagedCell(Ctx& ctx, SharedOffset at) : ctx_(ctx), at_(at) {}
  KVF_INLINE KVF_HD void operator=(T value) const { ctx_.store_shared(at_, value); }

 private:
  Ctx& ctx_;
  SharedOffset at_;
};

/// Some channels, or a token's bytes, of a tile: what encode() writes to. Its first slot is row `row`.
template <class Ctx, int Dims, class Codes, class Params>
struct StagedTile {
  static constexpr bool is_staged = true;
  static constexpr int dims = Dims;

  Ctx& ctx;
  Codes codes;
  Params params;
  int row;
  int first_byte;   ///< of a row's codes
  int first_param;  ///< byte of a row's parameters; or the channel

  template <class T>
  KVF_INLINE KVF_HD StagedCell<Ctx, T> code(int slot, int dim) const {
    return {ctx, codes.at(row + slot, first_byte + dim * static_cast<int>(sizeof(T)))};
  }
  KVF_INLINE KVF_HD StagedCell<Ctx, std::uint8_t> code_pair(int slot, int dim) const {
    return {ctx, codes.at(row + slot, first_byte + dim / 2)};
  }
  KVF_INLINE KVF_HD StagedCell<Ctx, std::uint8_t> code_byte(int slot, int byte) const {
    return {ctx, codes.at(row + slot, first_byte + byte)};
  }
  template <class T>
  KVF_INLINE KVF_HD StagedCell<Ctx, T> param(int slot, int index = 0) const {
    return {ctx, params.at(row + slot, first_param + index * static_cast<int>(sizeof(T)))};
  }
  template <class T>
  KVF_INLINE KVF_HD StagedCell<Ctx, T> tile_param(std::int64_t index) const {
    return {ctx, params.at(first_param + static_cast<int>(index))};
  }
};

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
