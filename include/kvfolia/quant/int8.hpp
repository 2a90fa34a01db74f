// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Symmetric 8-bit codes with one scale a token, or one a group of its dims.

#include <cstdint>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/fp16.hpp"
#include "kvfolia/core/rounding.hpp"
#include "kvfolia/core/tile.hpp"
#include "kvfolia/quant/identity.hpp"

namespace kvfolia::inline KVF_ABI {

/// scale = amax / 127 rounded to fp16, code = round(x * (1 / scale)) to nearest even in [-127, 127], for
/// every `Group` neighbouring dims of a token; 0 is all of them. |decode(encode(x)) - x| <= scale / 2 up
/// to rounding, for amax up to 127 * 65504; larger values are clamped to that. A group with a
/// non-finite value decodes to NaN.
template <int Group>
struct Int8Groups {
  static_assert(Group >= 0, "a group has at least one dim; 0 is all of them");
  using Exact = Identity<fp16>;
  using Code = std::int8_t;
  struct Param {
    fp16 scale;
  };
  static constexpr int seal_tokens = 1;
  static constexpr int code_bits = 8;
  static constexpr int group_dims = Group;
  static constexpr Affine affine{.token_scale = true};

  KVF_INLINE KVF_HD static constexpr std::int64_t param_bytes(int dims, int page_tokens) {
    return std::int64_t{page_tokens} * group_count<Int8Groups>(dims) *
           static_cast<std::int64_t>(sizeof(Param));
  }

  /// The scale for values of magnitude up to amax.
  KVF_INLINE KVF_HD static constexpr fp16 fit(float amax) { return detail::fit_scale(amax, 127.0f, 0.5f); }

  template <class Tile, class Values>
  KVF_INLINE KVF_HD void encode(Tile tile, int slot, int tokens, Values values) const {
    for (int t = 0; t < tokens; ++t)
      for (int group = 0; group < group_count<Int8Groups>(tile.dims); ++group) {
        const int begin = group_begin<Int8Groups>(group), end = group_end<Int8Groups>(group, tile.dims);
        const std::uint32_t amax = detail::amax_bits(values, t, begin, end);
        const fp16 scale = fit(detail::float_of(amax));
        tile.template param<Param>(slot + t, group) = Param{scale};
        const float inverse = amax < 0x7f800000u ? detail::inverse(static_cast<float>(scale)) : 0.0f;
        for (int d = begin; d < end; ++d)
          tile.template code<Code>(slot + t, d) =
              static_cast<Code>(detail::round_code(values(t, d) * inverse, -127.0f, 127.0f));
      }
  }

  template <class Tile>
  KVF_INLINE KVF_HD void codes(Tile tile, int slot, float* codes) const {
    for (int d = 0; d < tile.dims; ++d) codes[d] = static_cast<float>(tile.template code<Code>(slot, d));
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

/// One scale a token and head.
using Int8 = Int8Groups<0>;

static_assert(QuantPolicy<Int8> && QuantPolicy<Int8Groups<32>>);
static_assert(Int8::fit(0.0f).bits == 0 && Int8::fit(1e-30f).bits == 1);

}  // namespace kvfolia::inline KVF_ABI
