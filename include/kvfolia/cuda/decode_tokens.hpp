// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What a tile knows of its tokens beside their codes.

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/decode_shape.hpp"
#include "kvfolia/cuda/decode_tiles.hpp"
#include "kvfolia/cuda/unpack.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

/// What a token is, and what its values' weights are multiplied by. Exact ones have none of that.
struct TokenFacts {
  std::int32_t position;         ///< -1: there is no token
  float log_value_scale = 0.0f;  ///< of its largest group, to base 2
  float inverse_value_scale = 1.0f;
  float value_offset = 0.0f;  ///< of all dims, where they are one group
};

/// What a group of a token's codes, as they are unpacked, is multiplied by, and what is added then.
struct GroupParams {
  float scale = 1.0f;
  float offset = 0.0f;
};

/// What has the parameters of tokens: Centered keeps another's beside means.
template <class Q>
KVF_INLINE KVF_HD constexpr const auto& token_quant(const Q& quant) {
  if constexpr (requires { quant.inner; })
    return quant.inner;
  else
    return quant;
}

/// One side's, from a stage of the ring. Tokens that are not there, or not coded, have zeros there.
template <class Side, class Ctx>
KVF_INLINE KVF_HD GroupParams read_group(Ctx& ctx, const typename Side::Quant& quant, SharedOffset params,
                                         int token, int group) {
  const StagedParams<Ctx> staged{ctx, params, ParamShape<Side>::pitch};
  const auto& of_tokens = token_quant(quant);
  GroupParams p;
  if constexpr (has_fine_scales<typename Side::Quant>)
    p.scale = of_tokens.global;
  else if constexpr (Side::token_scale)
    p.scale = of_tokens.token_scale(staged, token, group);
  p.scale *= code_unit(Side::kind);
  if constexpr (Side::Quant::affine.token_offset) p.offset = of_tokens.token_offset(staged, token, group);
  if constexpr (Side::excess != 0 && Side::token_offset)
    p.offset -= static_cast<float>(Side::excess) * p.scale;
  return p;
}

template <class Shape, class Ctx, class Quant>
KVF_INLINE KVF_HD TokenFacts read_token(Ctx& ctx, const Quant& quant, SharedOffset stage, int token) {
  using Side = typename Shape::ValueShape;
  TokenFacts f{ctx.template load_shared<std::int32_t>(stage + Shape::positions +
                                                      static_cast<SharedOffset>(token * 4))};
  const auto read = [&](auto& of_format, int group) {
    return read_group<Side>(ctx, value_side(of_format), stage + Shape::value_params, token, group);
  };
  if constexpr (Side::token_scale) {
    // NaN of one group stays, and makes the token's weights NaN; that of one of several is left to its group.
    const GroupParams first = read(format_quant<Shape::format>(quant), 0);
    float largest = Side::groups == 1 ? first.scale : Ctx::max(0.0f, first.scale);
    KVF_UNROLL
    for (int group = 1; group < Side::groups; ++group)
      largest = Ctx::max(largest, read(format_quant<Shape::format>(quant), group).scale);
    if (Side::groups == 1) f.value_offset = first.offset;
    // Where all scales are 0 all codes are 0: any other does as well, and has a logarithm. Smaller ones than
    // 2^-100, which only floats are, would take weights beyond the range of float.
    if (largest == 0.0f) largest = 0x1p-24f;
    if (Side::has_tiny_scales && largest < 0x1p-100f) largest = 0x1p-100f;
    f.log_value_scale = Ctx::log2(largest);
    f.inverse_value_scale = Ctx::exp2(-f.log_value_scale);
  } else if constexpr (Side::token_offset && Side::groups == 1) {
    f.value_offset = read(format_quant<Shape::format>(quant), 0).offset;
  }
  return f;
}

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
