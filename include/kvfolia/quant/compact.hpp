// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// 4-bit codes per channel with parameters of 8 bits: the most accuracy for a byte, see bench/results/.

#include <cstdint>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/fp16.hpp"
#include "kvfolia/core/rounding.hpp"
#include "kvfolia/core/tile.hpp"
#include "kvfolia/quant/identity.hpp"
#include "kvfolia/quant/int4.hpp"
#include "kvfolia/quant/nibbles.hpp"

namespace kvfolia::inline KVF_ABI {

/// Every channel has a scale and a min over a block of `Tokens` tokens, as Int4Channels has, but in 8 bits
/// each: min = i8 * (block's fp16) / 128, scale = u8 * (block's fp16) / 256. Both are rounded so that the
/// whole range is inside: |decode(encode(x)) - x| <= scale / 2 up to rounding. For keys and values, best
/// rotated, which makes the channels alike: Rotated<Compact4Channels<32>> takes 4.52 bits at head dim 64. A
/// channel with a non-finite value decodes to NaN; values beyond fp16's range are clamped to it.
template <int Tokens>
struct Compact4Channels {
  static_assert(Tokens > 0);
  using Exact = Identity<fp16>;
  static constexpr int param_alignment = alignof(fp16);
  struct Param {
    std::uint8_t scale;
    std::int8_t min;  ///< -128: not a number
  };
  static constexpr int seal_tokens = Tokens;
  static constexpr int code_bits = 4;
  static constexpr int group_dims = 0;
  static constexpr Affine affine{.channel_scale = true, .channel_offset = true};

  /// A block's two references, then its channels.
  KVF_INLINE KVF_HD static constexpr std::int64_t param_bytes(int dims, int page_tokens) {
    return page_tokens / Tokens * block_bytes(dims);
  }

  template <class Tile, class Values>
  KVF_INLINE KVF_HD void encode(Tile tile, int slot, int tokens, Values values) const {
    for (int first = 0; first < tokens; first += Tokens) {
      const Block block = fit(tile, values, first);
      reference(tile, slot + first, 0) = block.scale;
      reference(tile, slot + first, 1) = block.min;
      each_range(tile, values, first, [&](int begin, int count, const detail::Range* ranges) {
        float min[width], inverse[width];
        for (int i = 0; i < count; ++i) {
          const Param fitted = block.round(ranges[i]);
          param(tile, slot + first, begin + i) = fitted;
          min[i] = block.min_of(fitted);
          inverse[i] = block.inverse_of(fitted);
        }
        for (int t = first; t < first + Tokens; ++t)
          detail::write_nibbles(tile, slot + t, begin, begin + count, [&](int d) {
            return detail::asymmetric_code(values(t, d), min[d - begin], inverse[d - begin]);
          });
      });
    }
  }

  template <class Tile>
  KVF_INLINE KVF_HD void codes(Tile tile, int slot, float* codes) const {
    detail::read_nibbles(tile, slot, codes);
  }
  template <class Tile>
  KVF_INLINE KVF_HD float channel_scale(Tile tile, int slot, int dim) const {
    return block_of(tile, slot).scale_of(param(tile, slot, dim));
  }
  template <class Tile>
  KVF_INLINE KVF_HD float channel_offset(Tile tile, int slot, int dim) const {
    return block_of(tile, slot).min_of(param(tile, slot, dim));
  }
  template <class Tile>
  KVF_INLINE KVF_HD void decode(Tile tile, int slot, float* values) const {
    decode_affine(*this, tile, slot, values);
  }

  KVF_INLINE KVF_HD static constexpr std::int64_t block_bytes(int dims) {
    return (2 * static_cast<std::int64_t>(sizeof(fp16)) + dims * static_cast<std::int64_t>(sizeof(Param)) +
            3) /
           4 * 4;
  }

  /// What the channels' parameters are relative to, and how a channel's become so: for kernels that fit
  /// channels side by side.
  struct Block {
    fp16 scale{};
    fp16 min{};

    KVF_INLINE KVF_HD float scale_of(Param p) const {
      if (p.min == not_a_number) return detail::quiet_nan;
      return static_cast<float>(p.scale) * (static_cast<float>(scale) * (1.0f / 256.0f));
    }
    KVF_INLINE KVF_HD float min_of(Param p) const {
      if (p.min == not_a_number) return detail::quiet_nan;
      return static_cast<float>(p.min) * min_unit();
    }
    KVF_INLINE KVF_HD float min_unit() const { return static_cast<float>(min) * (1.0f / 128.0f); }

    // Products of a code, a reference and these powers of two are exact, so comparing them has one outcome
    // whatever a compiler makes of the estimate that the search begins with.

