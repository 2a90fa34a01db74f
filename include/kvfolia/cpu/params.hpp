// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Parameters of tokens and channels as arrays of floats, so that they can be folded a vector at a time.

#include <cstdint>
#include <type_traits>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/fp16.hpp"
#include "kvfolia/cpu/simd.hpp"
#include "kvfolia/cpu/target.hpp"
#include "kvfolia/quant/centered.hpp"
#include "kvfolia/quant/int4.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

/// The quantizer and the tile that hold the parameters of tokens: a centred one's are the inner one's.
template <class Q, class Tile, class F>
KVF_INLINE decltype(auto) visit_token_params(const Q& quant, const Tile& tile, F&& f) {
  if constexpr (requires { Q::inner_tile(tile); })
    return f(quant.inner, Q::inner_tile(tile));
  else
    return f(quant, tile);
}

/// fp16 scales a group each, and fp16 scales and mins.
template <class Q>
concept HalfScales = requires {
  requires std::is_same_v<decltype(Q::Param::scale), fp16>;
}
&&Q::affine.token_scale && sizeof(typename Q::Param) == (Q::affine.token_offset ? 4 : 2);

KVF_INLINE void store_scale_min(Uint32s both, float* scales, float* offsets) {
  const Uint32Tag u;
  store(floats_of_half_bits(hn::And(both, hn::Set(u, 0xffffu))), scales);
  store(floats_of_half_bits(hn::ShiftRight<16>(both)), offsets);
}

/// ScaleMins of `count` tokens that lie behind one another, Groups each: gives how many were read, whole
/// vectors.
template <int Groups>
int read_scale_mins(const std::byte* at, int count, float* scales, float* offsets, std::int64_t stride) {
  const Uint32Tag u;
  const auto* words = reinterpret_cast<const std::uint32_t*>(at);
  int i = 0;
  for (; i + lanes <= count; i += lanes, words += Groups * lanes) {
    Uint32s group[4];
    if constexpr (Groups == 1) group[0] = hn::LoadU(u, words);
    if constexpr (Groups == 2) hn::LoadInterleaved2(u, words, group[0], group[1]);
    if constexpr (Groups == 3) hn::LoadInterleaved3(u, words, group[0], group[1], group[2]);
    if constexpr (Groups == 4) hn::LoadInterleaved4(u, words, group[0], group[1], group[2], group[3]);
    unroll<Groups>([&](auto g) KVF_INLINE_LAMBDA {
      store_scale_min(group[g], scales + g * stride + i, offsets + g * stride + i);
    });
  }
  return i;
}

/// scales[group * stride + t] and offsets[...] of `count` slots.
template <class Q, class Tile>
void read_token_params(const Q& quant, const Tile& tile, int slot, int count, float* scales, float* offsets,
                       std::int64_t stride) {
  visit_token_params(quant, tile, [&](const auto& q, const auto& t) {
    using Inner = std::remove_cvref_t<decltype(q)>;
    const int groups = group_count<Inner>(t.dims);
    const std::byte* at = t.params + slot * t.param_stride;
    int done = 0;
    if constexpr (HalfScales<Inner> && Inner::affine.token_offset) {
      if (t.param_stride == groups * std::int64_t{4}) {
        if (groups == 1) done = read_scale_mins<1>(at, count, scales, offsets, stride);
        if (groups == 2) done = read_scale_mins<2>(at, count, scales, offsets, stride);
        if (groups == 3) done = read_scale_mins<3>(at, count, scales, offsets, stride);
        if (groups == 4) done = read_scale_mins<4>(at, count, scales, offsets, stride);
      }
    } else if constexpr (HalfScales<Inner>) {
      if (groups == 1 && t.param_stride == sizeof(fp16))
        for (; done + lanes <= count; done += lanes)
          store(load_floats(reinterpret_cast<const fp16*>(at) + done), scales + done);
    }
    for (int group = 0; group < groups; ++group)
      for (int i = done; i < count; ++i) {
        if constexpr (Inner::affine.token_scale)
          scales[group * stride + i] = q.token_scale(t, slot + i, group);
        if constexpr (Inner::affine.token_offset)
          offsets[group * stride + i] = q.token_offset(t, slot + i, group);
      }
  });
}

/// scales[d] and offsets[d] of the block that a slot is in.
template <class Q, class Tile>
void read_channel_params(const Q& quant, const Tile& tile, int slot, float* scales, float* offsets) {
  int d = 0;
  if constexpr (requires { Q::channel_params(tile, slot); }) {
    const auto* params = Q::channel_params(tile, slot);
    if constexpr (std::is_same_v<decltype(params), const ScaleMin*>) {
      for (; d + lanes <= tile.dims; d += lanes)
        store_scale_min(load_as<std::uint32_t>(params + d), scales + d, offsets + d);
    } else {
      static_assert(std::is_same_v<decltype(params), const fp16*> && !Q::affine.channel_scale);
      for (; d + lanes <= tile.dims; d += lanes) store(load_floats(params + d), offsets + d);
    }
  }
  for (; d < tile.dims; ++d) {
    if constexpr (Q::affine.channel_scale) scales[d] = quant.channel_scale(tile, slot, d);
    if constexpr (Q::affine.channel_offset) offsets[d] = quant.channel_offset(tile, slot, d);
  }
}

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
