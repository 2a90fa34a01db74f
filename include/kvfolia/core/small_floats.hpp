// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Storage types of 8 bits and fewer. They store and convert; arithmetic is done in float.
// Source: OCP 8-bit floating point (OFP8) 1.0 and OCP microscaling formats (MX) 1.0.

#include <cstdint>
#include <type_traits>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/rounding.hpp"

namespace kvfolia::inline KVF_ABI {

namespace detail {

/// A sign, then exponent and mantissa bits that grow with the magnitude, in units that integers can
/// round. Largest is the code of the largest finite magnitude.
template <int MantissaBits, int Bias, std::uint32_t Largest>
struct SmallFloat {
  static constexpr std::uint32_t lowest_exponent = 128 - Bias;  ///< a float's, of the smallest normal value

  /// To nearest, ties to even; saturates. `magnitude` is a float's bits without the sign, no NaN.
  KVF_INLINE KVF_HD static constexpr std::uint32_t round(std::uint32_t magnitude) {
    // Subnormal values are counted in the units of the smallest normal ones.
    const std::uint32_t exponent = magnitude >> 23;
    const std::uint32_t below = exponent < lowest_exponent ? lowest_exponent - exponent : 0;
    const std::uint32_t shift = 23 - MantissaBits + (below < 8 ? below : 8);  // 8 and more give 0
    const std::uint32_t mantissa = (magnitude & 0x7fffffu) | (exponent != 0 ? 0x800000u : 0u);
    const std::uint32_t even = (mantissa >> shift) & 1u;
    const std::uint32_t units = (mantissa + (1u << (shift - 1)) - 1 + even) >> shift;
    const std::uint32_t above = exponent < lowest_exponent ? 0 : exponent - lowest_exponent;
    const std::uint32_t code = (above << MantissaBits) + units;
    return code < Largest ? code : Largest;
  }

  KVF_INLINE KVF_HD static constexpr float widen(std::uint32_t code) {
    const std::uint32_t normal = (code << (23 - MantissaBits)) + ((127u - Bias) << 23);
    // The unit of subnormal values is a power of two: the product is exact.
    const float unit = __builtin_bit_cast(float, (lowest_exponent - MantissaBits) << 23);
    const float subnormal = static_cast<float>(static_cast<std::int32_t>(code)) * unit;
    return code < (1u << MantissaBits) ? subnormal : __builtin_bit_cast(float, normal);
  }
};

}  // namespace detail

/// 4 exponent bits, 3 mantissa bits, no infinity. From float: round to nearest, ties to even; what is
/// larger than 448 gives 448, infinity too; NaN stays NaN.
struct fp8_e4m3 {
  static constexpr float largest = 448.0f;
  std::uint8_t bits;

  fp8_e4m3() = default;
  KVF_INLINE KVF_HD constexpr explicit fp8_e4m3(float value) : bits(round_bits(value)) {}
  KVF_INLINE KVF_HD constexpr explicit operator float() const {
    const std::uint32_t magnitude = bits & 0x7fu;
    const float value = magnitude == 0x7fu ? detail::quiet_nan : Format::widen(magnitude);
    return (bits & 0x80u) != 0 ? -value : value;
  }
  KVF_INLINE KVF_HD static constexpr fp8_e4m3 from_bits(std::uint8_t raw) {
    fp8_e4m3 value{};
    value.bits = raw;
    return value;
  }

 private:
  using Format = detail::SmallFloat<3, 7, 0x7e>;
  KVF_INLINE KVF_HD static constexpr std::uint8_t round_bits(float value) {
    const auto raw = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t magnitude = raw & 0x7fffffffu;
    const std::uint32_t code = magnitude > 0x7f800000u ? 0x7fu : Format::round(magnitude);
    return static_cast<std::uint8_t>(code | ((raw >> 24) & 0x80u));
  }
};

/// 5 exponent bits, 2 mantissa bits. From float: round to nearest, ties to even; what is larger than
/// 57344 gives 57344, infinity too; NaN stays NaN.
struct fp8_e5m2 {
  static constexpr float largest = 57344.0f;
  std::uint8_t bits;

