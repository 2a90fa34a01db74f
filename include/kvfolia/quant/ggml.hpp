// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The block orders of ggml's q8_0 and q4_0, scale and codes side by side: for interchange with caches
// and files that have them.

#include <cstdint>
#include <type_traits>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/fp16.hpp"
#include "kvfolia/core/rounding.hpp"
#include "kvfolia/core/tile.hpp"
#include "kvfolia/quant/identity.hpp"

namespace kvfolia::inline KVF_ABI {

namespace detail {

/// Blocks of 32 dims, each an fp16 scale and `CodeBytes` of codes; a token's blocks lie behind one
/// another. `Format` has the divisor that makes a scale of the extreme value, whether the scale keeps that
/// value's sign, and put and get for one block's codes. Codes are rounded as ggml rounds; a scale may differ
/// from its own in the last bit.
template <class Format, int CodeBytes>
struct GgmlBlocks {
  using Exact = Identity<fp16>;
  static constexpr int block_bytes = 2 + CodeBytes;
  static constexpr int seal_tokens = 1;
  static constexpr int code_bits = 8;  ///< the unit of strides
  static constexpr int group_dims = 32;
  static constexpr Affine affine{.token_scale = true};

  KVF_INLINE KVF_HD static constexpr bool fits(int dims) { return dims % group_dims == 0; }
  KVF_INLINE KVF_HD static constexpr int code_bytes(int dims) { return dims / group_dims * block_bytes; }
  KVF_INLINE KVF_HD static constexpr std::int64_t param_bytes(int /*dims*/, int /*page_tokens*/) { return 0; }

  template <class Tile, class Values>
  KVF_INLINE KVF_HD void encode(Tile tile, int slot, int tokens, Values values) const {
    for (int t = 0; t < tokens; ++t)
      for (int group = 0; group < tile.dims / group_dims; ++group) {
        // Of several values of the largest magnitude, the first one counts.
        std::uint32_t amax = 0;
        float extreme = 0.0f;
        for (int i = 0; i < group_dims; ++i) {
          const float x = values(t, group * group_dims + i);
          const auto bits = detail::bits_of(x) & 0x7fffffffu;
          extreme = bits > amax ? x : extreme;
          amax = bits > amax ? bits : amax;
        }
        const float quotient = amax < 0x7f800000u ? extreme * (1.0f / Format::divisor) : quiet_nan;
        const float scale = Format::is_signed ? quotient : magnitude(quotient);
        const auto byte = [&](int i) -> decltype(auto) {
          return tile.code_byte(slot + t, group * block_bytes + i);
        };
        const fp16 stored(clamp_to_fp16(scale));
        byte(0) = static_cast<std::uint8_t>(stored.bits);
        byte(1) = static_cast<std::uint8_t>(stored.bits >> 8);
        const float factor = amax < 0x7f800000u ? inverse(scale) : 0.0f;
        Format::put([&](int i) -> decltype(auto) { return byte(2 + i); },
                    [&](int i) { return values(t, group * group_dims + i) * factor; });
      }
  }

  template <class Tile>
  KVF_INLINE KVF_HD void codes(Tile tile, int slot, float* codes) const {
    for (int d = 0; d < tile.dims; ++d) codes[d] = code(tile, slot, d);
  }
  template <class Tile>
  KVF_INLINE KVF_HD static float code(Tile tile, int slot, int dim) {
    const int block = dim / group_dims * block_bytes + 2;
    return Format::get([&](int i) { return std::uint32_t{tile.code_byte(slot, block + i)}; },
                       dim % group_dims);
  }
  template <class Tile>
  KVF_INLINE KVF_HD float token_scale(Tile tile, int slot, int group) const {
    const std::uint32_t low = tile.code_byte(slot, group * block_bytes);
    const std::uint32_t high = tile.code_byte(slot, group * block_bytes + 1);
    return static_cast<float>(fp16::from_bits(static_cast<std::uint16_t>(low | (high << 8))));
  }
  template <class Tile>
  KVF_INLINE KVF_HD void decode(Tile tile, int slot, float* values) const {
    decode_affine(*this, tile, slot, values);
  }
};

struct Q8_0Codes {
  static constexpr float divisor = 127.0f;
  static constexpr bool is_signed = false;

  template <class Bytes, class Values>
  KVF_INLINE KVF_HD static void put(const Bytes& to, const Values& scaled) {
    for (int i = 0; i < 32; ++i) {
      // Half away from zero, as ggml does.
      const float x = scaled(i);
      const float clamped = x > -127.0f ? (x < 127.0f ? x : 127.0f) : -127.0f;
      const auto whole = static_cast<std::int32_t>(clamped);
      const float rest = clamped - static_cast<float>(whole);
      to(i) = static_cast<std::uint8_t>(whole + (rest >= 0.5f ? 1 : 0) - (rest <= -0.5f ? 1 : 0));
    }
  }
  template <class Bytes>
  KVF_INLINE KVF_HD static float get(const Bytes& from, int i) {
    return static_cast<float>(static_cast<std::int8_t>(from(i)));
  }
};

struct Q4_0Codes {
  static constexpr float divisor = -8.0f;
  static constexpr bool is_signed = true;

  template <class Bytes, class Values>
  KVF_INLINE KVF_HD static void put(const Bytes& to, const Values& scaled) {
    // Code 8 is 0; half upwards, as ggml does.
    const auto code = [&](int i) {
      const float x = scaled(i);
      const float clamped = x > -8.0f ? (x < 7.0f ? x : 7.0f) : -8.0f;
      const auto below = static_cast<std::int32_t>(clamped + 8.0f);
      const float rest = clamped - static_cast<float>(below - 8);
      return static_cast<std::uint32_t>(below + (rest >= 0.5f ? 1 : 0));
    };
    for (int i = 0; i < 16; ++i) to(i) = static_cast<std::uint8_t>(code(i) | (code(i + 16) << 4));
  }
  template <class Bytes>
  KVF_INLINE KVF_HD static float get(const Bytes& from, int i) {
    return static_cast<float>(static_cast<int>(i < 16 ? from(i) & 15u : from(i - 16) >> 4) - 8);
  }
};

}  // namespace detail

/// 32 signed codes behind an fp16 scale, amax / 127: 34 bytes a block. Head dims are multiples of 32.
struct Q8_0 : detail::GgmlBlocks<detail::Q8_0Codes, 32> {};
/// 32 codes from -8 to 7 behind an fp16 scale that makes the value of the largest magnitude -8: 18 bytes a
/// block. Dimensions j and j + 16 share a byte. Head dims are multiples of 32.
struct Q4_0 : detail::GgmlBlocks<detail::Q4_0Codes, 16> {};
static_assert(QuantPolicy<Q8_0> && QuantPolicy<Q4_0>);

namespace detail {

template <class Q>
inline constexpr bool is_ggml = std::is_base_of_v<Q8_0, Q> || std::is_base_of_v<Q4_0, Q>;

}  // namespace detail

}  // namespace kvfolia::inline KVF_ABI
