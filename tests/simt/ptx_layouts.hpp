// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Host-side transcription of register layouts that NVIDIA's PTX ISA manual specifies, from its sections
// "Matrix Fragments for mma.m16n8k16 with floating point type", "Warp-level matrix load instruction:
// ldmatrix", "Warp-level matrix transpose instruction: movmatrix" and "Data Movement and Conversion
// Instructions: prmt".

#include <cstdint>

namespace ptx {

// A position in a matrix, counted from zero.
struct Element {
  int row;
  int col;
  constexpr bool operator==(const Element&) const = default;
};

// Position in A (row = M, col = K) of a_i in mma.m16n8k16 with .f16/.bf16, i = 0..7: a_i is half i % 2 (low
// first) of the lane's register i / 2.
constexpr Element mma_a(int lane, int i) {
  const int group_id = lane >> 2;
  const int thread_id_in_group = lane % 4;
  const bool upper_rows = (0 <= i && i < 2) || (4 <= i && i < 6);
  return {upper_rows ? group_id : group_id + 8,
          i < 4 ? thread_id_in_group * 2 + (i & 0x1) : thread_id_in_group * 2 + (i & 0x1) + 8};
}

// Position in B (row = K, col = N) of b_i in mma.m16n8k16 with .f16/.bf16, i = 0..3: b_i is half i % 2 (low
// first) of the lane's register i / 2.
constexpr Element mma_b(int lane, int i) {
  const int group_id = lane >> 2;
  const int thread_id_in_group = lane % 4;
  return {i < 2 ? thread_id_in_group * 2 + (i & 0x1) : thread_id_in_group * 2 + (i & 0x1) + 8, group_id};
}

// Position in C or D (row = M, col = N) of c_i in mma.m16n8k16 with .f32 accumulators, i = 0..3: c_i is the
// lane's register i.
constexpr Element mma_c(int lane, int i) {
  const int group_id = lane >> 2;
  const int thread_id_in_group = lane % 4;
  return {i < 2 ? group_id : group_id + 8, thread_id_in_group * 2 + (i & 0x1)};
}

// Lane whose address operand points at a row (0..7) of a matrix (0..3) of ldmatrix .m8n8.x4: lane n gives
// addr n, and each matrix takes the next eight addresses.
constexpr int ldmatrix_address_lane(int matrix, int row) { return matrix * 8 + row; }

// The manual's table for .x4 names these lanes.
static_assert(ldmatrix_address_lane(0, 0) == 0 && ldmatrix_address_lane(0, 7) == 7);
static_assert(ldmatrix_address_lane(1, 0) == 8 && ldmatrix_address_lane(1, 7) == 15);
static_assert(ldmatrix_address_lane(2, 0) == 16 && ldmatrix_address_lane(2, 7) == 23);
static_assert(ldmatrix_address_lane(3, 0) == 24 && ldmatrix_address_lane(3, 7) == 31);

// Position in an 8x8 matrix of 16-bit elements of half i (0 low, 1 high) of a lane's destination register,
// for ldmatrix without .trans: four lanes in turn share a row, two neighbouring elements each.
constexpr Element ldmatrix_element(int lane, int i) { return {lane / 4, (lane % 4) * 2 + i}; }

// The same for ldmatrix with .trans, as a position in the matrix in memory (row = the one whose address was
// given): the rows in memory are the columns of the matrix that the registers hold.
constexpr Element ldmatrix_trans_element(int lane, int i) {
  const Element loaded = ldmatrix_element(lane, i);
  return {loaded.col, loaded.row};
}

// Position in the source matrix (laid out as ldmatrix_element) of what movmatrix.sync.aligned.m8n8.trans.b16
// leaves in half i of a lane's destination register: four lanes in turn share a column of the source.
constexpr Element movmatrix_source(int lane, int i) { return {(lane % 4) * 2 + i, lane / 4}; }

// Result of prmt.b32 without a mode: the low three bits of selector nibble n choose the byte of {b, a} that
// goes to byte n, and the nibble's top bit fills byte n with that byte's sign bit instead.
constexpr std::uint32_t prmt(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
  const std::uint64_t source = (static_cast<std::uint64_t>(b) << 32) | a;
  std::uint32_t result = 0;
  for (unsigned n = 0; n < 4; ++n) {
    const std::uint32_t control = (selector >> (4 * n)) & 0xfU;
    std::uint32_t byte = static_cast<std::uint32_t>((source >> (8 * (control & 0x7U))) & 0xffU);
    if ((control & 0x8U) != 0) {
      byte = (byte & 0x80U) != 0 ? 0xffU : 0x00U;
    }
    result |= byte << (8 * n);
  }
  return result;
}

}  // namespace ptx
