// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Splits one vector into parts that are coded differently: a latent in fp8, its rotary part in bf16.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <type_traits>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/quant/identity.hpp"

namespace kvfolia::inline KVF_ABI {

/// `Dims` neighbouring dims coded by Q. Their codes lie `Skip` bytes behind those of the section before:
/// room that an engine's own tokens have between them.
template <class Q, int Dims, int Skip = 0>
struct Section {
  static_assert(Q::seal_tokens == 1, "sections are coded token by token");
  static_assert(!rotates<Q>, "a section cannot be rotated on its own");
  static_assert(Dims > 0 && Skip >= 0);
  using Quant = Q;
  static constexpr int dims = Dims;
  static constexpr int skip = Skip;
  static constexpr int group = Q::group_dims == 0 ? Dims : std::gcd(Q::group_dims, Dims);

  Q quant{};
};

template <class... S>
struct Sections;

template <>
struct Sections<> {
  static constexpr int code_alignment = 1;
  static constexpr int param_alignment = 1;
  static constexpr int dims = 0;
  static constexpr int group_dims = 0;
  static constexpr Affine affine{};
};

/// A token's codes lie behind one another, section by section, and so do its parameters. Needs an
/// element order that can be strided. Exact pages are those of the first section's quantizer.
template <class First, class... Rest>
struct Sections<First, Rest...> {
  using Q = typename First::Quant;
  using Others = Sections<Rest...>;
  using Exact = typename Q::Exact;
  static constexpr int seal_tokens = 1;
  static constexpr int code_bits = 8;  ///< the unit of strides
  static constexpr int code_alignment = std::max(kvfolia::code_alignment<Q>(), Others::code_alignment);
  static constexpr int param_alignment = std::max(kvfolia::param_alignment<Q>(), Others::param_alignment);
  static constexpr int dims = First::dims + Others::dims;
  static constexpr int group_dims = std::gcd(First::group, Others::group_dims);
  static constexpr Affine affine{.token_scale = Q::affine.token_scale || Others::affine.token_scale,
                                 .token_offset = Q::affine.token_offset || Others::affine.token_offset};

  static constexpr bool is_last = sizeof...(Rest) == 0;

  First first{};
  Others rest{};

  /// Where the codes and parameters of the other sections begin, behind those of a token's first one.
  KVF_INLINE KVF_HD static constexpr int first_bytes() {
    return First::skip + kvfolia::code_bytes<Q>(First::dims);
  }
  KVF_INLINE KVF_HD static constexpr std::int64_t first_param_bytes() {
    return (Q::param_bytes(First::dims, 1) + 3) / 4 * 4;
  }

  /// Every section and every token must begin where its elements may.
  KVF_INLINE KVF_HD static constexpr bool fits(int n) {
    const bool first_fits = n == dims && kvfolia::fits<Q>(First::dims) && First::skip % code_alignment == 0 &&
                            first_bytes() % code_alignment == 0 && code_bytes(n) % code_alignment == 0;
    if constexpr (sizeof...(Rest) == 0)
      return first_fits;
    else
      return first_fits && Others::fits(Others::dims);
  }
  KVF_INLINE KVF_HD static constexpr int code_bytes(int /*dims*/) {
    if constexpr (sizeof...(Rest) == 0)
      return first_bytes();
    else
      return first_bytes() + Others::code_bytes(Others::dims);
  }
  KVF_INLINE KVF_HD static constexpr std::int64_t param_bytes(int /*dims*/, int page_tokens) {
    if constexpr (sizeof...(Rest) == 0)
      return page_tokens * first_param_bytes();
    else
      return page_tokens * first_param_bytes() + Others::param_bytes(Others::dims, page_tokens);
  }

  template <class Tile, class Values>
  KVF_INLINE KVF_HD void encode(Tile tile, int slot, int tokens, Values values) const {
    first.quant.encode(first_tile(tile), slot, tokens, values);
    if constexpr (sizeof...(Rest) > 0)
      rest.encode(rest_tile(tile), slot, tokens, [&](int t, int d) { return values(t, d + First::dims); });
  }
  template <class Tile>
  KVF_INLINE KVF_HD void codes(Tile tile, int slot, float* codes) const {
    first.quant.codes(first_tile(tile), slot, codes);
    if constexpr (sizeof...(Rest) > 0) rest.codes(rest_tile(tile), slot, codes + First::dims);
  }
  template <class Tile>
  KVF_INLINE KVF_HD float token_scale(Tile tile, int slot, int group) const {
    const int dim = group * group_dims;
    return section_scale(tile, slot, dim);
  }
  template <class Tile>
  KVF_INLINE KVF_HD float token_offset(Tile tile, int slot, int group) const {
    const int dim = group * group_dims;
    return section_offset(tile, slot, dim);
  }
  template <class Tile>
  KVF_INLINE KVF_HD void decode(Tile tile, int slot, float* values) const {
    first.quant.decode(first_tile(tile), slot, values);
    if constexpr (sizeof...(Rest) > 0) rest.decode(rest_tile(tile), slot, values + First::dims);
  }

 private:
  template <class... S>
  friend struct Sections;

  template <class Tile>
  KVF_INLINE KVF_HD static Tile first_tile(Tile tile) {
    static_assert(detail::always_strided<Tile>, "sections need an order that can be strided: SlotMajor");
    tile.codes += First::skip;
    tile.dims = First::dims;
    return tile;
  }
  template <class Tile>
  KVF_INLINE KVF_HD static Tile rest_tile(Tile tile) {
    tile.codes += first_bytes();
    tile.params += first_param_bytes();
    tile.dims -= First::dims;
    return tile;
  }

  /// The factor of the section that dimension `dim` is in: 1 where that has none.
  template <class Tile>
  KVF_INLINE KVF_HD float section_scale(Tile tile, int slot, int dim) const {
    if (dim < First::dims) {
      if constexpr (Q::affine.token_scale)
        return first.quant.token_scale(first_tile(tile), slot, Q::group_dims == 0 ? 0 : dim / Q::group_dims);
      return 1.0f;
    }
    if constexpr (sizeof...(Rest) > 0) return rest.section_scale(rest_tile(tile), slot, dim - First::dims);
    return 1.0f;
  }
  template <class Tile>
  KVF_INLINE KVF_HD float section_offset(Tile tile, int slot, int dim) const {
    if (dim < First::dims) {
      if constexpr (Q::affine.token_offset)
        return first.quant.token_offset(first_tile(tile), slot, Q::group_dims == 0 ? 0 : dim / Q::group_dims);
      return 0.0f;
    }
    if constexpr (sizeof...(Rest) > 0) return rest.section_offset(rest_tile(tile), slot, dim - First::dims);
    return 0.0f;
  }
};

static_assert(QuantPolicy<Sections<Section<Identity<float>, 64>, Section<Identity<bf16>, 64>>>);

}  // namespace kvfolia::inline KVF_ABI
