// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// From codes, as ldmatrix leaves them in registers, to the operands of mma.
//
// A register holds four bytes of a token: one pair of 16-bit numbers, four codes of 8 bits or eight of 4. Of
// values, which come transposed, it holds two bytes each of two tokens. Which dim an element of mma's operand
// is depends on the width of codes: queries are put into the same order, sums into that of values.

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/fp16.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/quant/code_kind.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

using kvfolia::detail::code_kind;
using kvfolia::detail::CodeKind;
using kvfolia::detail::kind_bits;

/// Whether kernels read codes of a kind.
constexpr bool unpacks(CodeKind kind) {
  switch (kind) {
    case CodeKind::fp16:
    case CodeKind::bf16:
    case CodeKind::int8:
    case CodeKind::e4m3:
    case CodeKind::e5m2:
    case CodeKind::uint4:
    case CodeKind::int4:
    case CodeKind::e2m1: return true;
    default: return false;
  }
}

/// Pairs of numbers that a register's codes become.
KVF_INLINE KVF_HD constexpr int pairs_per_register(CodeKind kind) { return 16 / kind_bits(kind); }

/// What unpacked numbers exceed codes by. Those of 4-bit integers come with the fewest instructions between
/// 64 and 79, which takes products whose other factor is exact; else from -8 to 7.
KVF_INLINE KVF_HD constexpr int code_excess(CodeKind kind, bool biased) {
  switch (kind) {
    case CodeKind::uint4: return biased ? 64 : -8;
    case CodeKind::int4: return biased ? 72 : 0;
    default: return 0;
  }
}

/// What unpacked numbers are multiplied by, beside scales: those of e2m1 are too small by this.
KVF_INLINE KVF_HD constexpr float code_unit(CodeKind kind) { return kind == CodeKind::e2m1 ? 0x1p14f : 1.0f; }

/// The dim of a key that element `e` of register 2 * `half` (A) or `half` (B) of a lane's operand is, in the
/// step-th mma along the dims. `quad` is lane % 4.
KVF_INLINE KVF_HD constexpr int key_dim_of(CodeKind kind, int step, int quad, int half, int e) {
  switch (kind_bits(kind)) {
    case 16: return 16 * step + 8 * half + 2 * quad + e;
    case 8: return 16 * step + 4 * quad + 2 * half + e;
    default: return step / 2 * 32 + 8 * quad + step % 2 * 2 + half + 4 * e;
  }
}
/// The dim of a value that row `row` + 8 * `half` of the tile-th mma's result is.
KVF_INLINE KVF_HD constexpr int value_dim_of(CodeKind kind, int tile, int row, int half) {
  switch (kind_bits(kind)) {
    case 16: return 16 * tile + 8 * half + row;
    case 8: return 16 * tile + 2 * row + half;
    default: return tile / 2 * 32 + 4 * row + tile % 2 * 2 + half;
  }
}

/// Bytes that one instruction moves of rows of so many, a multiple of 4.
KVF_INLINE KVF_HD constexpr int largest_unit(int bytes) {
  return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : 4;
}

/// One of the two fp16 of a word.
KVF_INLINE KVF_HD float half_of(std::uint32_t word, int half) {
  return static_cast<float>(fp16::from_bits(static_cast<std::uint16_t>(word >> 16 * half)));
}
template <class Ctx>
KVF_INLINE KVF_HD std::uint32_t multiply_fp16x2(std::uint32_t a, std::uint32_t b) {
  return Ctx::fma_fp16x2(a, b, 0x80008000u);  // + -0 keeps the sign of 0
}
template <class Ctx, bool Bf16>
KVF_INLINE KVF_HD std::uint32_t pack(float first, float second) {
  return Bf16 ? Ctx::pack_bf16x2(first, second) : Ctx::pack_fp16x2(first, second);
}

