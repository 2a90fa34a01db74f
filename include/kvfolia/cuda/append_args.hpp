// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What kernels that write pages are launched with, and which share of that a block has: one head of one side
// of one format, or a section of it that is coded apart.

#include <cstdint>
#include <type_traits>

#include "kvfolia/core/attend_args.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/cuda/encode.hpp"
#include "kvfolia/cuda/page_values.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

/// Every array is the device's.
template <class Layout, class Quant>
struct WriteArgs {
  PagedView<Layout, Quant> view;
  AppendArgs args;
  const std::int64_t* slots;  ///< [tokens], see PhysSlot
  std::int32_t tokens;
  const PageRecode* recodes;  ///< [recode_count]; those whose `to` is absent are skipped
  std::int32_t recode_count;
};

template <class... T>
struct TypeList {};
template <class A, class B>
struct Joined;
template <class... A, class... B>
struct Joined<TypeList<A...>, TypeList<B...>> {
  using type = TypeList<A..., B...>;
};

/// Neighbouring dims of a side that one quantizer codes: all of them, or the section of that index.
template <class Q, int Index, int DimsT, int FirstDim, int FirstCode, int FirstParam>
struct Part {
  using Quant = Q;
  using Shape = EncodeShape<Q, DimsT>;
  static constexpr int dims = DimsT;
  static constexpr int first_dim = FirstDim;
  static constexpr int first_code = FirstCode;    ///< byte of a slot's codes
  static constexpr int first_param = FirstParam;  ///< byte of a slot's parameters

  template <class Side>
  KVF_INLINE KVF_HD static const Q& quant(const Side& side) {
    return of<Index>(side);
  }

 private:
  template <int Left, class Side>
  KVF_INLINE KVF_HD static const auto& of(const Side& side) {
    if constexpr (!has_sections<Side>)
      return side;
    else if constexpr (Left == 0)
      return side.first.quant;
    else
      return of<Left - 1>(side.rest);
  }
};

template <class Q, int Dims, int Index = 0, int FirstDim = 0, int FirstCode = 0, int FirstParam = 0>
struct PartsOf {
  using type = TypeList<Part<Q, Index, Dims, FirstDim, FirstCode, FirstParam>>;
};
template <int Dims, int Index, int FirstDim, int FirstCode, int FirstParam>
struct PartsOf<Sections<>, Dims, Index, FirstDim, FirstCode, FirstParam> {
  using type = TypeList<>;
};
template <class First, class... Rest, int Dims, int Index, int FirstDim, int FirstCode, int FirstParam>
struct PartsOf<Sections<First, Rest...>, Dims, Index, FirstDim, FirstCode, FirstParam> {
  using All = Sections<First, Rest...>;
  using type =
      typename Joined<TypeList<Part<typename First::Quant, Index, First::dims, FirstDim,
                                    FirstCode + First::skip, FirstParam>>,
                      typename PartsOf<Sections<Rest...>, Dims - First::dims, Index + 1,
                                       FirstDim + First::dims, FirstCode + All::first_bytes(),
                                       FirstParam + static_cast<int>(All::first_param_bytes())>::type>::type;
};

/// Which kernel writes pages of a format: tokens one by one, or what page recodes say.
enum class WriteKind : std::uint8_t { tokens, recodes };

/// Keys, values, or one of them: which is known when a kernel runs, for both are coded alike.
enum class SideKind : std::uint8_t { keys, values, either };

/// A block's share.
template <int FormatT, SideKind SideT, class PartT>
struct Share {
  static constexpr int format = FormatT;
  static constexpr SideKind side = SideT;
  static constexpr int sides = SideT == SideKind::either ? 2 : 1;
  using Part = PartT;

