// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// One shape that attention is measured in, its inputs, and what must come out: the same for every program.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvfolia_bench {

struct AttendCase {
  int keys = 4096;  ///< of each sequence, the queries' own among them
  int query_heads = 32;
  int kv_heads = 8;
  int batch = 1;
  int queries = 1;  ///< of each sequence, its newest tokens, under a causal mask
  int threads = 1;
  int page_tokens = 64;
  bool shuffled = false;  ///< whether a table's pages are scattered over memory

  std::int64_t tokens() const { return std::int64_t{batch} * keys; }
  std::int64_t query_tokens() const { return std::int64_t{batch} * queries; }

  /// Multiplications and additions of both products, over the keys that each query sees.
  double flops(int dims) const {
    const double seen = keys - (queries - 1) / 2.0;
    return 4.0 * static_cast<double>(query_tokens()) * seen * query_heads * dims;
  }

  /// keys/heads/dims/...: what another library's line has, too.
  std::string name(int dims) const {
    const auto field = [](const char* label, int value) {
      return std::string(label) + std::to_string(value);
    };
    return field("/keys:", keys) + field("/heads:", query_heads) + field("x", kv_heads) +
           field("/dims:", dims) + field("/batch:", batch) + field("/queries:", queries) +
           field("/threads:", threads);
  }
};

/// Gaussian numbers from a seed. Tokens begin somewhere in a table of them: drawing every number anew would
/// take longer than encoding it.
class Gaussian {
 public:
  Gaussian() : numbers_(size + longest) {
    std::uint64_t state = 1;
    const auto uniform = [&state] {
      state = state * 6364136223846793005u + 1442695040888963407u;
      return (static_cast<double>(state >> 40) + 0.5) * 0x1p-24;
    };
    for (float& number : numbers_)
      number =
          static_cast<float>(std::sqrt(-2.0 * std::log(uniform())) * std::cos(6.283185307179586 * uniform()));
  }
  /// Numbers of one token, at most `longest`; the same for the same `stream` and `token`.
  const float* token(int stream, std::int64_t token) const {
    std::uint64_t z = static_cast<std::uint64_t>(token) * 4 + static_cast<std::uint64_t>(stream);
    z = (z + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 32)) * 0xD6E8FEB86659FD93u;
    return numbers_.data() + (z ^ (z >> 32)) % size;
  }
  std::vector<float> tokens(int stream, std::int64_t first, std::int64_t count, int width) const {
    std::vector<float> all;
    for (std::int64_t t = first; t < first + count; ++t)
      all.insert(all.end(), token(stream, t), token(stream, t) + width);
    return all;
  }

  static constexpr int keys = 0, values = 1, queries = 2;  ///< streams

 private:
  static constexpr std::size_t size = 1 << 21;
  static constexpr std::size_t longest = 1 << 16;
  std::vector<float> numbers_;
};

inline const Gaussian& inputs() {
  static const Gaussian gaussian;
  return gaussian;
}

/// How far an output is from attention in double precision over the keys and values that `read` gives:
/// read(token, key, value) fills in one token's, as the pages hold them. Relative L2.
template <class Read>
double attention_error(const float* query, const float* out, int keys, int dims, Read&& read) {
  const auto n = static_cast<std::size_t>(dims);
  std::vector<float> key(n), value(n);
  std::vector<double> sums(n, 0.0);
  double largest = -INFINITY, total = 0.0;
  for (int t = 0; t < keys; ++t) {
    read(t, key.data(), value.data());
    double score = 0.0;
    for (std::size_t d = 0; d < n; ++d) score += double{query[d]} * double{key[d]};
    score /= std::sqrt(static_cast<double>(dims));
    if (score > largest) {
      const double shrink = std::exp(largest - score);
      for (double& sum : sums) sum *= shrink;
      total *= shrink;
      largest = score;
    }
    const double weight = std::exp(score - largest);
    total += weight;
    for (std::size_t d = 0; d < n; ++d) sums[d] += weight * double{value[d]};
  }
  double error = 0.0, norm = 0.0;
  for (std::size_t d = 0; d < n; ++d) {
    const double expected = sums[d] / total;
    error += (out[d] - expected) * (out[d] - expected);
    norm += expected * expected;
  }
  return std::sqrt(error / norm);
}

}  // namespace kvfolia_bench