/// Pairs of a key's neighbours, or of two tokens' numbers of one dim. Exact, but for code_unit().
template <class Ctx, CodeKind Kind, bool IsValue, bool Biased, int Pairs>
KVF_INLINE KVF_HD void unpack(std::uint32_t word, std::uint32_t (&pairs)[Pairs]) {
  static_assert(Pairs == pairs_per_register(Kind));
  // Bytes 0 and 1, then 2 and 3; of two tokens 0 and 2, then 1 and 3. Each in front of, or behind, one of
  // another word's first byte.
  constexpr std::uint32_t low_first = IsValue ? 0x4240 : 0x4140, low_second = IsValue ? 0x4341 : 0x4342;
  constexpr std::uint32_t high_first = IsValue ? 0x2404 : 0x1404, high_second = IsValue ? 0x3414 : 0x3424;
  if constexpr (Kind == CodeKind::fp16 || Kind == CodeKind::bf16) {
    pairs[0] = word;
  } else if constexpr (Kind == CodeKind::int8) {
    // As the low bits of an fp16 from 1024 on, code + 128 is what it is beyond that.
    const std::uint32_t biased = word ^ 0x80808080u;
    constexpr std::uint32_t exponent = 0x64646464u, less = 0xe480e480u;  // -1152
    pairs[0] = Ctx::add_fp16x2(Ctx::prmt(biased, exponent, low_first), less);
    pairs[1] = Ctx::add_fp16x2(Ctx::prmt(biased, exponent, low_second), less);
  } else if constexpr (Kind == CodeKind::e5m2) {
    // The upper byte of an fp16.
    pairs[0] = Ctx::prmt(word, 0u, high_first);
    pairs[1] = Ctx::prmt(word, 0u, high_second);
  } else if constexpr (Kind == CodeKind::e4m3) {
    constexpr std::uint32_t first = IsValue ? 0x4420 : 0x4410, second = IsValue ? 0x4431 : 0x4432;
    pairs[0] = Ctx::e4m3x2_to_fp16x2(Ctx::prmt(word, 0u, first));
    pairs[1] = Ctx::e4m3x2_to_fp16x2(Ctx::prmt(word, 0u, second));
  } else if constexpr (Kind == CodeKind::e2m1) {
    // As fp16's lowest exponent bits and highest mantissa bit, subnormal ones too.
    const std::uint32_t placed[4] = {word << 9, word << 5, word << 1, word >> 3};
    KVF_UNROLLED (i, 4) pairs[i] = Ctx::and_or(placed[i], 0x0e000e00u, (placed[i] << 3) & 0x80008000u);
  } else if constexpr (Biased) {
    static_assert(Kind == CodeKind::uint4 || Kind == CodeKind::int4);
    // Nibbles i and i + 4, as the bits of an fp16 from 64 on that count 1.
    const std::uint32_t placed[4] = {word << 4, word, word >> 4, word >> 8};
    KVF_UNROLLED (i, 4) pairs[i] = Ctx::and_or(placed[i], 0x00f000f0u, 0x54005400u);
  } else {
    static_assert(Kind == CodeKind::uint4 || Kind == CodeKind::int4);
    // Nibbles i and i + 4, as the low bits of an fp16 from 1024 on; the upper ones of a byte count 16.
    constexpr std::uint32_t exponent = 0x64006400u, low = 0x000f000fu, high = 0x00f000f0u;
    constexpr std::uint32_t less = 0xe408e408u;                                      // -1032
    constexpr std::uint32_t sixteenth = 0x2c002c00u, less_sixteenths = 0xd480d480u;  // 1/16, -72
    pairs[0] = Ctx::add_fp16x2(Ctx::and_or(word, low, exponent), less);
    pairs[1] = Ctx::fma_fp16x2(Ctx::and_or(word, high, exponent), sixteenth, less_sixteenths);
    pairs[2] = Ctx::add_fp16x2(Ctx::and_or(word >> 8, low, exponent), less);
    pairs[3] = Ctx::fma_fp16x2(Ctx::and_or(word >> 8, high, exponent), sixteenth, less_sixteenths);
  }
}

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
