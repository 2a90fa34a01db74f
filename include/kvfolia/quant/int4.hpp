// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Asymmetric 4-bit codes: per token over groups of dims, and per channel over blocks of tokens.

#include <cstdint>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/fp16.hpp"
#include "kvfolia/core/rounding.hpp"
#include "kvfolia/core/tile.hpp"
#include "kvfolia/quant/identity.hpp"
#include "kvfolia/quant/nibbles.hpp"

namespace kvfolia::inline KVF_ABI {

/// value = scale * code + min. The minimum itself is stored, not a zero point: it can neither overflow
/// nor move what lies far from 0.
struct ScaleMin {
  fp16 scale;
  fp16 min;
};

namespace detail {

/// The smallest and largest of some values. Kept as integers that order as the values do, with those that
/// are not finite at both ends: no rule about NaN keeps a loop from becoming vector instructions.
struct Range {
  std::int32_t low = 0x7fffffff;
  std::int32_t high = -0x7fffffff - 1;

  KVF_INLINE KVF_HD void add(float x) {
    const auto bits = static_cast<std::int32_t>(detail::bits_of(x));
    const std::int32_t key = bits ^ ((bits >> 31) & 0x7fffffff);
    low = key < low ? key : low;
    high = key > high ? key : high;
  }

  KVF_INLINE KVF_HD bool is_finite() const { return high < 0x7f800000 && low > -0x7f800001; }
  KVF_INLINE KVF_HD float smallest() const { return value(low); }
  KVF_INLINE KVF_HD float largest() const { return value(high); }

  /// min is rounded down, so that the lowest value is inside; a constant keeps its nearest fp16 and
  /// scale 0. NaN where a value is not finite.
  KVF_INLINE KVF_HD ScaleMin fit() const {
    if (!is_finite()) return {fp16::from_bits(0x7e00), fp16::from_bits(0x7e00)};
    const float from = clamp_to_fp16(smallest()), to = clamp_to_fp16(largest());
    if (smallest() == largest()) return {fp16(0.0f), fp16(from)};
    const fp16 min = round_down(from);
    return {fit_scale(to - static_cast<float>(min), 15.0f, 0.5f), min};
  }

 private:
  KVF_INLINE KVF_HD static float value(std::int32_t key) {
    return float_of(static_cast<std::uint32_t>(key ^ ((key >> 31) & 0x7fffffff)));
  }
};

KVF_INLINE KVF_HD std::uint32_t asymmetric_code(float x, float min, float inverse) {
  return static_cast<std::uint32_t>(round_code((x - min) * inverse, 0.0f, 15.0f));
}

}  // namespace detail

/// scale = (max - min) / 15 and min, both fp16, for every `Group` neighbouring dims of a token; 0 is all
/// of them. |decode(encode(x)) - x| <= scale / 2 up to rounding. A constant group decodes to its fp16, a
/// group with a non-finite value to NaN. Values beyond fp16's range are clamped to it.
template <int Group>
struct Int4 {
  static_assert(Group >= 0 && Group % 2 == 0, "a group must fill whole bytes");
  using Exact = Identity<fp16>;
  using Param = ScaleMin;
  static constexpr int seal_tokens = 1;
  static constexpr int code_bits = 4;
  static constexpr int group_dims = Group;
  static constexpr Affine affine{.token_scale = true, .token_offset = true};

  KVF_INLINE KVF_HD static constexpr std::int64_t param_bytes(int dims, int page_tokens) {
    return std::int64_t{page_tokens} * group_count<Int4>(dims) * static_cast<std::int64_t>(sizeof(Param));
  }

  template <class Tile, class Values>
  KVF_INLINE KVF_HD void encode(Tile tile, int slot, int tokens, Values values) const {
    for (int t = 0; t < tokens; ++t)
      for (int group = 0; group < group_count<Int4>(tile.dims); ++group) {
        const int begin = group_begin<Int4>(group), end = group_end<Int4>(group, tile.dims);
        detail::Range range;
        for (int d = begin; d < end; ++d) range.add(values(t, d));
        const Param fitted = range.fit();
        tile.template param<Param>(slot + t, group) = fitted;
        const float min = static_cast<float>(fitted.min);
        const float inverse = detail::inverse(static_cast<float>(fitted.scale));
        detail::write_nibbles(tile, slot + t, begin, end,
                              [&](int d) { return detail::asymmetric_code(values(t, d), min, inverse); });
      }
  }

  template <class Tile>
  KVF_INLINE KVF_HD void codes(Tile tile, int slot, float* codes) const {
    detail::read_nibbles(tile, slot, codes);
  }
  template <class Tile>
  KVF_INLINE KVF_HD float token_scale(Tile tile, int slot, int group) const {
    return static_cast<float>(tile.template param<Param>(slot, group).scale);
  }
  template <class Tile>
  KVF_INLINE KVF_HD float token_offset(Tile tile, int slot, int group) const {
    return static_cast<float>(tile.template param<Param>(slot, group).min);
  }
  template <class Tile>
  KVF_INLINE KVF_HD void decode(Tile tile, int slot, float* values) const {
    decode_affine(*this, tile, slot, values);
  }
};
static_assert(QuantPolicy<Int4<32>>);

/// scale = amax / 7, fp16, for every `Group` neighbouring dims of a token; 0 is all of them. Codes are -7 to
/// 7, stored with 8 added. Half a bit less than Int4 at groups of 32, and worse by more than that; errors,
/// clamping and non-finite values are as Int8's.
template <int Group>
struct Int4Symmetric {
  static_assert(Group >= 0 && Group % 2 == 0, "a group must fill whole bytes");
  using Exact = Identity<fp16>;
  struct Param {
    fp16 scale;
  };
  static constexpr int seal_tokens = 1;
  static constexpr int code_bits = 4;
  static constexpr int group_dims = Group;
  static constexpr Affine affine{.token_scale = true};

