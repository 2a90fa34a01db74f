// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// How codes become values: which factors and offsets a quantizer has, so that kernels may fold them.

#include "kvfolia/core/config.hpp"

namespace kvfolia::inline KVF_ABI {

/// The pieces that are there, of
///
///   value[t][d] = channel_scale[d] * token_scale[t][g] * code[t][d] + token_offset[t][g] + channel_offset[d]
///
/// where g = d / group_dims, and the channels' pieces hold for the seal_tokens slots of a block. Folded,
/// none of them costs a multiplication per element: the channels' scales go into the query, its product
/// with their offsets is formed once a block; a token's scale goes onto the partial score of a group, or
/// the probability, and its offset meets the sum of the group's queries.
struct Affine {
  bool token_scale = false;
  bool token_offset = false;
  bool channel_scale = false;
  bool channel_offset = false;
};

/// Whether blocks of tokens have parameters for every channel.
template <class Q>
inline constexpr bool has_channels = Q::affine.channel_scale || Q::affine.channel_offset;

/// How many groups of dims have parameters of their own.
template <class Q>
KVF_INLINE KVF_HD constexpr int group_count(int dims) {
  if constexpr (Q::group_dims == 0)
    return 1;
  else
    return (dims + Q::group_dims - 1) / Q::group_dims;
}
/// The dims of a group; the last one may be shorter.
template <class Q>
KVF_INLINE KVF_HD constexpr int group_begin(int group) {
  return group * Q::group_dims;
}
template <class Q>
KVF_INLINE KVF_HD constexpr int group_end(int group, int dims) {
  const int end = (group + 1) * Q::group_dims;
  return Q::group_dims == 0 || end > dims ? dims : end;
}

/// A code's value, from the factor and the offset of its token's group: rounded once an operation, with fused
/// multiply-adds, so that every compiler gives the same bits.
template <class Q, class Tile>
KVF_INLINE KVF_HD float affine_value(const Q& quant, Tile tile, int slot, int dim, float code,
                                     float token_scale, float token_offset) {
  constexpr Affine has = Q::affine;
  float scale = token_scale;
  if constexpr (has.channel_scale)
    scale =
        has.token_scale ? quant.channel_scale(tile, slot, dim) * scale : quant.channel_scale(tile, slot, dim);
  if constexpr (has.token_offset) {
    const float value = __builtin_fmaf(scale, code, token_offset);
    if constexpr (has.channel_offset)
      return value + quant.channel_offset(tile, slot, dim);
    else
      return value;
  } else if constexpr (has.channel_offset) {
    return __builtin_fmaf(scale, code, quant.channel_offset(tile, slot, dim));
  } else if constexpr (has.token_scale || has.channel_scale) {
    return code * scale;
  } else {
    return code;
  }
}

/// Values from codes and parameters, what a quantizer's decode() does.
template <class Q, class Tile>
KVF_INLINE KVF_HD void decode_affine(const Q& quant, Tile tile, int slot, float* values) {
  constexpr Affine has = Q::affine;
  quant.codes(tile, slot, values);
  for (int group = 0; group < group_count<Q>(tile.dims); ++group) {
    float token_scale = 1.0f, token_offset = 0.0f;
    if constexpr (has.token_scale) token_scale = quant.token_scale(tile, slot, group);
    if constexpr (has.token_offset) token_offset = quant.token_offset(tile, slot, group);
    for (int d = group_begin<Q>(group); d < group_end<Q>(group, tile.dims); ++d)
      values[d] = affine_value(quant, tile, slot, d, values[d], token_scale, token_offset);
  }
}

}  // namespace kvfolia::inline KVF_ABI
