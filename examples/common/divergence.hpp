// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// How far one model's next-token distributions are from a reference's, over a text.

#include <cstdint>
#include <span>
#include <vector>

#include "common/llama.hpp"

namespace kvfolia_examples {

/// One token's scores, in nats.
struct TokenScore {
  double nll;            ///< -log of the probability that the token had
  double reference_nll;  ///< the same with the reference
  double kl;             ///< KL(reference || distribution), at least 0
  bool same_top;         ///< whether both find the same token likeliest
};

/// Both distributions are given by their logits, of which there are equally many, at least `next + 1`.
/// Sums are in double: a half-precision cache costs about 1e-6 nats, less than floats' sums leave.
TokenScore score_token(std::span<const float> reference, std::span<const float> logits, TokenId next);

/// What a text's scores come to.
struct DivergenceSummary {
  std::int64_t tokens = 0;
  double perplexity = 0.0;
  double perplexity_change_percent = 0.0;
  /// Of perplexity_change_percent, in percentage points: 100 r s / sqrt(tokens), with r the ratio of the
  /// perplexities and s the standard deviation of the tokens' differences in nll. NaN for one token.
  double standard_error = 0.0;
  double kl_mean = 0.0;
  double kl_p99 = 0.0;  ///< interpolated between the tokens next to it
  double top1 = 0.0;    ///< fraction of tokens
};

class Divergence {
 public:
  /// Row i of both matrices, [token][vocabulary], predicts `next[i]`; rows beyond those are ignored.
  void add(const Activations& reference, const Activations& logits, std::span<const TokenId> next,
           int threads);

  /// There must be at least one token.
  DivergenceSummary summary() const;

 private:
  std::vector<TokenScore> scores_;
};

/// The value below which the fraction `q` of `values` lies, interpolated linearly: position
/// q (size - 1) in their order. NaN if one of them is, or if there are none.
double quantile(std::vector<double> values, double q);

}  // namespace kvfolia_examples
