// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Pages' slots as floats: what many queries share is decoded once, and what no kernel reads in place is
// decoded for it.

#include <algorithm>
#include <cstdint>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/cpu/codes.hpp"
#include "kvfolia/cpu/params.hpp"
#include "kvfolia/cpu/simd.hpp"
#include "kvfolia/cpu/target.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

/// Whether a token's codes can be read in place, a vector of dims at a time.
template <class Q, class Order, int Dims>
inline constexpr bool reads_tokens = has_vectors&& Order::strided&& code_kind<Q> !=
                                         CodeKind::other&& Dims % lanes == 0 &&
                                     (kind_bits(code_kind<Q>) > 4 || Dims % 8 == 0) &&
                                     (Q::group_dims == 0 || Q::group_dims % lanes == 0);

/// Tokens of a panel of keys.
inline constexpr int panel_tokens = 32;

/// Decodes the first Dims dims of `count` slots of one block into rows, to[t * stride + d]; all dims of the
/// tile where its quantizer reads no part of them. `channels` has room for two floats a dim.
template <class Order, int Dims, class Q, class Tile>
void unpack_rows(const Q& quant, const Tile& tile, int slot, int count, float* to, std::int64_t stride,
                 float* channels) {
  if constexpr (reads_tokens<Q, Order, Dims>) {
    constexpr Affine has = Q::affine;
    float* channel_scale = channels;
    float* channel_offset = channels + tile.dims;
    if constexpr (has_channels<Q>) read_channel_params(quant, tile, slot, channel_scale, channel_offset);
    for (int t = 0; t < count; ++t) {
      const std::byte* codes = tile.codes + (slot + t) * tile.code_stride;
      for (int group = 0; group < group_count<Q>(Dims); ++group) {
        Floats scale = broadcast(1.0f), offset = zeros();
        if constexpr (has.token_scale) scale = broadcast(quant.token_scale(tile, slot + t, group));
        if constexpr (has.token_offset) offset = broadcast(quant.token_offset(tile, slot + t, group));
        for (int d = group_begin<Q>(group); d < group_end<Q>(group, Dims); d += lanes) {
          Floats x = load_codes<code_kind<Q>>(codes, d);
          if constexpr (has.channel_scale) x = hn::Mul(x, load(channel_scale + d));
          if constexpr (has.token_scale || has.token_offset) x = hn::MulAdd(x, scale, offset);
          if constexpr (has.channel_offset) x = hn::Add(x, load(channel_offset + d));
          store(x, to + t * stride + d);
        }
      }
    }
  } else {
    for (int t = 0; t < count; ++t) quant.decode(tile, slot + t, to + t * stride);
  }
}

/// f(slot, count) for the parts of [slot, slot + count) that lie in one block.
template <class Q, class F>
KVF_INLINE void each_block(int slot, int count, F&& f) {
  if constexpr (!has_channels<Q>) {
    f(slot, count);
  } else {
    for (const int end = slot + count; slot < end;) {
      const int until = std::min(end, (slot / Q::seal_tokens + 1) * Q::seal_tokens);
      f(slot, until - slot);
      slot = until;
    }
  }
}

#if HWY_TARGET != HWY_SCALAR
/// Four neighbouring floats each of every fourth row, side by side.
template <class D>
KVF_INLINE hn::Vec<D> load_blocks(D d, const float* at, std::int64_t stride) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    return hn::LoadU(d, at);
  } else {
    const hn::Half<D> half;
    constexpr int rows = static_cast<int>(hn::MaxLanes(D())) / 2;
    return hn::Combine(d, load_blocks(half, at + rows * stride, stride), load_blocks(half, at, stride));
  }
}

/// Four neighbouring floats of `lanes` rows, as four vectors of those rows.
KVF_INLINE void load_transposed(const float* rows, std::int64_t stride, Floats (&dims)[4]) {
  const FloatTag f;
  const hn::RepartitionToWide<FloatTag> pairs;
  Floats r[4];
  unroll<4>([&](auto i) KVF_INLINE_LAMBDA { r[i] = load_blocks(f, rows + i * stride, stride); });
  const auto wide = [&](Floats x) KVF_INLINE_LAMBDA { return hn::BitCast(pairs, x); };
  const auto low01 = wide(hn::InterleaveLower(f, r[0], r[1])),
             low23 = wide(hn::InterleaveLower(f, r[2], r[3]));
  const auto high01 = wide(hn::InterleaveUpper(f, r[0], r[1])),
             high23 = wide(hn::InterleaveUpper(f, r[2], r[3]));
  dims[0] = hn::BitCast(f, hn::InterleaveLower(pairs, low01, low23));
  dims[1] = hn::BitCast(f, hn::InterleaveUpper(pairs, low01, low23));
  dims[2] = hn::BitCast(f, hn::InterleaveLower(pairs, high01, high23));
  dims[3] = hn::BitCast(f, hn::InterleaveUpper(pairs, high01, high23));
}
#endif

/// Turns `count` rows into the first columns of a panel, [dim][panel_tokens]. Rows have whole vectors of
/// four.
inline void transpose(const float* rows, std::int64_t stride, int count, int dims, float* panel) {
  int t = 0;
#if HWY_TARGET != HWY_SCALAR
  for (; t + lanes <= count; t += lanes)
    for (int d = 0; d < dims; d += 4) {
      Floats columns[4];
      load_transposed(rows + t * stride + d, stride, columns);
      for (int i = 0; i < 4 && d + i < dims; ++i) store(columns[i], panel + (d + i) * panel_tokens + t);
    }
#endif
  for (; t < count; ++t)
    for (int d = 0; d < dims; ++d) panel[d * panel_tokens + t] = rows[t * stride + d];
}

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
