// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Rotates vectors before coding, so that outliers spread over all channels.

#include <cstdint>

#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/quant/identity.hpp"

namespace kvfolia::inline KVF_ABI {

/// A Hadamard transform over every `Block` neighbouring dims; 0 is the largest power of two that divides
/// them. Pages hold rotated vectors, exact ones too: a kernel rotates a query once, and an output back
/// once. What lies in pages does not change the result otherwise, since the transform is orthogonal.
/// Source: QuaRot, arXiv:2404.00456.
template <class Q, int Block = 0>
struct Rotated : Q {
  static_assert(detail::is_one_quantizer<Q>, "rotate each of them: KeyValue<Rotated<K>, Rotated<V>>");
  static_assert(Block >= 0 && (Block & (Block - 1)) == 0, "a block is a power of two");
  using Exact = Rotated<typename Q::Exact, Block>;

  KVF_INLINE KVF_HD static constexpr int block(int dims) { return Block != 0 ? Block : dims & -dims; }
  KVF_INLINE KVF_HD static constexpr bool fits(int dims) {
    return dims % block(dims) == 0 && kvfolia::fits<Q>(dims);
  }

  /// What sums and differences are multiplied by: 1 / sqrt(block).
  KVF_INLINE KVF_HD static constexpr float factor(int dims) { return inverse_root(block(dims)); }
  /// x becomes H x / sqrt(block) in every block. Sums and differences of two numbers in a fixed order:
  /// the same bits everywhere.
  KVF_INLINE KVF_HD void rotate(float* x, int dims) const {
    const int size = block(dims);
    for (int half = 1; half < size; half *= 2)
      for (int i = 0; i < dims; i += 2 * half)
        for (int j = i; j < i + half; ++j) {
          const float a = x[j], b = x[j + half];
          x[j] = a + b;
          x[j + half] = a - b;
        }
    // Fused, so that no compiler fuses the product with what comes behind it.
    for (int d = 0; d < dims; ++d) x[d] = __builtin_fmaf(x[d], factor(dims), 0.0f);
  }
  /// The transform is its own inverse.
  KVF_INLINE KVF_HD void unrotate(float* x, int dims) const { rotate(x, dims); }

 private:
  KVF_INLINE KVF_HD static constexpr float inverse_root(int power_of_two) {
    float root = 1.0f;
    for (; power_of_two >= 4; power_of_two /= 4) root *= 0.5f;
    return power_of_two == 2 ? root * 0.70710678f : root;
  }
};

static_assert(QuantPolicy<Rotated<Identity<float>>>);

}  // namespace kvfolia::inline KVF_ABI
