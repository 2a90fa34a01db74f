// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Products of a weight tensor with few vectors, straight from the file's blocks.

#include <cstdint>

#include "common/gguf.hpp"

namespace kvfolia_examples {

/// With more vectors than these a weight is better widened once for all of them.
inline constexpr std::int64_t matvec_tokens = 32;

/// Whether there is a kernel for the tensor's type and columns.
bool has_matvec(const GgufTensor& weight);

/// Vectors of weight.cols() floats, and where their products go: [token][row of the weight].
struct MatvecArgs {
  const float* x;
  std::int64_t tokens;
  std::int64_t x_stride;  ///< floats from one token to the next; likewise
  float* out;
  std::int64_t out_stride;
};

/// Products with the weight's rows from `begin` to before `end`. Every weight is widened to what
/// `dequantize_row` gives and sums are fp32, so nothing is rounded that a product of widened weights
/// does not round; a token's bits depend neither on other tokens nor on the range of rows.
void matvec(const GgufTensor& weight, std::int64_t begin, std::int64_t end, const MatvecArgs& args);

}  // namespace kvfolia_examples
