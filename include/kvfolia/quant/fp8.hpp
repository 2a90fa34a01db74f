// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// 8-bit floating-point codes: one scale a token and head, one for the whole cache, or a power of two a
// block of dims.

#include <cstdint>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/fp16.hpp"
#include "kvfolia/core/rounding.hpp"
#include "kvfolia/core/small_floats.hpp"
#include "kvfolia/core/tile.hpp"
#include "kvfolia/quant/identity.hpp"

namespace kvfolia::inline KVF_ABI {

namespace detail {

/// What all fp8 quantizers share.
template <class CodeT>
struct Fp8Codes {
  using Exact = Identity<fp16>;
  using Code = CodeT;
  static constexpr int seal_tokens = 1;
  static constexpr int code_bits = 8;
  /// What a value may be above the largest code's without being clamped by more than it would be rounded.
  static constexpr float half_step =
      0.5f * (Code::largest - static_cast<float>(Code::from_bits(Code(Code::largest).bits - 1)));

  template <class Tile>
  KVF_INLINE KVF_HD void codes(Tile tile, int slot, float* codes) const {
    for (int d = 0; d < tile.dims; ++d) codes[d] = static_cast<float>(tile.template code<Code>(slot, d));
  }
};

}  // namespace detail

/// scale = amax / the largest code's value, fp16, a token and head. A token with a non-finite value
/// decodes to NaN.
template <class Code = fp8_e4m3>
struct Fp8 : detail::Fp8Codes<Code> {
  struct Param {
    fp16 scale;
  };
  static constexpr int group_dims = 0;
  static constexpr Affine affine{.token_scale = true};

  KVF_INLINE KVF_HD static constexpr std::int64_t param_bytes(int /*dims*/, int page_tokens) {
    return std::int64_t{page_tokens} * static_cast<std::int64_t>(sizeof(Param));
  }

  template <class Tile, class Values>
  KVF_INLINE KVF_HD void encode(Tile tile, int slot, int tokens, Values values) const {
    for (int t = 0; t < tokens; ++t) {
      const std::uint32_t amax = detail::amax_bits(values, t, 0, tile.dims);
      const fp16 scale = detail::fit_scale(detail::float_of(amax), Code::largest, this->half_step);
      tile.template param<Param>(slot + t) = Param{scale};
      const float inverse = amax < 0x7f800000u ? detail::inverse(static_cast<float>(scale)) : 0.0f;
      for (int d = 0; d < tile.dims; ++d)
        tile.template code<Code>(slot + t, d) = Code(values(t, d) * inverse);
    }
  }
  template <class Tile>
  KVF_INLINE KVF_HD float token_scale(Tile tile, int slot, int /*group*/) const {
    return static_cast<float>(tile.template param<Param>(slot).scale);
  }
  template <class Tile>
  KVF_INLINE KVF_HD void decode(Tile tile, int slot, float* values) const {
    decode_affine(*this, tile, slot, values);
  }
};
static_assert(QuantPolicy<Fp8<>> && QuantPolicy<Fp8<fp8_e5m2>>);

/// One scale for all of a cache, calibrated by the caller: no parameters. What is larger than the
/// largest code's value times the scale is clamped to that; a non-finite value decodes to NaN.
template <class Code = fp8_e4m3>
struct Fp8Tensor : detail::Fp8Codes<Code> {
  static constexpr int group_dims = 0;
  static constexpr Affine affine{.token_scale = true};

  float scale = 1.0f;  ///< at least 2^-100

  /// The scale for values of magnitude up to amax.
  KVF_INLINE KVF_HD static constexpr Fp8Tensor calibrated(float amax) {
    Fp8Tensor quant;
    quant.scale = amax > 0x1p-84f ? amax / Code::largest : 1.0f;  // smaller ones are as good as 0
    return quant;
  }

  KVF_INLINE KVF_HD static constexpr std::int64_t param_bytes(int /*dims*/, int /*page_tokens*/) { return 0; }

