// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What a tile knows of its tokens beside their codes.

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/decode_tiles.hpp"
#include "kvfolia/cuda/unpack.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

/// What a token's codes are multiplied by and what is added to them.
struct TokenFacts {
  std::int32_t position;  ///< -1: there is no token
  bool exact = false;     ///< is of a page of the exact format
  float key_scale = 1.0f;
  float key_offset = 0.0f;
  float log_value_scale = 0.0f;  ///< to base 2
  float inverse_value_scale = 1.0f;
  float value_offset = 0.0f;
};

template <class Side, class Q, class Ctx>
KVF_INLINE KVF_HD void read_facts(const Q& quant, const StagedParams<Ctx>& params, int token, float& scale,
                                  float& offset) {
  if constexpr (Q::affine.token_scale) scale = quant.token_scale(params, token, 0);
  if constexpr (Q::affine.token_offset) offset = quant.token_offset(params, token, 0);
  if constexpr (code_shift(Side::kind) != 0.0f) offset += code_shift(Side::kind) * scale;
}

/// Reads them from a stage of the ring.
template <class Shape, class Ctx, class Quant>
KVF_INLINE KVF_HD TokenFacts read_token(Ctx& ctx, const Quant& all_formats, SharedOffset stage, int token) {
  const auto at = stage + static_cast<SharedOffset>(token * 4);
  TokenFacts f{ctx.template load_shared<std::int32_t>(at + Shape::positions)};
  if constexpr (Shape::several_formats) {
    const TableEntry entry{ctx.template load_shared<std::int32_t>(at + Shape::entries)};
    f.exact = !entry.absent() && entry.format() != coded_format;
  }
  if (f.position < 0 || f.exact) return f;
  const StagedParams<Ctx> keys{ctx, stage + Shape::key_params, Shape::KeyShape::param_pitch};
  const StagedParams<Ctx> values{ctx, stage + Shape::value_params, Shape::ValueShape::param_pitch};
  const auto& quant = format_quant<coded_format>(all_formats);
  read_facts<typename Shape::KeyShape>(key_side(quant), keys, token, f.key_scale, f.key_offset);
  float scale = 1.0f;
  read_facts<typename Shape::ValueShape>(value_side(quant), values, token, scale, f.value_offset);
  if constexpr (Shape::value_scale) {
    // Where a scale is 0 all codes are 0: any other does as well, and has a logarithm.
    f.log_value_scale = Ctx::log2(scale == 0.0f ? 0x1p-24f : scale);
    f.inverse_value_scale = Ctx::exp2(-f.log_value_scale);
  }
  return f;
}

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
