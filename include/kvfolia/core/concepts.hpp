// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What a policy must have. Every requirement is a concept of its own, so that a compiler's message
// names the one that is missing.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/mask.hpp"
#include "kvfolia/core/tile.hpp"

namespace kvfolia::inline KVF_ABI {

/// As Layout::page_tokens: the page size is chosen when the cache is built.
inline constexpr int dynamic = 0;

namespace detail {

/// Stands for any element order where a concept has to name one.
struct AnyOrder {
  static constexpr int dim_multiple = 1;
  static constexpr int slot_multiple = 1;
  static constexpr bool strided = true;
  KVF_HD static constexpr std::int64_t index(int slot, int dim, TileShape shape) {
    return slot * shape.slot_stride + dim;
  }
};
using AnyTile = Tile<AnyOrder, std::byte>;
using AnyConstTile = Tile<AnyOrder, const std::byte>;

template <class P>
concept TriviallyCopyable = std::is_trivially_copyable_v<P>;

template <class O>
concept HasIndex = requires(int i, TileShape s) {
  { O::index(i, i, s) } -> std::same_as<std::int64_t>;
};
template <class O>
concept HasMultiples = requires {
  { O::dim_multiple } -> std::convertible_to<int>;
  { O::slot_multiple } -> std::convertible_to<int>;
  { O::strided } -> std::convertible_to<bool>;
};

template <class L>
concept HasKeyDim = requires {
  { L::key_dim } -> std::convertible_to<int>;
};
template <class L>
concept HasValueDim = requires {
  { L::value_dim } -> std::convertible_to<int>;
};
template <class L>
concept HasPageTokens = requires {
  { L::page_tokens } -> std::convertible_to<int>;
};
template <class L>
concept HasSharesKeyValue = requires {
  { L::shares_key_value } -> std::convertible_to<bool>;
};
template <class L>
concept HasOrders = requires {
  typename L::KeyOrder;
  typename L::ValueOrder;
};

template <class Q>
concept HasExact = requires {
  typename Q::Exact;
};
template <class Q>
concept HasSealTokens = requires {
  { Q::seal_tokens } -> std::convertible_to<int>;
};
template <class Q>
concept HasCodeBits = requires {
  { Q::code_bits } -> std::convertible_to<int>;
};
template <class Q>
concept HasAffine = requires {
  { Q::affine } -> std::convertible_to<Affine>;
};
template <class Q>
concept HasGroupDims = requires {
  { Q::group_dims } -> std::convertible_to<int>;
};
template <class Q>
concept HasParamBytes = requires(int n) {
  { Q::param_bytes(n, n) } -> std::same_as<std::int64_t>;
};
template <class Q>
concept HasEncode = requires(const Q q, AnyTile tile, int n, Rows values) {
  q.encode(tile, n, n, values);
};
template <class Q>
concept HasCodes = requires(const Q q, AnyConstTile tile, int n, float* codes) {
  q.codes(tile, n, codes);
};
template <class Q>
concept HasDecode = requires(const Q q, AnyConstTile tile, int n, float* values) {
  q.decode(tile, n, values);
};
template <class Q>
concept HasTokenScale = !Q::affine.token_scale || requires(const Q q, AnyConstTile tile, int n) {
  { q.token_scale(tile, n, n) } -> std::same_as<float>;
};
template <class Q>
concept HasTokenOffset = !Q::affine.token_offset || requires(const Q q, AnyConstTile tile, int n) {
  { q.token_offset(tile, n, n) } -> std::same_as<float>;
};
template <class Q>
concept HasChannelScale = !Q::affine.channel_scale || requires(const Q q, AnyConstTile tile, int n) {
  { q.channel_scale(tile, n, n) } -> std::same_as<float>;
};
template <class Q>
concept HasChannelOffset = !Q::affine.channel_offset || requires(const Q q, AnyConstTile tile, int n) {
  { q.channel_offset(tile, n, n) } -> std::same_as<float>;
};

template <class Q>
concept OneSided =
    HasCodeBits<Q> && HasAffine<Q> && HasGroupDims<Q> && HasParamBytes<Q> && HasEncode<Q> && HasCodes<Q> &&
    HasDecode<Q> && HasTokenScale<Q> && HasTokenOffset<Q> && HasChannelScale<Q> && HasChannelOffset<Q>;

// KeyValue names a quantizer for each side, Mixed one for each of two formats; any other quantizer is
// itself all of them.
template <class Q>
struct SidesOf {
  using Key = Q;
  using Value = Q;
};
template <class Q>
requires requires {
  typename Q::Key;
  typename Q::Value;
}
struct SidesOf<Q> {
  using Key = typename Q::Key;
  using Value = typename Q::Value;
};
template <class Q>
struct CodedOf {
  using High = Q;
  using Low = Q;
};
template <class Q>
requires requires {
  typename Q::High;
  typename Q::Low;
}
struct CodedOf<Q> {
  using High = typename Q::High;
  using Low = typename Q::Low;
};

template <class E>
concept HasVisible = requires(const E e) {
  { e.visible() } -> std::same_as<Window>;
};

template <class S>
concept HasData = requires(S s, int n) {
  { s.data(n, n) } -> std::same_as<std::byte*>;
  { s.page_stride(n) } -> std::same_as<std::int64_t>;
};

template <class Q>
inline constexpr bool is_one_quantizer =
    std::is_same_v<typename SidesOf<Q>::Key, Q>&& std::is_same_v<typename CodedOf<Q>::High, Q>;

}  // namespace detail

/// Maps (slot, dim) to an element of a tile.
template <class O>
concept ElementOrder = detail::HasIndex<O> && detail::HasMultiples<O>;

/// What one token stores and in which order. See Gqa and Mla.
template <class L>
concept LayoutPolicy = detail::TriviallyCopyable<L> && detail::HasKeyDim<L> && detail::HasValueDim<L> &&
    detail::HasPageTokens<L> && detail::HasSharesKeyValue<L> && detail::HasOrders<L> &&
    ElementOrder<typename L::KeyOrder> && ElementOrder<typename L::ValueOrder>;

/// The quantizer of keys, and that of values: two where `Q` is a KeyValue.
template <class Q>
using KeySide = typename detail::SidesOf<Q>::Key;
template <class Q>
using ValueSide = typename detail::SidesOf<Q>::Value;

/// Turns values into codes and parameters, and back.
///   Exact                               the quantizer of pages that are kept in full precision
///   seal_tokens                         1, or how many tokens encode() needs at once: a block
///   code_bits                           bits of one stored element, 4 or whole bytes
///   affine, group_dims                  how codes become values, see Affine; 0 dims are all of them
///   param_bytes(dims, page_tokens)      of one tile
///   encode(tile, slot, tokens, values)  values(token, dim), see Rows; writes slots [slot, slot + tokens),
///                                       whole blocks
///   codes(tile, slot, codes)            all dims of one slot as numbers, without any factor
///   token_scale(tile, slot, group), token_offset, channel_scale(tile, slot, dim), channel_offset
///                                       those that `affine` names
///   decode(tile, slot, values)          all dims of one slot; decode_affine() will do
/// and, where there is something to say:
///   code_bytes(dims)                    of one token, where codes are not all of code_bits
///   fits(dims)                          whether vectors of so many dims can be coded
///   rotate(x, dims), unrotate(x, dims)  an orthogonal transform, in place: pages hold, and encode and
///                                       decode speak of, rotated vectors; those of Exact, too
template <class Q>
concept QuantPolicy = detail::TriviallyCopyable<Q> && detail::HasExact<Q> && detail::HasSealTokens<Q> &&
    detail::OneSided<KeySide<typename detail::CodedOf<Q>::High>> &&
    detail::OneSided<ValueSide<typename detail::CodedOf<Q>::High>> &&
    detail::OneSided<KeySide<typename detail::CodedOf<Q>::Low>> &&
    detail::OneSided<ValueSide<typename detail::CodedOf<Q>::Low>>;

/// Who leaves. visible() tells which keys a query sees; pages that no query can see any more leave.
template <class E>
concept EvictPolicy = detail::TriviallyCopyable<E> && detail::HasVisible<E>;

/// Memory for the pages of a cache, the host's or a device's: data(format, layer) is page 0 of one layer,
/// page_stride(format) the bytes between pages. How a batch's copies are carried out is its own affair.
template <class S>
concept PageStore = std::movable<S> && detail::HasData<S>;

/// Who is read this step, while nothing leaves.
template <class S>
concept SelectPolicy = detail::TriviallyCopyable<S>;

}  // namespace kvfolia::inline KVF_ABI
