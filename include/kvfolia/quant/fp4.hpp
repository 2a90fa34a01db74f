// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// 4-bit floating-point codes in small blocks: NVFP4 and MXFP4.

#include <cstdint>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/rounding.hpp"
#include "kvfolia/core/small_floats.hpp"
#include "kvfolia/core/tile.hpp"
#include "kvfolia/quant/identity.hpp"
#include "kvfolia/quant/nibbles.hpp"

namespace kvfolia::inline KVF_ABI {

namespace detail {

/// e2m1 codes with one scale a block of a token's dims. `Scheme` has Param, fit(amax) and scale(param).
template <class Scheme, int Group>
struct Fp4Blocks {
  using Exact = Identity<fp16>;
  static constexpr int seal_tokens = 1;
  static constexpr int code_bits = 4;
  static constexpr int group_dims = Group;
  static constexpr Affine affine{.token_scale = true};

  KVF_INLINE KVF_HD static constexpr std::int64_t param_bytes(int dims, int page_tokens) {
    return std::int64_t{page_tokens} * group_count<Fp4Blocks>(dims);
  }

  template <class Tile, class Values>
  KVF_INLINE KVF_HD void encode(Tile tile, int slot, int tokens, Values values) const {
    using Param = typename Scheme::Param;
    static_assert(sizeof(Param) == 1);
    for (int t = 0; t < tokens; ++t)
      for (int group = 0; group < group_count<Fp4Blocks>(tile.dims); ++group) {
        const int begin = group_begin<Fp4Blocks>(group), end = group_end<Fp4Blocks>(group, tile.dims);
        const std::uint32_t amax = amax_bits(values, t, begin, end);
        const Param param = scheme().fit(amax);
        tile.template param<Param>(slot + t, group) = param;
        const float inverse = amax < 0x7f800000u ? detail::inverse(scheme().scale(param)) : 0.0f;
        write_nibbles(tile, slot + t, begin, end,
                      [&](int d) { return fp4_e2m1(values(t, d) * inverse).bits; });
      }
  }

  template <class Tile>
  KVF_INLINE KVF_HD void codes(Tile tile, int slot, float* codes) const {
    read_nibbles(tile, slot, codes, [](std::uint32_t code) {
      return static_cast<float>(fp4_e2m1::from_bits(static_cast<std::uint8_t>(code)));
    });
  }
  template <class Tile>
  KVF_INLINE KVF_HD float token_scale(Tile tile, int slot, int group) const {
    return scheme().scale(tile.template param<typename Scheme::Param>(slot, group));
  }
  template <class Tile>
  KVF_INLINE KVF_HD void decode(Tile tile, int slot, float* values) const {
    decode_affine(*this, tile, slot, values);
  }

 private:
  KVF_INLINE KVF_HD const Scheme& scheme() const { return static_cast<const Scheme&>(*this); }
};

}  // namespace detail

/// Blocks of 16 dims with an e4m3 scale, amax / (6 global). `global` is the caller's, calibrated as
/// (largest magnitude) / (6 * 448), so that the largest block's scale is the largest e4m3; what exceeds it
/// is clamped. A block with a non-finite value decodes to NaN.
/// Source: NVIDIA, "Pretraining large language models with NVFP4", arXiv:2509.25149.
struct Nvfp4 : detail::Fp4Blocks<Nvfp4, 16> {
  using Param = fp8_e4m3;

  float global = 1.0f;  ///< at least 2^-100

  /// The global scale for values of magnitude up to amax.
  KVF_INLINE KVF_HD static constexpr Nvfp4 calibrated(float amax) {
    Nvfp4 quant;
    quant.global = amax > 0x1p-88f ? amax / (6.0f * 448.0f) : 1.0f;  // smaller ones are as good as 0
    return quant;
  }

  KVF_INLINE KVF_HD Param fit(std::uint32_t amax) const {
    if (amax >= 0x7f800000u) return Param(detail::quiet_nan);
    return Param(detail::float_of(amax) * detail::inverse(6.0f * global));
  }
  KVF_INLINE KVF_HD float scale(Param param) const { return static_cast<float>(param) * global; }
};
static_assert(QuantPolicy<Nvfp4>);

/// Blocks of 32 dims with a power of two as scale, 2^(floor(log2 amax) - 2): values in (6, 8) scales are
/// clamped to 6. A block with a non-finite value decodes to NaN.
/// Source: OCP microscaling formats (MX) 1.0, section 6.3.
struct Mxfp4 : detail::Fp4Blocks<Mxfp4, 32> {
  using Param = e8m0;

  KVF_INLINE KVF_HD Param fit(std::uint32_t amax) const {
    if (amax >= 0x7f800000u) return Param::from_bits(0xff);
    const std::uint32_t exponent = amax >> 23;
    return Param::from_bits(static_cast<std::uint8_t>(exponent > 2 ? exponent - 2 : 0));
  }
  KVF_INLINE KVF_HD float scale(Param param) const { return static_cast<float>(param); }
};
static_assert(QuantPolicy<Mxfp4>);

}  // namespace kvfolia::inline KVF_ABI
