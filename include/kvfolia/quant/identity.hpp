// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// No quantization: values as float, fp16 or bf16.

#include <cstdint>

#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/tensor.hpp"
#include "kvfolia/core/tile.hpp"

namespace kvfolia::inline KVF_ABI {

/// Stores T; encode rounds to nearest, decode is exact.
template <class T>
requires is_element<T>
struct Identity {
  using Exact = Identity;
  using Code = T;
  static constexpr int seal_tokens = 1;
  static constexpr int code_bits = 8 * static_cast<int>(sizeof(T));
  static constexpr Axis key_axis = Axis::none;
  static constexpr Axis value_axis = Axis::none;

  KVF_HD static constexpr std::int64_t param_bytes(int /*dims*/, int /*page_tokens*/) { return 0; }

  template <class Order>
  KVF_INLINE KVF_HD void encode(const Tile<Order, std::byte>& tile, int slot, int tokens,
                                const float* values) const {
    for (int t = 0; t < tokens; ++t)
      for (int d = 0; d < tile.shape.dims; ++d)
        tile.template code<T>(slot + t, d) = static_cast<T>(values[std::int64_t{t} * tile.shape.dims + d]);
  }

  template <class Order, class Byte>
  KVF_INLINE KVF_HD void decode(const Tile<Order, Byte>& tile, int slot, float* values) const {
    for (int d = 0; d < tile.shape.dims; ++d) values[d] = static_cast<float>(tile.template code<T>(slot, d));
  }
};
static_assert(QuantPolicy<Identity<float>>);
static_assert(QuantPolicy<Identity<fp16>>);
static_assert(QuantPolicy<Identity<bf16>>);

}  // namespace kvfolia::inline KVF_ABI
