// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// How vectors of codes are read out of pages: of one token's neighbouring dims, or of one dim of
// neighbouring tokens.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/fp16.hpp"
#include "kvfolia/core/small_floats.hpp"
#include "kvfolia/cpu/simd.hpp"
#include "kvfolia/cpu/target.hpp"
#include "kvfolia/layout/orders.hpp"
#include "kvfolia/quant/code_kind.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

using kvfolia::detail::code_kind;
using kvfolia::detail::CodeKind;
using kvfolia::detail::kind_bits;

/// The numbers that bytes or nibbles in the lowest bits of lanes, alone there, stand for.
template <CodeKind Kind>
KVF_INLINE Floats floats_of_bits(Uint32s bits) {
  const Uint32Tag u;
  const FloatTag f;
  const auto integers = [&](Uint32s x) { return hn::ConvertTo(f, hn::BitCast(Int32Tag(), x)); };
  // As the exponent and mantissa of a float they are too small by a power of two; the products are exact.
  if constexpr (Kind == CodeKind::e2m1) {
    const Uint32s magnitude = hn::ShiftLeft<22>(hn::And(bits, hn::Set(u, 7u)));
    const Uint32s sign = hn::ShiftLeft<28>(hn::And(bits, hn::Set(u, 8u)));
    const Floats value = hn::Mul(hn::BitCast(f, magnitude), broadcast(0x1p126f));
    return hn::BitCast(f, hn::Or(hn::BitCast(u, value), sign));
  } else if constexpr (Kind == CodeKind::e4m3) {
    const Uint32s magnitude = hn::ShiftLeft<20>(hn::And(bits, hn::Set(u, 0x7fu)));
    const Uint32s sign = hn::ShiftLeft<24>(hn::And(bits, hn::Set(u, 0x80u)));
    const Floats value = hn::Mul(hn::BitCast(f, magnitude), broadcast(0x1p120f));
    // The largest exponent has numbers, too, and one NaN.
    const auto nan = hn::RebindMask(u, hn::Eq(value, broadcast(480.0f)));
    const Uint32s rest = hn::Or(sign, hn::IfThenElseZero(nan, hn::Set(u, 0x7f800000u)));
    return hn::BitCast(f, hn::Or(hn::BitCast(u, value), rest));
  } else if constexpr (Kind == CodeKind::e5m2) {
    return floats_of_half_bits(hn::ShiftLeft<8>(bits));
  } else if constexpr (Kind == CodeKind::int4) {
    return integers(hn::Sub(bits, hn::Set(u, 8u)));
  } else if constexpr (Kind == CodeKind::mid4) {
    return hn::Sub(integers(bits), broadcast(7.5f));
  } else {
    static_assert(Kind == CodeKind::uint4);
    return integers(bits);
  }
}

/// The numbers of nibbles in the lowest bits of lanes, whatever is above them.
template <CodeKind Kind>
KVF_INLINE Floats floats_of_nibbles(Uint32s words) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3  // one instruction looks all sixteen up
  alignas(64) static constexpr float table[4][16] = {
      {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
      {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7},
      {-7.5f, -6.5f, -5.5f, -4.5f, -3.5f, -2.5f, -1.5f, -0.5f, 0.5f, 1.5f, 2.5f, 3.5f, 4.5f, 5.5f, 6.5f,
       7.5f},
      {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6}};
  constexpr int row = static_cast<int>(Kind) - static_cast<int>(CodeKind::uint4);
  return Floats{_mm512_permutexvar_ps(words.raw, _mm512_load_ps(table[row]))};
#else
  return floats_of_bits<Kind>(hn::And(words, hn::Set(Uint32Tag(), 15u)));
#endif
}

