// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "common/divergence.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "support/catch.hpp"

using namespace kvfolia_examples;
using namespace kvfolia_tests;

namespace {

/// Logits are logarithms of weights, plus a shift that must not matter.
std::vector<float> logits_of(std::vector<double> weights, double shift = 0.0) {
  std::vector<float> logits;
  for (const double weight : weights) logits.push_back(static_cast<float>(std::log(weight) + shift));
  return logits;
}

}  // namespace

TEST_CASE("two distributions over three tokens are scored as by hand") {
  // Reference 1/2, 1/4, 1/4; policy 1/4, 1/2, 1/4: KL = 1/2 log 2 - 1/4 log 2.
  const TokenScore score = score_token(logits_of({2, 1, 1}), logits_of({1, 2, 1}, 30.0), 1);
  CHECK(score.nll == Approx(std::log(2.0)));
  CHECK(score.reference_nll == Approx(std::log(4.0)));
  CHECK(score.kl == Approx(0.25 * std::log(2.0)));
  CHECK(!score.same_top);
  // The other way round, KL is the same here; against 1/3 each it is log 3 - 3/2 log 2.
  const TokenScore even = score_token(logits_of({2, 1, 1}), logits_of({1, 1, 1}), 0);
  CHECK(even.kl == Approx(std::log(3.0) - 1.5 * std::log(2.0)).epsilon(1e-6));
  CHECK(even.same_top);  // of equals, the first is the top
}

TEST_CASE("a distribution has no divergence from itself, nor from itself shifted") {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0f, 5.0f);
  for (const int size : {1, 2, 1023, 1024, 1025, 5000}) {
    CAPTURE(size);
    std::vector<float> logits(static_cast<std::size_t>(size));
    for (float& logit : logits) logit = normal(random);
    const TokenScore same = score_token(logits, logits, 0);
    CHECK(same.kl == 0.0);
    CHECK(same.nll == same.reference_nll);
    CHECK(same.same_top);
    std::vector<float> shifted = logits;
    for (float& logit : shifted) logit = std::ldexp(std::round(std::ldexp(logit, 10)), -10);
    logits = shifted;
    for (float& logit : shifted) logit += 64.0f;  // exact: both have ten bits behind the point
    CHECK(score_token(logits, shifted, 0).kl == Approx(0.0).margin(1e-13));
  }
}

TEST_CASE("small divergences are exact over a whole vocabulary") {
  constexpr std::size_t size = 49152;
  std::mt19937 random(11);
  std::normal_distribution<float> normal(0.0f, 3.0f), noise(0.0f, 1e-3f);
  std::vector<float> reference(size), logits(size);
  for (std::size_t i = 0; i < size; ++i) {
    reference[i] = normal(random);
    logits[i] = reference[i] + noise(random);
  }
  // Term by term in extended precision.
  long double reference_sum = 0, sum = 0, kl = 0;
  for (const float logit : reference) reference_sum += std::exp(static_cast<long double>(logit));
  for (const float logit : logits) sum += std::exp(static_cast<long double>(logit));
  for (std::size_t i = 0; i < size; ++i) {
    const long double p = std::log(std::exp(static_cast<long double>(reference[i])) / reference_sum);
    const long double q = std::log(std::exp(static_cast<long double>(logits[i])) / sum);
    kl += std::exp(p) * (p - q);
  }
  CHECK(kl < 1e-6L);
  CHECK(score_token(reference, logits, 5).kl == Approx(static_cast<double>(kl)).epsilon(1e-6));
}

TEST_CASE("large logits do not overflow") {
  const std::vector<float> high{3e38f, 1.0f}, low{-3e38f, 1.0f};
  CHECK(score_token(high, high, 0).nll == 0.0);
  CHECK(score_token(low, low, 1).nll == 0.0);
}

TEST_CASE("what is not a number stays visible") {
  const std::vector<float> good{1.0f, 2.0f}, bad{1.0f, std::numeric_limits<float>::quiet_NaN()};
  CHECK(std::isnan(score_token(good, bad, 0).kl));
}

TEST_CASE("a summary is as by hand") {
  // Over two tokens. Reference 1/2, 1/2; policy 3/4, 1/4 in all three rows. The text is 0, 0, 1.
  Activations reference(4, 2), logits(4, 2);
  reference.setZero();
  logits.col(0).setConstant(std::log(3.0f));
  logits.col(1).setZero();
  reference(2, 1) = 1e-6f;  // now the reference prefers token 1
  Divergence divergence;
  const std::vector<TokenId> next{0, 0, 1};
  divergence.add(reference, logits, std::span(next).first(2), 2);
  divergence.add(reference.bottomRows(2), logits.bottomRows(2), std::span(next).last(1), 1);
  const DivergenceSummary summary = divergence.summary();
  CHECK(summary.tokens == 3);
  // Probabilities 3/4, 3/4, 1/4: their product is 9/64, the reference's 8/64.
  CHECK(summary.perplexity == Approx(std::cbrt(64.0 / 9.0)));
  CHECK(summary.perplexity_change_percent == Approx(100.0 * (std::cbrt(8.0 / 9.0) - 1.0)).epsilon(1e-5));
  // Differences of nll: -log 3/2 twice, log 2. Their deviation is log 3 / sqrt 3.
  CHECK(summary.standard_error == Approx(100.0 * std::cbrt(8.0 / 9.0) * std::log(3.0) / 3.0).epsilon(1e-5));
  CHECK(summary.kl_mean == Approx(std::log(2.0) - 0.5 * std::log(3.0)).epsilon(1e-5));
  CHECK(summary.kl_p99 == Approx(summary.kl_mean).epsilon(1e-5));
  CHECK(summary.top1 == Approx(2.0 / 3.0));
}

TEST_CASE("one token has no standard error") {
  Divergence divergence;
  const Activations logits = Activations::Zero(1, 4);
  const std::vector<TokenId> next{3};
  divergence.add(logits, logits, next, 1);
  CHECK(divergence.summary().perplexity == Approx(4.0));
  CHECK(std::isnan(divergence.summary().standard_error));
}

TEST_CASE("quantiles are interpolated") {
  CHECK(quantile({3.0}, 0.99) == 3.0);
  CHECK(quantile({2.0, 1.0}, 0.5) == 1.5);
  CHECK(quantile({5.0, 1.0, 3.0}, 1.0) == 5.0);
  std::vector<double> values;
  for (int i = 200; i >= 0; --i) values.push_back(i);
  CHECK(quantile(values, 0.99) == Approx(198.0));
  CHECK(std::isnan(quantile({}, 0.5)));
  CHECK(std::isnan(quantile({1.0, std::nan("")}, 0.5)));
}