  template <class Quant>
  KVF_INLINE KVF_HD static const typename PartT::Quant& quant(const Quant& quant, bool is_key) {
    const auto& of_format = format_quant<FormatT>(quant);
    if constexpr (SideT != SideKind::values)
      if (SideT == SideKind::keys || is_key) return Part::quant(key_side(of_format));
    if constexpr (SideT != SideKind::keys) return Part::quant(value_side(of_format));
  }
};
template <int Format, SideKind Side, class Parts>
struct SharesOfSide;
template <int Format, SideKind Side, class... P>
struct SharesOfSide<Format, Side, TypeList<P...>> {
  using type = TypeList<Share<Format, Side, P>...>;
};

/// All shares of a kind, as a list of types.
template <class Layout, class Quant, WriteKind Kind, int Format = 0>
struct SharesOf {
  using Q = FormatQuant<Format, Quant>;
  using KeyParts = typename PartsOf<KeySide<Q>, Layout::key_dim>::type;
  using ValueParts = std::conditional_t<Layout::shares_key_value, TypeList<>,
                                        typename PartsOf<ValueSide<Q>, Layout::value_dim>::type>;
  static constexpr bool is_there = Kind == WriteKind::recodes || Q::seal_tokens == 1;
  static constexpr bool are_alike = std::is_same_v<KeyParts, ValueParts>;
  using Keys = typename SharesOfSide<Format, are_alike ? SideKind::either : SideKind::keys, KeyParts>::type;
  using Values = typename SharesOfSide<Format, SideKind::values,
                                       std::conditional_t<are_alike, TypeList<>, ValueParts>>::type;
  using Own = std::conditional_t<is_there, typename Joined<Keys, Values>::type, TypeList<>>;
  using type = typename Joined<Own, typename SharesOf<Layout, Quant, Kind, Format + 1>::type>::type;
};
template <class Layout, class Quant, WriteKind Kind, int Format>
requires(Format == format_count<Quant>) struct SharesOf<Layout, Quant, Kind, Format> {
  using type = TypeList<>;
};
template <class Layout, class Quant, WriteKind Kind>
using Shares = typename SharesOf<Layout, Quant, Kind>::type;

/// How many blocks share a tile of tokens, the shared memory that the largest one takes, and the tokens that
/// the smallest one's blocks have.
struct ShareSizes {
  int count = 0;
  std::uint32_t shared_bytes = 0;
  int rows = 32;
};
template <class... S>
constexpr ShareSizes sizes_of(TypeList<S...>) {
  ShareSizes sizes;
  const auto add = [&](int sides, std::uint32_t bytes, int rows) {
    sizes.count += sides;
    if (bytes > sizes.shared_bytes) sizes.shared_bytes = bytes;
    if (rows < sizes.rows) sizes.rows = rows;
  };
  (add(S::sides, S::Part::Shape::bytes, S::Part::Shape::rows), ...);
  return sizes;
}
template <class Layout, class Quant, WriteKind Kind>
constexpr ShareSizes share_sizes() {
  return sizes_of(Shares<Layout, Quant, Kind>());
}

/// Whether kernels can write a share: one of an even number of dims, and none of blocks that they do not
/// know.
template <class Share>
constexpr bool writes() {
  using Q = typename Share::Part::Quant;
  return Share::Part::dims % 2 == 0 && (Q::seal_tokens == 1 || channel_bytes<Q> > 0) &&
         Share::Part::Shape::bytes <= (99u << 10);
}
template <class... S>
constexpr bool writes_all(TypeList<S...>) {
  return (writes<S>() && ...);
}
/// Whether single values of all formats' keys, or values, can be read.
template <class Layout, class Quant, int Format = 0>
constexpr bool reads_keys() {
  if constexpr (Format == format_count<Quant>)
    return true;
  else
    return is_known<KeySide<FormatQuant<Format, Quant>>> && reads_keys<Layout, Quant, Format + 1>();
}
template <class Layout, class Quant, int Format = 0>
constexpr bool reads_values() {
  if constexpr (Format == format_count<Quant> || Layout::shares_key_value)
    return true;
  else
    return is_known<ValueSide<FormatQuant<Format, Quant>>> && reads_values<Layout, Quant, Format + 1>();
}

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
