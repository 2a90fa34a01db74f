// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Attention over plain contiguous vectors, with the arithmetic that the plain path promises: dims and
// tokens ascending, fused multiply-adds, an online softmax over tiles of 256 positions that are merged
// from left to right. Written without any of the library's code.

#include <cmath>
#include <vector>

namespace kvfolia_tests {

/// Keys and values of one head: token t's begin at t * stride.
struct ContiguousHead {
  const float* keys;
  const float* values;
  int stride;
  int tokens;
  int key_dim;
  int value_dim;
};

/// Writes the output of one causal query at the last position and returns the log-sum-exp.
inline float contiguous_attention(const ContiguousHead& head, const float* query, float* out) {
  struct Partial {
    float max = -INFINITY, sum = 0.0f;
    std::vector<float> values;
  };
  const float scale = 1.0f / std::sqrt(static_cast<float>(head.key_dim));
  const auto dims = static_cast<std::size_t>(head.value_dim);
  Partial total{-INFINITY, 0.0f, std::vector<float>(dims, 0.0f)};
  for (int begin = 0; begin < head.tokens; begin += 256) {
    Partial tile{-INFINITY, 0.0f, std::vector<float>(dims, 0.0f)};
    for (int t = begin; t < head.tokens && t < begin + 256; ++t) {
      float score = 0.0f;
      for (int d = 0; d < head.key_dim; ++d)
        score = std::fma(query[d], head.keys[t * head.stride + d], score);
      score *= scale;
      float weight = 1.0f;
      if (score > tile.max) {
        const float shrink = tile.sum == 0.0f ? 0.0f : std::exp(tile.max - score);
        for (float& v : tile.values) v *= shrink;
        tile.sum = std::fma(tile.sum, shrink, 1.0f);
        tile.max = score;
      } else {
        weight = std::exp(score - tile.max);
        tile.sum += weight;
      }
      for (std::size_t d = 0; d < dims; ++d)
        tile.values[d] =
            std::fma(weight, head.values[static_cast<std::size_t>(t * head.stride) + d], tile.values[d]);
    }
    if (total.sum == 0.0f) {
      total = tile;
      continue;
    }
    const float larger = std::fmax(total.max, tile.max);
    const float a = std::exp(total.max - larger), b = std::exp(tile.max - larger);
    total.max = larger;
    total.sum = std::fma(tile.sum, b, total.sum * a);
    for (std::size_t d = 0; d < dims; ++d) total.values[d] = std::fma(tile.values[d], b, total.values[d] * a);
  }
  const float factor = 1.0f / total.sum;
  for (std::size_t d = 0; d < dims; ++d) out[d] = total.values[d] * factor;
  return total.max + std::log(total.sum);
}

}  // namespace kvfolia_tests
