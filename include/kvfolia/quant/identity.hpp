// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// No quantization: values as float, fp16 or bf16.

#include <cstdint>
#include <type_traits>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/rounding.hpp"
#include "kvfolia/core/tensor.hpp"
#include "kvfolia/core/tile.hpp"

namespace kvfolia::inline KVF_ABI {

/// Stores T; encode rounds to nearest, decode is exact. What fp16 cannot hold is clamped to 65504: infinite
/// is only what was infinite.
template <class T>
requires is_element<T>
struct Identity {
  using Exact = Identity;
  using Code = T;
  static constexpr int seal_tokens = 1;
  static constexpr int code_bits = 8 * static_cast<int>(sizeof(T));
  static constexpr int group_dims = 0;
  static constexpr Affine affine{};

  KVF_INLINE KVF_HD static constexpr std::int64_t param_bytes(int /*dims*/, int /*page_tokens*/) { return 0; }

  KVF_INLINE KVF_HD static constexpr T round(float x) {
    if constexpr (std::is_same_v<T, fp16>)
      return fp16(detail::is_finite(x) ? detail::clamp_to_fp16(x) : x);
    else
      return static_cast<T>(x);
  }

  template <class Tile, class Values>
  KVF_INLINE KVF_HD void encode(Tile tile, int slot, int tokens, Values values) const {
    for (int t = 0; t < tokens; ++t)
      for (int d = 0; d < tile.dims; ++d) tile.template code<T>(slot + t, d) = round(values(t, d));
  }

  template <class Tile>
  KVF_INLINE KVF_HD void codes(Tile tile, int slot, float* codes) const {
    for (int d = 0; d < tile.dims; ++d) codes[d] = static_cast<float>(tile.template code<T>(slot, d));
  }
  template <class Tile>
  KVF_INLINE KVF_HD void decode(Tile tile, int slot, float* values) const {
    codes(tile, slot, values);
  }
};
static_assert(QuantPolicy<Identity<float>>);
static_assert(QuantPolicy<Identity<fp16>>);
static_assert(QuantPolicy<Identity<bf16>>);

}  // namespace kvfolia::inline KVF_ABI
