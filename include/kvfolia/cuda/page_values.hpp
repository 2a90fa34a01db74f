// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Single values of pages, read and decoded by a thread: for work that is done once a page, not once a query.

#include <cstddef>
#include <cstdint>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/quant/code_kind.hpp"
#include "kvfolia/quant/ggml.hpp"
#include "kvfolia/quant/sections.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

/// A tile in slot-major order whose elements come by way of a context, as values.
template <class Ctx>
struct LoadedTile {
  Ctx& ctx;
  const std::byte* codes;
  const std::byte* params;
  int dims;
  int page_tokens;
  std::int64_t code_stride;
  std::int64_t param_stride;

  KVF_INLINE KVF_HD LoadedTile(Ctx& c, const PlaneView& of_codes, const PlaneView& of_params, PageId page,
                               int head, int d, int tokens)
      : ctx(c),
        codes(of_codes.tile(page, head)),
        params(of_params.tile(page, head)),
        dims(d),
        page_tokens(tokens),
        code_stride(of_codes.slot_stride),
        param_stride(of_params.slot_stride) {}

  template <class T>
  KVF_INLINE KVF_HD T code(int slot, int dim) const {
    return ctx.load(reinterpret_cast<const T*>(codes + slot * code_stride) + dim);
  }
  KVF_INLINE KVF_HD std::uint8_t code_byte(int slot, int byte) const {
    return ctx.load(reinterpret_cast<const std::uint8_t*>(codes + slot * code_stride) + byte);
  }
  template <class T>
  KVF_INLINE KVF_HD T param(int slot, int index = 0) const {
    return ctx.load(reinterpret_cast<const T*>(params + slot * param_stride) + index);
  }
  template <class T>
  KVF_INLINE KVF_HD T tile_param(std::int64_t index) const {
    return ctx.load(reinterpret_cast<const T*>(params) + index);
  }
};

template <class Q>
inline constexpr bool has_sections = false;
template <class... S>
inline constexpr bool has_sections<Sections<S...>> = true;

/// Whether kernels know how a quantizer's codes are to be read.
template <class Q>
inline constexpr bool is_known =
    kvfolia::detail::code_kind<Q> != kvfolia::detail::CodeKind::other || kvfolia::detail::is_ggml<Q>;
template <class First, class... Rest>
inline constexpr bool is_known<Sections<First, Rest...>> = is_known<typename First::Quant> &&
                                                           (is_known<typename Rest::Quant> && ...);

/// One number that a tile stores: what decode() gives for it, to the bit.
template <class Q, class Tile>
KVF_INLINE KVF_HD float stored_value(const Q& quant, Tile tile, int slot, int dim) {
  using kvfolia::detail::CodeKind;
  static_assert(is_known<Q>);
  if constexpr (has_sections<Q>) {
    using First = decltype(quant.first);
    tile.codes += First::skip;
    tile.dims = First::dims;
    if (dim < First::dims || quant.is_last) return stored_value(quant.first.quant, tile, slot, dim);
    if constexpr (!Q::is_last) {
      tile.codes += Q::first_bytes() - First::skip;
      tile.params += Q::first_param_bytes();
      return stored_value(quant.rest, tile, slot, dim - First::dims);
    }
    return 0.0f;
  } else {
    float code;
    if constexpr (kvfolia::detail::is_ggml<Q>) {
      code = Q::code(tile, slot, dim);
    } else {
      constexpr CodeKind kind = kvfolia::detail::code_kind<Q>;
      constexpr int bits = kvfolia::detail::kind_bits(kind);
      std::uint32_t word;
      if constexpr (bits == 32)
        word = tile.template code<std::uint32_t>(slot, dim);
      else if constexpr (bits == 16)
        word = tile.template code<std::uint16_t>(slot, dim);
      else if constexpr (bits == 8)
        word = tile.code_byte(slot, dim);
      else
        word = static_cast<std::uint32_t>(tile.code_byte(slot, dim / 2)) >> dim % 2 * 4 & 15u;
      code = kvfolia::detail::code_number<kind>(word);
    }
    const int group = Q::group_dims == 0 ? 0 : dim / (Q::group_dims == 0 ? 1 : Q::group_dims);
    float scale = 1.0f, offset = 0.0f;
    if constexpr (Q::affine.token_scale) scale = quant.token_scale(tile, slot, group);
    if constexpr (Q::affine.token_offset) offset = quant.token_offset(tile, slot, group);
    return affine_value(quant, tile, slot, dim, code, scale, offset);
  }
}

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