/// Nibbles of dims [dim, dim + lanes) of a token in the lowest bits of lanes, with others above them.
KVF_INLINE Uint32s load_nibbles(const std::byte* token, int dim) {
  const Uint32Tag u;
  // Nibble i of a little-endian word is dim i: words in every lane, shifted as far as each needs.
  if constexpr (lanes <= 8) {
    std::uint32_t word;
    std::memcpy(&word, token + dim / 8 * 4, sizeof word);
    const Uint32s first = hn::Set(u, lanes < 8 ? static_cast<std::uint32_t>(dim) % 8 : 0u);
    const Uint32s shifts = hn::ShiftLeft<2>(hn::And(hn::Add(lane_numbers(), first), hn::Set(u, 7u)));
    return hn::Shr(hn::Set(u, word), shifts);
  } else {
    std::uint64_t two;
    std::memcpy(&two, token + dim / 2, sizeof two);
    const hn::RepartitionToWide<Uint32Tag> wide;
    const Uint32s words = hn::BitCast(u, hn::Set(wide, two));
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3 && defined(__AVX512VBMI__)
    // Each byte is any eight bits of its half of a vector's pair of words: the first of a lane matters.
    return Uint32s{_mm512_multishift_epi64_epi8(hn::ShiftLeft<2>(lane_numbers()).raw, words.raw)};
#else
    const Uint32s each =
        hn::TableLookupLanes(words, hn::IndicesFromVec(u, hn::ShiftRight<3>(lane_numbers())));
    return hn::Shr(each, hn::ShiftLeft<2>(hn::And(lane_numbers(), hn::Set(u, 7u))));
#endif
  }
}

/// Codes of dims [dim, dim + lanes) of a token whose codes are contiguous; dim is a multiple of lanes,
/// that of the vector a multiple of 8 for 4-bit codes.
template <CodeKind Kind>
KVF_INLINE Floats load_codes(const std::byte* token, int dim) {
  const FloatTag f;
  if constexpr (Kind == CodeKind::fp32) {
    return load_floats(reinterpret_cast<const float*>(token) + dim);
  } else if constexpr (Kind == CodeKind::fp16) {
    return load_floats(reinterpret_cast<const fp16*>(token) + dim);
  } else if constexpr (Kind == CodeKind::bf16) {
    return load_floats(reinterpret_cast<const bf16*>(token) + dim);
  } else if constexpr (Kind == CodeKind::int8) {
    return hn::ConvertTo(f, hn::PromoteTo(Int32Tag(), load_as<std::int8_t>(token + dim)));
  } else if constexpr (Kind == CodeKind::e5m2 || Kind == CodeKind::e4m3) {
    return floats_of_bits<Kind>(hn::PromoteTo(Uint32Tag(), load_as<std::uint8_t>(token + dim)));
  } else {
    return floats_of_nibbles<Kind>(load_nibbles(token, dim));
  }
}

/// Whether lanes' worth of neighbouring slots can be read in an order, `Order::dim_multiple` dims at once.
template <CodeKind Kind, class Order>
inline constexpr bool reads_slots = false;
template <CodeKind Kind, int X>
inline constexpr bool reads_slots<Kind, DimMajor<X>> = Kind != CodeKind::other &&
                                                       (X == 1 ? kind_bits(Kind) >= 8
                                                               : X * kind_bits(Kind) == 32);

/// X dims of lanes neighbouring slots, from the codes of the first one on.
template <CodeKind Kind, int X>
KVF_INLINE void load_slots(const std::byte* codes, Floats (&dims)[X]) {
  static_assert(reads_slots<Kind, DimMajor<X>>);
  if constexpr (X == 1) {
    dims[0] = load_codes<Kind>(codes, 0);
  } else {
    const Uint32Tag u;
    const Uint32s words = load_as<std::uint32_t>(codes);
    constexpr int bits = 32 / X;
    unroll<X>([&](auto constant) KVF_INLINE_LAMBDA {
      constexpr int i = constant;
      const Uint32s shifted = hn::ShiftRight<i * bits>(words);
      if constexpr (Kind == CodeKind::bf16) {
        const Uint32s up = i == 0 ? hn::ShiftLeft<16>(words) : hn::And(words, hn::Set(u, 0xffff0000u));
        dims[i] = hn::BitCast(FloatTag(), up);
      } else if constexpr (Kind == CodeKind::fp16) {
        dims[i] = floats_of_half_bits(hn::And(shifted, hn::Set(u, 0xffffu)));
      } else if constexpr (Kind == CodeKind::int8) {
        const auto up = hn::BitCast(Int32Tag(), hn::ShiftLeft<24 - i * bits>(words));
        dims[i] = hn::ConvertTo(FloatTag(), hn::ShiftRight<24>(up));
      } else if constexpr (bits == 8) {
        dims[i] = floats_of_bits<Kind>(hn::And(shifted, hn::Set(u, 0xffu)));
      } else {
        dims[i] = floats_of_nibbles<Kind>(shifted);
      }
    });
  }
}

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
