// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Seeded random numbers that are the same with every standard library.

#include <cmath>
#include <cstdint>
#include <vector>

namespace kvfolia_tests {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 1) {}

  /// SplitMix64.
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  /// In [low, high].
  int between(int low, int high) {
    return low + static_cast<int>(next() % static_cast<std::uint64_t>(high - low + 1));
  }
  double uniform() { return (static_cast<double>(next() >> 11) + 0.5) * 0x1p-53; }
  float gauss() {
    return static_cast<float>(std::sqrt(-2.0 * std::log(uniform())) *
                              std::cos(6.283185307179586 * uniform()));
  }
  std::vector<float> gauss(std::size_t n) {
    std::vector<float> values(n);
    for (float& v : values) v = gauss();
    return values;
  }

 private:
  std::uint64_t state_;
};

}  // namespace kvfolia_tests
