// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The host context's fragments against those of CuTe, NVIDIA's own description of the instructions. Built
// where CMake finds its headers (-DKVFOLIA_CUTE_INCLUDE=...). Of movmatrix CuTe describes nothing that could
// be compared.

#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/mma_traits_sm80.hpp>

#include "simt/fragments.hpp"
#include "support/catch.hpp"

using namespace kvfolia_tests::simt;

namespace {

/// CuTe's layouts take (thread, element) to an index into a matrix whose rows lie one element apart.
template <class Layout, class Element>
int mismatches(const Layout& layout, int elements, int rows, const Element& element,
               bool is_transposed = false) {
  int wrong = 0;
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < elements; ++i) {
      const int index = static_cast<int>(layout(lane, i));
      auto e = element(lane, i);
      if (is_transposed) e = {e.col, e.row};
      wrong += index % rows != e.row || index / rows != e.col;
    }
  return wrong;
}

template <class Mma>
void check_mma() {
  using Traits = cute::MMA_Traits<Mma>;
  CHECK(mismatches(typename Traits::ALayout{}, 8, 16, mma_a) == 0);
  CHECK(mismatches(typename Traits::BLayout{}, 4, 8, mma_b, true) == 0);  // its B is n x k
  CHECK(mismatches(typename Traits::CLayout{}, 4, 16, mma_d) == 0);
}

/// Bits of a row of 16 bytes or of a matrix: element e of row r is bits 128 r + 16 e on.
template <class Copy>
int copy_mismatches(int matrices, bool is_transposed) {
  using Traits = cute::Copy_Traits<Copy>;
  const typename Traits::SrcLayout source{};
  const typename Traits::DstLayout destination{};
  int wrong = 0;
  for (int lane = 0; lane < 32; ++lane)
    for (int m = 0; m < matrices; ++m)
      for (int half = 0; half < 2; ++half) {
        Element e = quarter_element(lane, half);
        if (is_transposed) e = {e.col, e.row};
        // The lane that gives the row's address, and the bit of it.
        const int from = static_cast<int>(source(8 * m + e.row, 16 * e.col));
        wrong += static_cast<int>(destination(lane, (2 * m + half) * 16)) != from;
      }
  return wrong;
}

}  // namespace

TEST_CASE("operands of mma lie as CuTe says") {
  check_mma<cute::SM80_16x8x16_F32F16F16F32_TN>();
  check_mma<cute::SM80_16x8x16_F32BF16BF16F32_TN>();
}

TEST_CASE("ldmatrix gives lanes what CuTe says") {
  CHECK(copy_mismatches<cute::SM75_U32x4_LDSM_N>(4, false) == 0);
  CHECK(copy_mismatches<cute::SM75_U16x8_LDSM_T>(4, true) == 0);
}
