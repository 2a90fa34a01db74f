// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Rows that are no operands of mma as they lie in pages: floats, scales between codes, groups that end within
// a chunk. A warp makes fp16 of them when a tile has come, element by element.

#include <cstdint>
#include <type_traits>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/fp16.hpp"
#include "kvfolia/core/rounding.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/decode_channels.hpp"
#include "kvfolia/cuda/decode_shape.hpp"
#include "kvfolia/cuda/decode_tiles.hpp"
#include "kvfolia/cuda/unpack.hpp"
#include "kvfolia/quant/code_kind.hpp"
#include "kvfolia/quant/ggml.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

/// A side's rows of a stage, as numbers.
template <class Ctx, class Side>
class StagedRows {
 public:
  using Quant = typename Side::Quant;

  KVF_INLINE KVF_HD StagedRows(Ctx& ctx, const Quant& quant, SharedOffset codes, SharedOffset params)
      : ctx_(ctx), quant_(quant), codes_(codes), params_(params) {}

  /// Makes fp16 of so many rows, of a pitch; called by all of a warp.
  KVF_INLINE KVF_HD void expand(int tokens, SharedOffset to, int pitch) {
    KVF_NO_UNROLL
    for (int i = ctx_.lane(); i < tokens * (Side::dims / 2); i += warp_size) {
      const int token = i / (Side::dims / 2), dim = i % (Side::dims / 2) * 2;
      ctx_.store_shared(to + static_cast<SharedOffset>(token * pitch + dim * 2),
                        Ctx::pack_fp16x2(clamped(value(token, dim)), clamped(value(token, dim + 1))));
    }
    ctx_.sync_warp();
  }

 private:
  /// As fp16 pages hold it.
  KVF_INLINE KVF_HD static float clamped(float x) {
    return kvfolia::detail::is_finite(x) ? kvfolia::detail::clamp_to_fp16(x) : x;
  }
  KVF_INLINE KVF_HD float value(int token, int dim) {
    const SharedOffset row = codes_ + static_cast<SharedOffset>(token * Side::pitch);
    if constexpr (Side::kind == CodeKind::fp32) {
      return ctx_.template load_shared<float>(row + static_cast<SharedOffset>(dim * 4));
    } else if constexpr (is_ggml<Quant>) {
      const SharedOffset block = row + static_cast<SharedOffset>(dim / 32 * Quant::block_bytes);
      const std::uint32_t scale = byte(block) | byte(block + 1) << 8;
      const auto at = block + 2 + static_cast<SharedOffset>(dim % 32);
      float code;
      if constexpr (std::is_base_of_v<Q8_0, Quant>)
        code = static_cast<float>(static_cast<std::int8_t>(byte(at)));
      else
        code = static_cast<float>(static_cast<int>(dim % 32 < 16 ? byte(at) & 15u : byte(at - 16) >> 4) - 8);
      return half_of(scale, 0) * code;
    } else {
      constexpr int per_byte = 8 / kind_bits(Side::kind);
      constexpr std::uint32_t mask = kind_bits(Side::kind) == 4 ? 15u : 0xffu;
      const std::uint32_t bits = byte(row + static_cast<SharedOffset>(dim / per_byte)) >> dim % per_byte * 4;
      const StagedParams<Ctx> params{ctx_, params_, ParamShape<Side>::pitch};
      const int group = dim / Quant::group_dims;
      float scale = 1.0f, offset = 0.0f;
      if constexpr (Quant::affine.token_scale) scale = quant_.token_scale(params, token, group);
      if constexpr (Quant::affine.token_offset) offset = quant_.token_offset(params, token, group);
      return scale * kvfolia::detail::code_number<Side::kind>(bits & mask) + offset;
    }
  }
  /// Words are read whole, whatever is taken of them.
  KVF_INLINE KVF_HD std::uint32_t byte(SharedOffset at) {
    return ctx_.template load_shared<std::uint32_t>(at & ~3u) >> at % 4 * 8 & 0xffu;
  }

  Ctx& ctx_;
  const Quant& quant_;
  const SharedOffset codes_;
  const SharedOffset params_;
};

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
