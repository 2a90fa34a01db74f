// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What a tile knows of its tokens beside their codes.

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/decode_shape.hpp"
#include "kvfolia/cuda/decode_tiles.hpp"
#include "kvfolia/cuda/unpack.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

/// What a token is, and what its values' weights are multiplied by.
struct TokenFacts {
  std::int32_t position;         ///< -1: there is no token
  bool exact = false;            ///< is of a page of the exact format
  float log_value_scale = 0.0f;  ///< of its largest group, to base 2
  float inverse_value_scale = 1.0f;
};

/// What a group of a token's codes, as they are unpacked, is multiplied by, and what is added then.
struct GroupParams {
  float scale = 1.0f;
  float offset = 0.0f;
};

/// One side's, from a stage of the ring. Tokens that are not there, or not coded, have zeros there.
template <class Side, class Ctx, class Q>
KVF_INLINE KVF_HD GroupParams read_group(Ctx& ctx, const Q& quant, SharedOffset params, int token,
                                         int group) {
  constexpr float shift = code_shift(Side::kind);
  const StagedParams<Ctx> staged{ctx, params, ParamShape<Side>::pitch};
  GroupParams p;
  if constexpr (Q::affine.token_scale) p.scale = quant.token_scale(staged, token, group);
  if constexpr (Q::affine.token_offset) p.offset = quant.token_offset(staged, token, group);
  if constexpr (shift != 0.0f) p.offset += shift * p.scale;
  return p;
}

template <class Shape, class Ctx, class Quant>
KVF_INLINE KVF_HD TokenFacts read_token(Ctx& ctx, const Quant& quant, SharedOffset stage, int token) {
  const auto at = stage + static_cast<SharedOffset>(token * 4);
  TokenFacts f{ctx.template load_shared<std::int32_t>(at + Shape::positions)};
  if constexpr (Shape::several_formats) {
    const TableEntry entry{ctx.template load_shared<std::int32_t>(at + Shape::entries)};
    f.exact = !entry.absent() && entry.format() != coded_format;
  }
  if constexpr (Shape::value_scale) {
    if (f.position < 0 || f.exact) return f;
    float largest = 0.0f;
    KVF_UNROLLED (group, Shape::ValueShape::groups) {
      const float scale =
          read_group<typename Shape::ValueShape>(ctx, value_side(format_quant<coded_format>(quant)),
                                                 stage + Shape::value_params, token, group)
              .scale;
      // NaN stays: it makes all of the token's weights NaN.
      if (!(scale <= largest)) largest = scale;
    }
    // Where all scales are 0 all codes are 0: any other does as well, and has a logarithm.
    f.log_value_scale = Ctx::log2(largest == 0.0f ? 0x1p-24f : largest);
    f.inverse_value_scale = Ctx::exp2(-f.log_value_scale);
  }
  return f;
}

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
