// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// 16-bit storage types. They store and convert; arithmetic is done in float.

#include <cstdint>
#include <type_traits>

#include "kvfolia/core/config.hpp"

namespace kvfolia::inline KVF_ABI {

/// IEEE 754 binary16. From float: round to nearest, ties to even; overflow gives infinity, NaN stays
/// NaN (quiet, the upper payload bits kept).
struct fp16 {
  std::uint16_t bits;

  fp16() = default;
  KVF_INLINE KVF_HD constexpr explicit fp16(float value) : bits(round_bits(value)) {}
  KVF_INLINE KVF_HD constexpr explicit operator float() const {
#if defined(__CUDA_ARCH__)
    if (!__builtin_is_constant_evaluated()) {  // the same number; of NaN the GPU has but one
      float wide;
      asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
      return wide;
    }
#endif
    // Masks rather than branches, so that a loop over values vectorises.
    const std::uint32_t magnitude = bits & 0x7fffu;
    const std::uint32_t special = magnitude >= 0x7c00u ? ~0u : 0u;
    const std::uint32_t nan = magnitude > 0x7c00u ? 0x400000u : 0u;  // is made quiet
    const std::uint32_t normal = ((magnitude << 13) + 0x38000000u + (special & 0x38000000u)) | nan;
    // Behind 0.5 the mantissa counts units of 2^-24, as a subnormal value's does.
    const float subnormal = __builtin_bit_cast(float, 0x3f000000u | (magnitude & 0x3ffu)) - 0.5f;
    const std::uint32_t small = magnitude < 0x400u ? ~0u : 0u;
    const std::uint32_t wide = (__builtin_bit_cast(std::uint32_t, subnormal) & small) | (normal & ~small);
    return __builtin_bit_cast(float, (static_cast<std::uint32_t>(bits & 0x8000u) << 16) | wide);
  }

  KVF_INLINE KVF_HD static constexpr fp16 from_bits(std::uint16_t raw) {
    fp16 value{};
    value.bits = raw;
    return value;
  }

 private:
  KVF_INLINE KVF_HD static constexpr std::uint16_t round_bits(float value) {
    const auto raw = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t sign = (raw >> 16) & 0x8000u;
    const std::uint32_t magnitude = raw & 0x7fffffffu;
    std::uint32_t half = 0;
    if (magnitude > 0x7f800000u) {
      half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    } else if (magnitude >= 0x477ff000u) {  // 65520, halfway from the largest finite value
      half = 0x7c00u;
    } else if (magnitude >= 0x38800000u) {  // 2^-14, the smallest normal value
      half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    } else if (magnitude > 0x33000000u) {  // above 2^-25, halfway from zero
      const std::uint32_t shift = 126u - (magnitude >> 23);
      const std::uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
      const std::uint32_t tie = 1u << (shift - 1);
      const std::uint32_t rest = mantissa & (2u * tie - 1u);
      half = mantissa >> shift;
      half += rest > tie || (rest == tie && (half & 1u)) ? 1u : 0u;
    }
    return static_cast<std::uint16_t>(sign | half);
  }
};

/// The upper half of a float. From float: round to nearest, ties to even; NaN stays NaN.
struct bf16 {
  std::uint16_t bits;

  bf16() = default;
  KVF_INLINE KVF_HD constexpr explicit bf16(float value) : bits(round_bits(value)) {}
  KVF_INLINE KVF_HD constexpr explicit operator float() const {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
  }

  KVF_INLINE KVF_HD static constexpr bf16 from_bits(std::uint16_t raw) {
    bf16 value{};
    value.bits = raw;
    return value;
  }

 private:
  KVF_INLINE KVF_HD static constexpr std::uint16_t round_bits(float value) {
    const auto raw = __builtin_bit_cast(std::uint32_t, value);
    if ((raw & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((raw >> 16) | 0x40u);
    return static_cast<std::uint16_t>((raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16);
  }
};

static_assert(sizeof(fp16) == 2 && std::is_trivial_v<fp16>);
static_assert(sizeof(bf16) == 2 && std::is_trivial_v<bf16>);
static_assert(fp16(1.0f).bits == 0x3c00 && fp16(65520.0f).bits == 0x7c00 && fp16(0x1p-25f).bits == 0);
static_assert(float(fp16::from_bits(1)) == 0x1p-24f && bf16(1.0f).bits == 0x3f80);

}  // namespace kvfolia::inline KVF_ABI
