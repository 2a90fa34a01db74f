// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "common/divergence.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace kvfolia_examples {

TokenScore score_token(std::span<const float> reference, std::span<const float> logits, TokenId next) {
  using Row = Eigen::Map<const Eigen::ArrayXf>;
  constexpr Eigen::Index block = 1024;  // its doubles stay in the first-level cache
  using Block = Eigen::Array<double, Eigen::Dynamic, 1, Eigen::ColMajor, block, 1>;
  const auto size = static_cast<Eigen::Index>(reference.size());
  const Row reference_row(reference.data(), size), row(logits.data(), size);
  Eigen::Index reference_top = 0, top = 0;
  const double reference_max = reference_row.maxCoeff(&reference_top);
  const double max = row.maxCoeff(&top);

  // With p = exp(x - max_x) / X and q = exp(y - max_y) / Y:
  // sum p log(p / q) = sum p (x - y) - (max_x + log X - max_y - log Y).
  double reference_sum = 0.0, sum = 0.0, weighted = 0.0;
  for (Eigen::Index begin = 0; begin < size; begin += block) {
    const Eigen::Index count = std::min(block, size - begin);
    const Block x = reference_row.segment(begin, count).cast<double>();
    const Block y = row.segment(begin, count).cast<double>();
    const Block weights = (x - reference_max).exp();
    reference_sum += weights.sum();
    weighted += (weights * (x - y)).sum();
    sum += (y - max).exp().sum();
  }
  const double reference_log_sum = reference_max + std::log(reference_sum);
  const double log_sum = max + std::log(sum);
  const double kl = weighted / reference_sum - (reference_log_sum - log_sum);
  const auto at = static_cast<std::size_t>(next);
  return {.nll = log_sum - double{logits[at]},
          .reference_nll = reference_log_sum - double{reference[at]},
          .kl = kl < 0.0 ? 0.0 : kl,  // by rounding; NaN stays
          .same_top = reference_top == top};
}

void Divergence::add(const Activations& reference, const Activations& logits, std::span<const TokenId> next,
                     int threads) {
  const auto width = static_cast<std::size_t>(reference.cols());
  const std::size_t first = scores_.size();
  scores_.resize(first + next.size());
#pragma omp parallel for num_threads(threads) schedule(static)
  for (std::size_t i = 0; i < next.size(); ++i) {
    const auto row = static_cast<Eigen::Index>(i);
    scores_[first + i] =
        score_token({reference.row(row).data(), width}, {logits.row(row).data(), width}, next[i]);
  }
}

DivergenceSummary Divergence::summary() const {
  const auto count = static_cast<double>(scores_.size());
  double nll = 0.0, change = 0.0, top1 = 0.0, kl = 0.0;
  std::vector<double> kls;
  for (const TokenScore& score : scores_) {
    nll += score.nll;
    change += score.nll - score.reference_nll;
    kl += score.kl;
    top1 += score.same_top ? 1.0 : 0.0;
    kls.push_back(score.kl);
  }
  change /= count;
  double squares = 0.0;
  for (const TokenScore& score : scores_) {
    const double difference = score.nll - score.reference_nll - change;
    squares += difference * difference;
  }
  const double ratio = std::exp(change);
  const double deviation =
      scores_.size() > 1 ? std::sqrt(squares / (count - 1.0)) : std::numeric_limits<double>::quiet_NaN();
  return {.tokens = static_cast<std::int64_t>(scores_.size()),
          .perplexity = std::exp(nll / count),
          .perplexity_change_percent = 100.0 * std::expm1(change),
          .standard_error = 100.0 * ratio * deviation / std::sqrt(count),
          .kl_mean = kl / count,
          .kl_p99 = quantile(std::move(kls), 0.99),
          .top1 = top1 / count};
}

double quantile(std::vector<double> values, double q) {
  const auto is_nan = [](double value) { return std::isnan(value); };
  if (values.empty() || std::any_of(values.begin(), values.end(), is_nan))
    return std::numeric_limits<double>::quiet_NaN();
  std::sort(values.begin(), values.end());
  const double position = q * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, values.size() - 1);
  const double fraction = position - static_cast<double>(below);
  return values[below] + fraction * (values[above] - values[below]);
}

}  // namespace kvfolia_examples
