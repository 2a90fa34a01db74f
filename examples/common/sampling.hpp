// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Choosing the next token from logits.

#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "common/tokenizer.hpp"

namespace kvfolia_examples {

struct Choice {
  TokenId token;
  double logprob;  ///< of the untempered distribution, natural log
};

/// Greedy at temperature 0, else seeded sampling from softmax(logits / temperature).
class Sampler {
 public:
  Sampler(double temperature, std::uint64_t seed) : temperature_(temperature), random_(seed) {}

  Choice choose(std::span<const float> logits) {
    std::size_t best = 0;
    for (std::size_t i = 1; i < logits.size(); ++i)
      if (logits[i] > logits[best]) best = i;
    const std::size_t token = temperature_ > 0.0 ? draw(logits, logits[best]) : best;
    return {static_cast<TokenId>(token), logits[token] - log_sum(logits, logits[best])};
  }

 private:
  static double log_sum(std::span<const float> logits, double largest) {
    double sum = 0.0;
    for (const float x : logits) sum += std::exp(x - largest);
    return largest + std::log(sum);
  }

  std::size_t draw(std::span<const float> logits, double largest) {
    weights_.resize(logits.size());
    double sum = 0.0;
    for (std::size_t i = 0; i < logits.size(); ++i)
      sum += weights_[i] = std::exp((logits[i] - largest) / temperature_);
    // 53 random bits: the standard distributions differ between libraries.
    double left = static_cast<double>(random_() >> 11) * 0x1p-53 * sum;
    for (std::size_t i = 0; i < weights_.size(); ++i)
      if ((left -= weights_[i]) < 0.0) return i;
    return weights_.size() - 1;
  }

  double temperature_;
  std::mt19937_64 random_;
  std::vector<double> weights_;
};

}  // namespace kvfolia_examples
