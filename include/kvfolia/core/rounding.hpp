// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Rounding that no compiler flag changes: what encoders are made of.

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/fp16.hpp"

namespace kvfolia::inline KVF_ABI::detail {

inline constexpr float quiet_nan = __builtin_nanf("");

// For templates: nvcc's front end fails on __builtin_bit_cast of what depends on a parameter.
KVF_INLINE KVF_HD constexpr std::uint32_t bits_of(float x) { return __builtin_bit_cast(std::uint32_t, x); }
KVF_INLINE KVF_HD constexpr float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

KVF_INLINE KVF_HD constexpr float magnitude(float x) {
  return __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, x) & 0x7fffffffu);
}
KVF_INLINE KVF_HD constexpr bool is_finite(float x) {
  return (__builtin_bit_cast(std::uint32_t, x) & 0x7f800000u) != 0x7f800000u;
}

/// The bits of the largest magnitude in dims [begin, end) of a token. They order as magnitudes do, with
/// infinity's, 0x7f800000, above all finite ones and NaN above that.
template <class Values>
KVF_INLINE KVF_HD std::uint32_t amax_bits(Values values, int token, int begin, int end) {
  std::uint32_t amax = 0;
  for (int d = begin; d < end; ++d) {
    const auto bits = bits_of(values(token, d)) & 0x7fffffffu;
    amax = bits > amax ? bits : amax;
  }
  return amax;
}

/// To the nearest integer in [low, high], ties to even; low for NaN. `high - low` is at most 2^20.
KVF_INLINE KVF_HD constexpr std::int32_t round_code(float x, float low, float high) {
  const float above = x > low ? x : low;
  const float clamped = above < high ? above : high;
  // Beside 1.5 * 2^23 a float's last bit counts ones: the addition rounds, and there is no difference of
  // floats that a compiler could simplify.
  return __builtin_bit_cast(std::int32_t, clamped + 12582912.0f) - 0x4b400000;
}

KVF_INLINE KVF_HD constexpr float clamp_to_fp16(float x) {
  return x < -65504.0f ? -65504.0f : x > 65504.0f ? 65504.0f : x;
}

/// The scale with which codes of magnitude up to `top` reach `reach`; NaN for a `reach` that is not
/// finite, the largest finite fp16 for one that is too large. One that fp16 would round down by so much
/// that a value lay `slack` or more above `top`, as its subnormal values do, is rounded up, so that no
/// value is clamped.
KVF_INLINE KVF_HD constexpr fp16 fit_scale(float reach, float top, float slack) {
  if (!is_finite(reach)) return fp16::from_bits(0x7e00);
  const fp16 scale(reach * (1.0f / top));
  if (scale.bits > 0x7bff) return fp16::from_bits(0x7bff);
  const bool clamps = static_cast<float>(scale) * (top + slack) < reach;
  return fp16::from_bits(static_cast<std::uint16_t>(scale.bits + (clamps ? 1 : 0)));
}

/// The largest fp16 that is not above x, at least -65504; NaN stays NaN.
KVF_INLINE KVF_HD constexpr fp16 round_down(float x) {
  const float clamped = clamp_to_fp16(x);
  fp16 value(clamped);
  if (!(static_cast<float>(value) > clamped)) return value;
  if ((value.bits & 0x7fffu) == 0) return fp16::from_bits(0x8001);
  value.bits = static_cast<std::uint16_t>(value.bits + ((value.bits & 0x8000u) != 0 ? 1 : -1));
  return value;
}
/// The smallest positive fp16 that is not below x, at most 65504.
KVF_INLINE KVF_HD constexpr fp16 round_up(float x) {
  const float clamped = clamp_to_fp16(x);
  fp16 value(clamped);
  if (static_cast<float>(value) < clamped) ++value.bits;
  if (value.bits == 0) value.bits = 1;
  return value;
}

/// To an integer in [low, high]: upwards for direction 1, downwards for -1.
KVF_INLINE KVF_HD constexpr std::int32_t round_towards(float x, std::int32_t low, std::int32_t high,
                                                       int direction) {
  const auto least = static_cast<float>(low), most = static_cast<float>(high);
  const float clamped = x > least ? (x < most ? x : most) : least;
  const auto whole = static_cast<std::int32_t>(clamped);
  const float rest = clamped - static_cast<float>(whole);
  const std::int32_t moved =
      whole + (direction > 0 && rest > 0.0f ? 1 : 0) - (direction < 0 && rest < 0.0f ? 1 : 0);
  return moved < low ? low : moved > high ? high : moved;
}

/// 1 / scale; 0 for 0. The only division of an encoder: a compiler that may use reciprocals finds
/// none to replace.
KVF_INLINE KVF_HD constexpr float inverse(float scale) {
  const float reciprocal = 1.0f / (scale == 0.0f ? 1.0f : scale);
  return scale == 0.0f ? 0.0f : reciprocal;
}

}  // namespace kvfolia::inline KVF_ABI::detail