    /// The largest min in units that is not above the range.
    KVF_INLINE KVF_HD int min_code(const detail::Range& range) const {
      const float unit = min_unit(), low = range.smallest();
      int code = detail::round_towards(low * detail::inverse(unit), -127, 127, -1);
      while (code < 127 && static_cast<float>(code + 1) * unit <= low) ++code;
      while (code > -127 && static_cast<float>(code) * unit > low) --code;
      return code;
    }
    /// From there to the range's end.
    KVF_INLINE KVF_HD float reach(const detail::Range& range, int min_code) const {
      return range.largest() - static_cast<float>(min_code) * min_unit();
    }
    /// The smallest scale with which 15 steps reach the range's end.
    KVF_INLINE KVF_HD Param round(const detail::Range& range) const {
      if (!range.is_finite()) return {0, not_a_number};
      const int low = min_code(range);
      const float unit = static_cast<float>(scale) * (15.0f / 256.0f), end = reach(range, low);
      int code = detail::round_towards(end * detail::inverse(unit), 1, 255, 1);
      while (code < 255 && static_cast<float>(code) * unit < end) ++code;
      while (code > 1 && static_cast<float>(code - 1) * unit >= end) --code;
      return {static_cast<std::uint8_t>(code), static_cast<std::int8_t>(low)};
    }

    /// The reference that mins of magnitude up to `largest` need.
    KVF_INLINE KVF_HD static fp16 min_reference(float largest) { return reference(largest, 127.0f / 128.0f); }
    /// The reference that ranges of up to `longest`, as needed() has them, need.
    KVF_INLINE KVF_HD static fp16 scale_reference(float longest) {
      return reference(longest, 255.0f * 15.0f / 256.0f);
    }
    /// How far a finite range reaches from the min that it will have; 0 for another.
    KVF_INLINE KVF_HD float needed(const detail::Range& range) const {
      return range.is_finite() ? reach(range, min_code(range)) : 0.0f;
    }
    /// What a channel's codes are made with.
    KVF_INLINE KVF_HD float inverse_of(Param p) const {
      return p.min == not_a_number ? 0.0f : detail::inverse(scale_of(p));
    }
  };

 private:
  static constexpr int width = 16;  ///< channels side by side, so that rows are read along their length
  static constexpr std::int8_t not_a_number = -128;

  /// The smallest positive fp16 whose product with `factor`, which is exact, reaches so far; at most 65504.
  KVF_INLINE KVF_HD static fp16 reference(float reach, float factor) {
    fp16 value = detail::round_up(reach * (1.0f / factor));
    while (value.bits < 0x7bff && static_cast<float>(value) * factor < reach) ++value.bits;
    while (value.bits > 1 &&
           static_cast<float>(fp16::from_bits(static_cast<std::uint16_t>(value.bits - 1))) * factor >= reach)
      --value.bits;
    return value;
  }

  /// References that reach the largest magnitude of a min, and the longest range.
  template <class Tile, class Values>
  KVF_INLINE KVF_HD static Block fit(Tile tile, Values values, int first) {
    Block block;
    float min = 0.0f, reach = 0.0f;
    each_range(tile, values, first, [&](int, int count, const detail::Range* ranges) {
      for (int i = 0; i < count; ++i)
        if (ranges[i].is_finite() && detail::magnitude(ranges[i].smallest()) > min)
          min = detail::magnitude(ranges[i].smallest());
    });
    block.min = Block::min_reference(min);
    each_range(tile, values, first, [&](int, int count, const detail::Range* ranges) {
      for (int i = 0; i < count; ++i) {
        const float needed = block.needed(ranges[i]);
        if (needed > reach) reach = needed;
      }
    });
    block.scale = Block::scale_reference(reach);
    return block;
  }

  /// Calls f(first channel, channels, their ranges) for all channels, some at a time.
  template <class Tile, class Values, class F>
  KVF_INLINE KVF_HD static void each_range(Tile tile, Values values, int first, F&& f) {
    for (int begin = 0; begin < tile.dims; begin += width) {
      const int count = tile.dims - begin < width ? tile.dims - begin : width;
      detail::Range ranges[width];
      for (int t = 0; t < Tokens; ++t)
        for (int i = 0; i < count; ++i) ranges[i].add(values(first + t, begin + i));
      f(begin, count, ranges);
    }
  }

  template <class Tile>
  KVF_INLINE KVF_HD static decltype(auto) reference(Tile tile, int slot, int index) {
    return tile.template tile_param<fp16>(slot / Tokens * block_bytes(tile.dims) / 2 + index);
  }
  template <class Tile>
  KVF_INLINE KVF_HD static Block block_of(Tile tile, int slot) {
    Block block;
    block.scale = reference(tile, slot, 0);
    block.min = reference(tile, slot, 1);
    return block;
  }
  template <class Tile>
  KVF_INLINE KVF_HD static decltype(auto) param(Tile tile, int slot, int dim) {
    return tile.template tile_param<Param>(slot / Tokens * block_bytes(tile.dims) / 2 + 2 + dim);
  }
};
static_assert(QuantPolicy<Compact4Channels<32>>);

}  // namespace kvfolia::inline KVF_ABI