  template <class Tile, class Values>
  KVF_INLINE KVF_HD void encode(Tile tile, int slot, int tokens, Values values) const {
    const float inverse = detail::inverse(scale);
    for (int t = 0; t < tokens; ++t)
      for (int d = 0; d < tile.dims; ++d) {
        const float x = values(t, d);
        tile.template code<Code>(slot + t, d) = Code(detail::is_finite(x) ? x * inverse : detail::quiet_nan);
      }
  }
  template <class Tile>
  KVF_INLINE KVF_HD float token_scale(Tile /*tile*/, int /*slot*/, int /*group*/) const {
    return scale;
  }
  template <class Tile>
  KVF_INLINE KVF_HD void decode(Tile tile, int slot, float* values) const {
    decode_affine(*this, tile, slot, values);
  }
};
static_assert(QuantPolicy<Fp8Tensor<>>);

/// A power of two, stored as a float, for every `Group` neighbouring dims of a token: the smallest one
/// with which no value is clamped. With Sections and groups of 128 this is the 656-byte token of latent
/// caches: 512 codes, 4 scales, 64 bf16.
template <class Code = fp8_e4m3, int Group = 128>
struct Fp8Blocks : detail::Fp8Codes<Code> {
  static_assert(Group > 0);
  struct Param {
    float scale;
  };
  static constexpr int group_dims = Group;
  static constexpr Affine affine{.token_scale = true};

  KVF_INLINE KVF_HD static constexpr std::int64_t param_bytes(int dims, int page_tokens) {
    return std::int64_t{page_tokens} * group_count<Fp8Blocks>(dims) *
           static_cast<std::int64_t>(sizeof(Param));
  }

  /// 2^ceil(log2(amax / largest)), at least 2^-126 and so large at most that no code overflows a float; NaN
  /// for a non-finite amax.
  KVF_INLINE KVF_HD static constexpr float fit(std::uint32_t amax) {
    if (amax >= 0x7f800000u) return detail::quiet_nan;
    // largest = 1.75 * 2^k for both formats: beside 2^e the mantissa decides whether 2^(e - k) will do.
    constexpr auto top = detail::bits_of(Code::largest);
    const std::uint32_t exponent = amax >> 23, above = (amax & 0x7fffffu) > (top & 0x7fffffu) ? 1 : 0;
    const std::uint32_t biased = exponent + above + 127;
    const std::uint32_t unclamped = biased > (top >> 23) + 1 ? biased - (top >> 23) : 1;
    constexpr std::uint32_t largest = 254 + 127 - (top >> 23);  // no code overflows a float
    const std::uint32_t scale = unclamped < largest ? unclamped : largest;
    return detail::float_of(scale << 23);
  }

  template <class Tile, class Values>
  KVF_INLINE KVF_HD void encode(Tile tile, int slot, int tokens, Values values) const {
    for (int t = 0; t < tokens; ++t)
      for (int group = 0; group < group_count<Fp8Blocks>(tile.dims); ++group) {
        const int begin = group_begin<Fp8Blocks>(group), end = group_end<Fp8Blocks>(group, tile.dims);
        const std::uint32_t amax = detail::amax_bits(values, t, begin, end);
        const float scale = fit(amax);
        tile.template param<Param>(slot + t, group) = Param{scale};
        const float inverse = amax < 0x7f800000u ? detail::inverse(scale) : 0.0f;
        for (int d = begin; d < end; ++d)
          tile.template code<Code>(slot + t, d) = Code(values(t, d) * inverse);
      }
  }
  template <class Tile>
  KVF_INLINE KVF_HD float token_scale(Tile tile, int slot, int group) const {
    return tile.template param<Param>(slot, group).scale;
  }
  template <class Tile>
  KVF_INLINE KVF_HD void decode(Tile tile, int slot, float* values) const {
    decode_affine(*this, tile, slot, values);
  }
};
static_assert(QuantPolicy<Fp8Blocks<>>);
static_assert(Fp8Blocks<>::fit(0x43e00000u) == 1.0f && Fp8Blocks<>::fit(0x43e00001u) == 2.0f);

}  // namespace kvfolia::inline KVF_ABI
