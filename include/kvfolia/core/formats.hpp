// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Which formats the pages of a cache have, and which quantizer reads and writes each.

#include <type_traits>
#include <utility>

#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"

namespace kvfolia::inline KVF_ABI {

/// Format 0 is the quantizer's own, where a plain page number points. Format `exact_format` holds exact
/// pages; the same one, where the quantizer is exact. Format `low_format` holds what Mixed has demoted.
inline constexpr int coded_format = 0;
template <QuantPolicy Quant>
inline constexpr int exact_format =
    std::is_same_v<typename detail::CodedOf<Quant>::High, typename Quant::Exact> ? 0 : 1;
/// Whether pages can be demoted to a second coded format.
template <QuantPolicy Quant>
inline constexpr bool is_mixed = !std::is_same_v<typename detail::CodedOf<Quant>::High, Quant>;
template <QuantPolicy Quant>
inline constexpr int low_format = is_mixed<Quant> ? exact_format<Quant> + 1 : -1;
template <QuantPolicy Quant>
inline constexpr int format_count = exact_format<Quant> + (is_mixed<Quant> ? 2 : 1);

/// The quantizer of one format.
template <int Format, QuantPolicy Quant>
KVF_INLINE KVF_HD constexpr decltype(auto) format_quant(const Quant& quant) {
  static_assert(0 <= Format && Format < format_count<Quant>);
  if constexpr (Format == low_format<Quant>) {
    return (quant.low);
  } else if constexpr (Format == coded_format && is_mixed<Quant>) {
    return (quant.high);
  } else if constexpr (Format == coded_format) {
    return (quant);
  } else {
    return typename Quant::Exact{};
  }
}
template <int Format, QuantPolicy Quant>
using FormatQuant = std::remove_cvref_t<decltype(format_quant<Format>(std::declval<const Quant&>()))>;

template <class Q>
KVF_INLINE KVF_HD constexpr const KeySide<Q>& key_side(const Q& quant) {
  if constexpr (std::is_same_v<KeySide<Q>, Q>)
    return quant;
  else
    return quant.key;
}
template <class Q>
KVF_INLINE KVF_HD constexpr const ValueSide<Q>& value_side(const Q& quant) {
  if constexpr (std::is_same_v<ValueSide<Q>, Q>)
    return quant;
  else
    return quant.value;
}

/// What reads a layout's values: the keys' quantizer where a value is a part of the key.
template <class Layout, class Q>
KVF_INLINE KVF_HD constexpr const auto& value_quant(const Q& quant) {
  if constexpr (Layout::shares_key_value)
    return key_side(quant);
  else
    return value_side(quant);
}

/// Whether pages hold rotated vectors.
template <class Q>
inline constexpr bool rotates = requires(const Q q, float* x, int n) {
  q.rotate(x, n);
  q.unrotate(x, n);
};
/// From values as models have them to values as pages hold them, in place; and back.
template <class Q>
KVF_INLINE KVF_HD void to_stored(const Q& quant, float* x, int dims) {
  if constexpr (rotates<Q>) quant.rotate(x, dims);
}
template <class Q>
KVF_INLINE KVF_HD void from_stored(const Q& quant, float* x, int dims) {
  if constexpr (rotates<Q>) quant.unrotate(x, dims);
}

/// Bytes of one token's codes.
template <class Q>
KVF_INLINE KVF_HD constexpr int code_bytes(int dims) {
  if constexpr (requires { Q::code_bytes(dims); })
    return Q::code_bytes(dims);
  else
    return dims * Q::code_bits / 8;
}
/// Whether vectors of so many dims can be coded: their codes must end with a byte.
template <class Q>
KVF_INLINE KVF_HD constexpr bool fits(int dims) {
  if constexpr (requires { Q::fits(dims); })
    return Q::fits(dims);
  else
    return dims * Q::code_bits % 8 == 0;
}
/// What addresses of its codes, and of its parameters, must be multiples of.
template <class Q>
constexpr int code_alignment() {
  if constexpr (requires { Q::code_alignment; })
    return Q::code_alignment;
  else
    return Q::code_bits > 8 ? Q::code_bits / 8 : 1;
}
template <class Q>
constexpr int param_alignment() {
  if constexpr (requires { Q::param_alignment; })
    return Q::param_alignment;
  else if constexpr (requires { typename Q::Param; })
    return static_cast<int>(alignof(typename Q::Param));
  else
    return 1;
}

}  // namespace kvfolia::inline KVF_ABI