  KVF_INLINE KVF_HD static constexpr std::int64_t param_bytes(int dims, int page_tokens) {
    return std::int64_t{page_tokens} * group_count<Int4Symmetric>(dims) *
           static_cast<std::int64_t>(sizeof(Param));
  }

  template <class Tile, class Values>
  KVF_INLINE KVF_HD void encode(Tile tile, int slot, int tokens, Values values) const {
    for (int t = 0; t < tokens; ++t)
      for (int group = 0; group < group_count<Int4Symmetric>(tile.dims); ++group) {
        const int begin = group_begin<Int4Symmetric>(group), end = group_end<Int4Symmetric>(group, tile.dims);
        const std::uint32_t amax = detail::amax_bits(values, t, begin, end);
        const fp16 scale = detail::fit_scale(detail::float_of(amax), 7.0f, 0.5f);
        tile.template param<Param>(slot + t, group) = Param{scale};
        const float inverse = amax < 0x7f800000u ? detail::inverse(static_cast<float>(scale)) : 0.0f;
        detail::write_nibbles(tile, slot + t, begin, end, [&](int d) {
          return static_cast<std::uint32_t>(detail::round_code(values(t, d) * inverse, -7.0f, 7.0f) + 8);
        });
      }
  }

  template <class Tile>
  KVF_INLINE KVF_HD void codes(Tile tile, int slot, float* codes) const {
    detail::read_nibbles(tile, slot, codes,
                         [](std::uint32_t code) { return static_cast<float>(static_cast<int>(code) - 8); });
  }
  template <class Tile>
  KVF_INLINE KVF_HD float token_scale(Tile tile, int slot, int group) const {
    return static_cast<float>(tile.template param<Param>(slot, group).scale);
  }
  template <class Tile>
  KVF_INLINE KVF_HD void decode(Tile tile, int slot, float* values) const {
    decode_affine(*this, tile, slot, values);
  }
};
static_assert(QuantPolicy<Int4Symmetric<32>>);

/// scale and min for every channel over blocks of `Tokens` tokens, for keys, whose channels differ more
/// than their tokens do. Errors, constants and non-finite values are as Int4's.
/// Source: KIVI, arXiv:2402.02750.
template <int Tokens>
struct Int4Channels {
  static_assert(Tokens > 0);
  using Exact = Identity<fp16>;
  using Param = ScaleMin;
  static constexpr int seal_tokens = Tokens;
  static constexpr int code_bits = 4;
  static constexpr int group_dims = 0;
  static constexpr Affine affine{.channel_scale = true, .channel_offset = true};

  KVF_INLINE KVF_HD static constexpr std::int64_t param_bytes(int dims, int page_tokens) {
    return std::int64_t{page_tokens / Tokens} * dims * static_cast<std::int64_t>(sizeof(Param));
  }

  template <class Tile, class Values>
  KVF_INLINE KVF_HD void encode(Tile tile, int slot, int tokens, Values values) const {
    constexpr int width = 16;  // channels side by side, so that rows are read along their length
    for (int first = 0; first < tokens; first += Tokens)
      for (int begin = 0; begin < tile.dims; begin += width) {
        const int count = tile.dims - begin < width ? tile.dims - begin : width;
        detail::Range ranges[width];
        for (int t = 0; t < Tokens; ++t)
          for (int i = 0; i < count; ++i) ranges[i].add(values(first + t, begin + i));
        float min[width], inverse[width];
        for (int i = 0; i < count; ++i) {
          const Param fitted = ranges[i].fit();
          param(tile, slot + first, begin + i) = fitted;
          min[i] = static_cast<float>(fitted.min);
          inverse[i] = detail::inverse(static_cast<float>(fitted.scale));
        }
        for (int t = first; t < first + Tokens; ++t)
          detail::write_nibbles(tile, slot + t, begin, begin + count, [&](int d) {
            return detail::asymmetric_code(values(t, d), min[d - begin], inverse[d - begin]);
          });
      }
  }

  template <class Tile>
  KVF_INLINE KVF_HD void codes(Tile tile, int slot, float* codes) const {
    detail::read_nibbles(tile, slot, codes);
  }
  template <class Tile>
  KVF_INLINE KVF_HD float channel_scale(Tile tile, int slot, int dim) const {
    return static_cast<float>(param(tile, slot, dim).scale);
  }
  template <class Tile>
  KVF_INLINE KVF_HD float channel_offset(Tile tile, int slot, int dim) const {
    return static_cast<float>(param(tile, slot, dim).min);
  }
  template <class Tile>
  KVF_INLINE KVF_HD void decode(Tile tile, int slot, float* values) const {
    decode_affine(*this, tile, slot, values);
  }

  /// All channels' of the block that a slot is in.
  template <class Tile>
  KVF_INLINE KVF_HD static const Param* channel_params(Tile tile, int slot) {
    return &param(tile, slot, 0);
  }

 private:
  template <class Tile>
  KVF_INLINE KVF_HD static decltype(auto) param(Tile tile, int slot, int dim) {
    return tile.template tile_param<Param>(std::int64_t{slot / Tokens} * tile.dims + dim);
  }
};
static_assert(QuantPolicy<Int4Channels<32>>);

}  // namespace kvfolia::inline KVF_ABI
