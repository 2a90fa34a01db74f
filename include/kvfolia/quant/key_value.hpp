// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Different quantizers for keys and values: keys need more bits.

#include <type_traits>

#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/quant/identity.hpp"

namespace kvfolia::inline KVF_ABI {

template <class K, class V>
struct KeyValue;

namespace detail {

template <class K, class V>
struct Pair {
  using type = KeyValue<K, V>;
};
template <class Q>
struct Pair<Q, Q> {
  using type = Q;
};

}  // namespace detail

/// Pages are sealed as a whole: where one side needs blocks, both wait for them.
template <class K, class V>
struct KeyValue {
  static_assert(detail::is_one_quantizer<K> && detail::is_one_quantizer<V>,
                "each side has one quantizer: Mixed<KeyValue<K, V>, KeyValue<K, V>>");
  static_assert(K::seal_tokens % V::seal_tokens == 0 || V::seal_tokens % K::seal_tokens == 0,
                "the larger block must hold whole smaller ones");
  using Key = K;
  using Value = V;
  using Exact = typename detail::Pair<typename K::Exact, typename V::Exact>::type;
  static constexpr int seal_tokens = K::seal_tokens > V::seal_tokens ? K::seal_tokens : V::seal_tokens;

  K key{};
  V value{};
};

static_assert(QuantPolicy<KeyValue<Identity<float>, Identity<fp16>>>);

}  // namespace kvfolia::inline KVF_ABI
