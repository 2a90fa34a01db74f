// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Where the elements of a matrix are while a warp holds it in registers.

#include <cstdint>

namespace kvfolia_tests::simt {

struct Element {
  int row;
  int col;
};

/// Matrices of 8 rows of 8 elements of 16 bits: a lane holds two neighbours, in one register. Larger
/// operands of mma are made of these.
constexpr Element quarter_element(int lane, int half) { return {lane / 4, lane % 4 * 2 + half}; }

/// Operands of m16n8k16, `i` counts a lane's elements, two a register (of d: one).
constexpr Element mma_a(int lane, int i) {  // 16 x 16: upper left, lower left, upper right, lower right
  const Element e = quarter_element(lane, i % 2);
  return {e.row + i / 2 % 2 * 8, e.col + i / 4 * 8};
}
constexpr Element mma_b(int lane, int i) {  // 16 x 8, whose columns lie as the rows of others
  const Element e = quarter_element(lane, i % 2);
  return {e.col + i / 2 * 8, e.row};
}
constexpr Element mma_d(int lane, int i) {  // 16 x 8 floats
  const Element e = quarter_element(lane, i % 2);
  return {e.row + i / 2 * 8, e.col};
}

}  // namespace kvfolia_tests::simt
