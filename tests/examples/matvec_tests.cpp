// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Products from a file's blocks, held against rows that dequantize_row widens.

#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "common/matvec.hpp"
#include "support/catch.hpp"

using namespace kvfolia_examples;

namespace {

constexpr std::array direct_types{TensorType::F32,  TensorType::F16,  TensorType::BF16,
                                  TensorType::Q4_0, TensorType::Q4_1, TensorType::Q8_0};

/// A tensor of random codes. Its scales, and weights that are floats themselves, are of ordinary size.
struct Weight {
  Weight(TensorType type, std::int64_t cols, std::int64_t rows, std::mt19937& random)
      : bytes(row_bytes(type, cols) * static_cast<std::size_t>(rows)) {
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() & 255u);
    const auto soften = [&](std::size_t step, std::size_t top, unsigned exponent) {
      for (std::size_t at = top; at < bytes.size(); at += step)
        bytes[at] = (bytes[at] & std::byte{0x81}) | static_cast<std::byte>(exponent);
    };
    switch (type) {
      case TensorType::F32: soften(4, 3, 0x3e); break;
      case TensorType::BF16: soften(2, 1, 0x3e); break;
      case TensorType::F16: soften(2, 1, 0x38); break;
      case TensorType::Q4_1: soften(20, 3, 0x38), soften(20, 1, 0x38); break;
      case TensorType::Q4_0: soften(18, 1, 0x38); break;
      case TensorType::Q8_0: soften(34, 1, 0x38); break;
      default: break;
    }
    tensor.shape = {cols, rows};
    tensor.type = type;
    tensor.data = bytes.data();
    tensor.row_stride = row_bytes(type, cols);
  }
  std::vector<std::byte> bytes;
  GgufTensor tensor;
};

std::vector<float> products(const GgufTensor& weight, const std::vector<float>& x) {
  const std::int64_t tokens = static_cast<std::int64_t>(x.size()) / weight.cols();
  std::vector<float> out(static_cast<std::size_t>(tokens * weight.rows()));
  const MatvecArgs args{x.data(), tokens, weight.cols(), out.data(), weight.rows()};
  matvec(weight, 0, 3, args);
  matvec(weight, 3, weight.rows(), args);
  return out;
}

}  // namespace

TEST_CASE("a product from the file's blocks is that of the widened rows, up to the rounding of sums") {
  const unsigned seed = std::random_device{}();
  INFO("seed " << seed);
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  for (const TensorType type : direct_types)
    for (const std::int64_t cols : {32, 64, 96, 576})
      for (const std::int64_t tokens : {1, 2, 4, 7, 8, 13}) {
        CAPTURE(type_name(type), cols, tokens);
        const Weight weight(type, cols, 5, random);
        REQUIRE(has_matvec(weight.tensor));
        std::vector<float> x(static_cast<std::size_t>(tokens * cols));
        for (float& value : x) value = uniform(random);
        const std::vector<float> got = products(weight.tensor, x);
        std::vector<float> row(static_cast<std::size_t>(cols));
        for (std::int64_t r = 0; r < 5; ++r) {
          weight.tensor.dequantize(r, row.data());
          for (std::int64_t t = 0; t < tokens; ++t) {
            double want = 0.0, magnitude = 0.0;
            for (std::int64_t i = 0; i < cols; ++i) {
              const double term = double{row[static_cast<std::size_t>(i)]} *
                                  double{x[static_cast<std::size_t>(t * cols + i)]};
              want += term;
              magnitude += std::fabs(term);
            }
            // A sum of n products is off by at most n * 2^-24 of the sum of their magnitudes.
            const double bound = static_cast<double>(cols) * 0x1p-24 * magnitude;
            REQUIRE(std::fabs(double{got[static_cast<std::size_t>(t * 5 + r)]} - want) <= bound);
          }
        }
      }
}

TEST_CASE("a token's products do not depend on its company") {
  std::mt19937 random(1);
  for (const TensorType type : direct_types) {
    CAPTURE(type_name(type));
    const Weight weight(type, 64, 5, random);
    std::vector<float> x(15 * 64);
    for (float& value : x) value = static_cast<float>(random() % 1000) / 7.0f;
    const std::vector<float> all = products(weight.tensor, x);
    for (std::size_t t = 0; t < 15; ++t) {
      const std::vector<float> one = products(weight.tensor, {x.data() + t * 64, x.data() + (t + 1) * 64});
      REQUIRE(std::memcmp(one.data(), all.data() + t * 5, sizeof(float) * 5) == 0);
    }
  }
}

TEST_CASE("types and columns without a kernel are told apart") {
  std::mt19937 random(1);
  CHECK(!has_matvec(Weight(TensorType::Q6_K, 256, 1, random).tensor));
  CHECK(!has_matvec(Weight(TensorType::F32, 33, 1, random).tensor));
  CHECK(!has_matvec(Weight(TensorType::F16, 16, 1, random).tensor));
}
