// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Subtracts each block's mean vector before coding: cures the constant biases that keys have.

#include <cstdint>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/fp16.hpp"
#include "kvfolia/core/rounding.hpp"
#include "kvfolia/core/tile.hpp"
#include "kvfolia/quant/identity.hpp"

namespace kvfolia::inline KVF_ABI {

/// Codes what is left of the values of `Tokens` tokens when their mean is taken away, with Q. The mean
/// is an fp16 a channel; a kernel adds its product with the query once a block. A value that is not
/// finite stays out of the mean, so that it spoils no more than it would with Q.
template <class Q, int Tokens = 32>
struct Centered {
  static_assert(detail::is_one_quantizer<Q>, "centre one side: KeyValue<Centered<K>, V>");
  static_assert(Q::seal_tokens == 1, "a quantizer of blocks has offsets of its own channels");
  static_assert(!Q::affine.channel_offset, "the channels have an offset already");
  static_assert(!rotates<Q>, "rotate what is centred: Rotated<Centered<Q>>");
  static_assert(Tokens > 0);
  using Exact = typename Q::Exact;
  static constexpr int param_alignment = kvfolia::param_alignment<Q>() > static_cast<int>(alignof(fp16))
                                             ? kvfolia::param_alignment<Q>()
                                             : static_cast<int>(alignof(fp16));
  static constexpr int seal_tokens = Tokens;
  static constexpr int code_bits = Q::code_bits;
  static constexpr int group_dims = Q::group_dims;
  static constexpr Affine affine{Q::affine.token_scale, Q::affine.token_offset, Q::affine.channel_scale,
                                 true};

  Q inner{};

  KVF_INLINE KVF_HD static constexpr int code_bytes(int dims) { return kvfolia::code_bytes<Q>(dims); }
  KVF_INLINE KVF_HD static constexpr bool fits(int dims) { return kvfolia::fits<Q>(dims); }
  /// All means, then the parameters of Q.
  KVF_INLINE KVF_HD static constexpr std::int64_t param_bytes(int dims, int page_tokens) {
    return mean_bytes(dims, page_tokens) + Q::param_bytes(dims, page_tokens);
  }

  template <class Tile, class Values>
  KVF_INLINE KVF_HD void encode(Tile tile, int slot, int tokens, Values values) const {
    for (int first = 0; first < tokens; first += Tokens) {
      write_means(tile, slot + first, [&](int t, int d) { return values(first + t, d); });
      inner.encode(inner_tile(tile), slot + first, Tokens, [&](int t, int d) {
        return values(first + t, d) - static_cast<float>(mean(tile, slot + first, d));
      });
    }
  }

  template <class Tile>
  KVF_INLINE KVF_HD void codes(Tile tile, int slot, float* codes) const {
    inner.codes(inner_tile(tile), slot, codes);
  }
  template <class Tile>
  KVF_INLINE KVF_HD float token_scale(Tile tile, int slot, int group) const {
    return inner.token_scale(inner_tile(tile), slot, group);
  }
  template <class Tile>
  KVF_INLINE KVF_HD float token_offset(Tile tile, int slot, int group) const {
    return inner.token_offset(inner_tile(tile), slot, group);
  }
  template <class Tile>
  KVF_INLINE KVF_HD float channel_scale(Tile tile, int slot, int dim) const {
    return inner.channel_scale(inner_tile(tile), slot, dim);
  }
  template <class Tile>
  KVF_INLINE KVF_HD float channel_offset(Tile tile, int slot, int dim) const {
    return static_cast<float>(mean(tile, slot, dim));
  }
  template <class Tile>
  KVF_INLINE KVF_HD void decode(Tile tile, int slot, float* values) const {
    decode_affine(*this, tile, slot, values);
  }

  /// Of a tile's means, which its other parameters are behind.
  KVF_INLINE KVF_HD static constexpr std::int64_t mean_bytes(int dims, int page_tokens) {
    const std::int64_t bytes =
        std::int64_t{page_tokens / Tokens} * dims * static_cast<std::int64_t>(sizeof(fp16));
    return (bytes + 15) / 16 * 16;
  }

  /// The tile as Q reads it.
  template <class Tile>
  KVF_INLINE KVF_HD static Tile inner_tile(Tile tile) {
    tile.params += mean_bytes(tile.dims, tile.page_tokens);
    tile.param_stride = Q::param_bytes(tile.dims, 1);
    return tile;
  }
  /// The channels' means of the block that a slot is in.
  template <class Tile>
  KVF_INLINE KVF_HD static const fp16* channel_params(Tile tile, int slot) {
    return &mean(tile, slot, 0);
  }

  /// The means of the block that begins at `slot`. Adds up units of 2^-24, the smallest fp16: integers, so no
  /// order of additions changes the sum.
  template <class Tile, class Values>
  KVF_INLINE KVF_HD static void write_means(Tile tile, int slot, Values values) {
    constexpr int width = 16;  // channels side by side, so that rows are read along their length
    for (int begin = 0; begin < tile.dims; begin += width) {
      const int count = tile.dims - begin < width ? tile.dims - begin : width;
      std::int64_t sums[width] = {};
      for (int t = 0; t < Tokens; ++t)
        for (int i = 0; i < count; ++i) {
          const float x = values(t, begin + i);
          const float counted = detail::is_finite(x) ? detail::clamp_to_fp16(x) : 0.0f;
          sums[i] += static_cast<std::int64_t>(counted * 0x1p24f);
        }
      for (int i = 0; i < count; ++i)
        mean(tile, slot, begin + i) = fp16(static_cast<float>(sums[i]) * (0x1p-24f / Tokens));
    }
  }

 private:
  template <class Tile>
  KVF_INLINE KVF_HD static decltype(auto) mean(Tile tile, int slot, int dim) {
    return tile.template tile_param<fp16>(std::int64_t{slot / Tokens} * tile.dims + dim);
  }
};

static_assert(QuantPolicy<Centered<Identity<float>>>);

}  // namespace kvfolia::inline KVF_ABI
