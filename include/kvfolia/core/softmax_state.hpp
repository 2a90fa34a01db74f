// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The online softmax: a running maximum and sum, how two of them merge, and the log-sum-exp.

#include <math.h>

#include "kvfolia/core/config.hpp"

namespace kvfolia::inline KVF_ABI {

/// The log-sum-exp of a row's scores, base e, sink logit included: -infinity where there was no key.
struct NaturalLse {
  float value;
};

namespace detail {
inline constexpr float negative_infinity = -__builtin_inff();
}

/// Maximum and sum of exp(score - max). The accumulator of values that goes with it is the caller's;
/// every operation returns the factors it has to be multiplied by. Starts empty.
/// Source: online softmax, arXiv:1805.02867; merging as in FlashAttention, arXiv:2205.14135.
struct SoftmaxState {
  float max = detail::negative_infinity;
  float sum = 0.0f;

  KVF_INLINE KVF_HD bool empty() const { return sum == 0.0f; }

  /// What an earlier accumulator and the new score's value are multiplied by.
  struct Weights {
    float old_part;
    float new_part;
  };

  /// Adds one score. One of -infinity weighs nothing. NaN stays: no comparison swallows it.
  KVF_INLINE KVF_HD Weights add(float score) {
    if (score == detail::negative_infinity) return {1.0f, 0.0f};
    if (score > max) {
      const float scale = empty() ? 0.0f : ::expf(max - score);
      max = score;
      sum = ::fmaf(sum, scale, 1.0f);
      return {scale, 1.0f};
    }
    const float weight = ::expf(score - max);
    sum += weight;
    return {1.0f, weight};
  }

  /// Adds another state's scores. Merging with an empty state changes no bit.
  KVF_INLINE KVF_HD Weights merge(SoftmaxState other) {
    if (other.empty()) return {1.0f, 0.0f};
    if (empty()) {
      *this = other;
      return {0.0f, 1.0f};
    }
    const float larger = other.max > max ? other.max : max;
    const Weights weights{::expf(max - larger), ::expf(other.max - larger)};
    max = larger;
    sum = ::fmaf(other.sum, weights.new_part, sum * weights.old_part);
    return weights;
  }

  /// What the accumulator is multiplied by in the end; 0 for an empty state.
  KVF_INLINE KVF_HD float normalizer() const { return empty() ? 0.0f : 1.0f / sum; }

  KVF_INLINE KVF_HD NaturalLse lse() const {
    return {empty() ? detail::negative_infinity : max + ::logf(sum)};
  }
};

/// Merges normalized results: out = a.out * old_part + b.out * new_part has the log-sum-exp that
/// replaces `a`. Two empty ones give weights 0 and -infinity again.
KVF_INLINE KVF_HD SoftmaxState::Weights merge_lse(NaturalLse& a, NaturalLse b) {
  if (a.value == detail::negative_infinity && b.value == detail::negative_infinity) return {0.0f, 0.0f};
  const float larger = b.value > a.value ? b.value : a.value;
  const float weight_a = ::expf(a.value - larger);
  const float weight_b = ::expf(b.value - larger);
  const float sum = weight_a + weight_b;
  a.value = larger + ::logf(sum);
  return {weight_a / sum, weight_b / sum};
}

}  // namespace kvfolia::inline KVF_ABI
