// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Symmetric 8-bit codes with one scale a token and head.

#include <cstdint>

#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/fp16.hpp"
#include "kvfolia/core/tile.hpp"
#include "kvfolia/quant/identity.hpp"

namespace kvfolia::inline KVF_ABI {

/// scale = amax / 127 rounded to fp16, code = round(x * (1 / scale)) to nearest even in [-127, 127].
/// |decode(encode(x)) - x| <= scale / 2 up to rounding, for amax up to 127 * 65504; larger values
/// are clamped to that. A token with a non-finite value decodes to NaN in all dims.
struct Int8 {
  using Exact = Identity<fp16>;
  using Code = std::int8_t;
  struct Param {
    fp16 scale;
  };
  static constexpr int seal_tokens = 1;
  static constexpr int code_bits = 8;
  static constexpr Axis key_axis = Axis::token;
  static constexpr Axis value_axis = Axis::token;

  KVF_HD static constexpr std::int64_t param_bytes(int /*dims*/, int page_tokens) {
    return std::int64_t{page_tokens} * static_cast<std::int64_t>(sizeof(Param));
  }

  /// The scale for values of magnitude up to amax; NaN for a non-finite amax. A scale so small that
  /// fp16 would round it down by more than half a code is rounded up, so that no code is clamped.
  KVF_INLINE KVF_HD static constexpr fp16 fit(float amax) {
    constexpr std::uint16_t nan = 0x7e00;
    constexpr std::uint16_t largest = 0x7bff;
    if (!(amax <= 3.40282347e+38f)) return fp16::from_bits(nan);
    const fp16 scale(amax * (1.0f / 127.0f));
    if (scale.bits > largest) return fp16::from_bits(largest);
    const bool clamps = static_cast<float>(scale) * 127.5f < amax;
    return fp16::from_bits(static_cast<std::uint16_t>(scale.bits + (clamps ? 1 : 0)));
  }

  template <class Order>
  KVF_INLINE KVF_HD void encode(const Tile<Order, std::byte>& tile, int slot, int tokens,
                                const float* values) const {
    const int dims = tile.shape.dims;
    for (int t = 0; t < tokens; ++t) {
      const float* x = values + std::int64_t{t} * dims;
      float amax = 0.0f;
      bool finite = true;
      for (int d = 0; d < dims; ++d) {
        const float magnitude = x[d] < 0.0f ? -x[d] : x[d];
        finite = finite && magnitude <= 3.40282347e+38f;
        amax = magnitude > amax ? magnitude : amax;
      }
      const fp16 scale = fit(finite ? amax : __builtin_bit_cast(float, 0x7fc00000u));
      tile.template param<Param>(slot + t).scale = scale;
      // The only division: a compiler that may use reciprocals finds none to replace.
      const float inverse = 1.0f / static_cast<float>(scale);
      for (int d = 0; d < dims; ++d)
        tile.template code<Code>(slot + t, d) = amax > 0.0f && finite ? round_code(x[d] * inverse) : Code{0};
    }
  }

  template <class Order, class Byte>
  KVF_INLINE KVF_HD void decode(const Tile<Order, Byte>& tile, int slot, float* values) const {
    const float scale = static_cast<float>(tile.template param<Param>(slot).scale);
    for (int d = 0; d < tile.shape.dims; ++d)
      values[d] = static_cast<float>(tile.template code<Code>(slot, d)) * scale;
  }

 private:
  /// To nearest, ties to even, in integers: no compiler flag reassociates those.
  KVF_INLINE KVF_HD static constexpr Code round_code(float x) {
    const float clamped = x < -127.0f ? -127.0f : x > 127.0f ? 127.0f : x;
    const auto whole = static_cast<std::int32_t>(clamped);
    const float rest = clamped - static_cast<float>(whole);
    const float half = (whole & 1) != 0 ? 0.49999997f : 0.5f;  // an odd number gives a tie away
    return static_cast<Code>(whole + (rest > half ? 1 : 0) - (rest < -half ? 1 : 0));
  }
};
static_assert(QuantPolicy<Int8>);
static_assert(Int8::fit(0.0f).bits == 0 && Int8::fit(1e-30f).bits == 1);

}  // namespace kvfolia::inline KVF_ABI