  fp8_e5m2() = default;
  KVF_INLINE KVF_HD constexpr explicit fp8_e5m2(float value) : bits(round_bits(value)) {}
  KVF_INLINE KVF_HD constexpr explicit operator float() const {
    const std::uint32_t magnitude = bits & 0x7fu;
    const float special = magnitude == 0x7cu ? __builtin_inff() : detail::quiet_nan;
    const float value = magnitude >= 0x7cu ? special : Format::widen(magnitude);
    return (bits & 0x80u) != 0 ? -value : value;
  }
  KVF_INLINE KVF_HD static constexpr fp8_e5m2 from_bits(std::uint8_t raw) {
    fp8_e5m2 value{};
    value.bits = raw;
    return value;
  }

 private:
  using Format = detail::SmallFloat<2, 15, 0x7b>;
  KVF_INLINE KVF_HD static constexpr std::uint8_t round_bits(float value) {
    const auto raw = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t magnitude = raw & 0x7fffffffu;
    const std::uint32_t code = magnitude > 0x7f800000u ? 0x7fu : Format::round(magnitude);
    return static_cast<std::uint8_t>(code | ((raw >> 24) & 0x80u));
  }
};

/// 2 exponent bits, 1 mantissa bit, in the low half of a byte: 0, 0.5, 1, 1.5, 2, 3, 4, 6. From float:
/// round to nearest, ties to even; what is larger than 6 gives 6. There is no NaN: it gives 6.
struct fp4_e2m1 {
  static constexpr float largest = 6.0f;
  std::uint8_t bits;

  fp4_e2m1() = default;
  KVF_INLINE KVF_HD constexpr explicit fp4_e2m1(float value) : bits(round_bits(value)) {}
  KVF_INLINE KVF_HD constexpr explicit operator float() const {
    const float value = Format::widen(bits & 7u);
    return (bits & 8u) != 0 ? -value : value;
  }
  KVF_INLINE KVF_HD static constexpr fp4_e2m1 from_bits(std::uint8_t raw) {
    fp4_e2m1 value{};
    value.bits = raw;
    return value;
  }

 private:
  using Format = detail::SmallFloat<1, 1, 7>;
  KVF_INLINE KVF_HD static constexpr std::uint8_t round_bits(float value) {
    const auto raw = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t magnitude = raw & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 7;
    return static_cast<std::uint8_t>(Format::round(magnitude) | ((raw >> 28) & 8u));
  }
};

/// A power of two, 2^(bits - 127), or NaN (255): a scale. From float: the largest power of two that is
/// not above the value, at least 2^-127; NaN, infinity and whatever has its sign set give NaN.
struct e8m0 {
  std::uint8_t bits;

  e8m0() = default;
  KVF_INLINE KVF_HD constexpr explicit e8m0(float value)
      : bits(static_cast<std::uint8_t>((__builtin_bit_cast(std::uint32_t, value) >> 23) > 0xffu
                                           ? 0xffu  // the sign is set
                                           : __builtin_bit_cast(std::uint32_t, value) >> 23)) {}
  KVF_INLINE KVF_HD constexpr explicit operator float() const {
    if (bits == 0xff) return detail::quiet_nan;
    if (bits == 0) return __builtin_bit_cast(float, 0x00400000u);
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 23);
  }
  KVF_INLINE KVF_HD static constexpr e8m0 from_bits(std::uint8_t raw) {
    e8m0 value{};
    value.bits = raw;
    return value;
  }
};

static_assert(sizeof(fp8_e4m3) == 1 && std::is_trivial_v<fp8_e4m3> && sizeof(e8m0) == 1);
static_assert(fp8_e4m3(464.0f).bits == 0x7e && fp8_e4m3(0x1p-9f).bits == 1 && fp8_e4m3(0x1p-10f).bits == 0);
static_assert(fp4_e2m1(-2.5f).bits == 0xc && fp4_e2m1(0.25f).bits == 0 && fp4_e2m1(5.0f).bits == 6);
static_assert(e8m0(6.0f).bits == 129 && float(fp8_e5m2::from_bits(0x7b)) == 57344.0f);

}  // namespace kvfolia::inline KVF_ABI
