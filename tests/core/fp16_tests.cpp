// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "kvfolia/core/fp16.hpp"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__F16C__)
#include <immintrin.h>
#endif
#if __has_include(<cuda_fp16.h>)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define KVF_TEST_CUDA_HEADERS 1
#endif

#include "support/catch.hpp"

using kvfolia::bf16;
using kvfolia::fp16;

namespace {

std::uint32_t bits_of(float f) {
  std::uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
float float_of(std::uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

/// The value of a format with `mantissa` stored bits, exponents down to `min_exponent` and a largest
/// finite value, by arithmetic alone.
struct Format {
  int mantissa;
  int min_exponent;
  double largest;
};
constexpr Format half_format{10, -14, 65504.0};
constexpr Format brain_format{7, -126, 0x1.fep127};

double decode(std::uint32_t bits, const Format& f) {
  const int exponent_bits = 15 - f.mantissa;
  const auto mantissa = static_cast<double>(bits & ((1u << f.mantissa) - 1u));
  const int exponent = static_cast<int>((bits >> f.mantissa) & ((1u << exponent_bits) - 1u));
  const double sign = bits & 0x8000u ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1)
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  const double unit = std::ldexp(1.0, f.min_exponent - f.mantissa);
  if (exponent == 0) return sign * mantissa * unit;
  return sign * std::ldexp(std::ldexp(1.0, f.mantissa) + mantissa, exponent - 1) * unit;
}

/// Nearest value, ties to even, in double precision: every step here is exact.
double round_to(double x, const Format& f) {
  if (std::isnan(x) || x == 0.0 || std::isinf(x)) return x;
  const int exponent = std::max(std::ilogb(x), f.min_exponent);
  const double unit = std::ldexp(1.0, exponent - f.mantissa);
  const double q = x / unit;
  double low = std::floor(q);
  const double rest = q - low;
  if (rest > 0.5 || (rest == 0.5 && std::fmod(low, 2.0) != 0.0)) low += 1.0;
  const double rounded = std::copysign(low * unit, x);
  if (std::fabs(rounded) > f.largest) return std::copysign(std::numeric_limits<double>::infinity(), x);
  return rounded;
}

bool same(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

/// Floats on, beside and between all ties of a format, and a sweep over all exponents.
std::vector<float> hard_floats(const Format& f) {
  std::vector<float> floats;
  const auto add_near = [&](double x) {
    const auto center = static_cast<float>(x);
    float down = center, up = center;
    floats.push_back(center);
    for (int i = 0; i < 3; ++i) {
      floats.push_back(down = std::nextafter(down, -INFINITY));
      floats.push_back(up = std::nextafter(up, INFINITY));
    }
  };
  for (std::uint32_t b = 0; b < 0x8000u; ++b) {
    const double x = decode(b, f), next = decode(b + 1, f);
    if (std::isnan(x) || std::isinf(x)) break;
    const double tie = std::isinf(next) ? x + (x - decode(b - 1, f)) / 2 : x + (next - x) / 2;
    for (const double sign : {1.0, -1.0}) {
      add_near(sign * x);
      if (tie <= FLT_MAX) add_near(sign * tie);
    }
  }
  for (std::uint64_t u = 0; u < 0x100000000ull; u += 9973)
    floats.push_back(float_of(static_cast<std::uint32_t>(u)));
  for (const std::uint32_t u : {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00001u, 0x7f800001u, 0xff812345u,
                                0x7fffffffu, 0x00000001u, 0x807fffffu, 0x7f7fffffu, 0xff7fffffu})
    floats.push_back(float_of(u));
  return floats;
}

}  // namespace

TEST_CASE("every fp16 and bf16 value widens to what its bits mean") {
  int wrong = 0;
  for (std::uint32_t b = 0; b <= 0xffffu; ++b) {
    wrong +=
        !same(static_cast<float>(fp16::from_bits(static_cast<std::uint16_t>(b))), decode(b, half_format));
    wrong +=
        !same(static_cast<float>(bf16::from_bits(static_cast<std::uint16_t>(b))), decode(b, brain_format));
  }
  CHECK(wrong == 0);
}

TEST_CASE("widening and rounding again gives every 16-bit value back") {
  int wrong = 0;
  for (std::uint32_t b = 0; b <= 0xffffu; ++b) {
    const auto bits = static_cast<std::uint16_t>(b);
    const bool half_nan = (b & 0x7fffu) > 0x7c00u, brain_nan = (b & 0x7fffu) > 0x7f80u;
    wrong += fp16(static_cast<float>(fp16::from_bits(bits))).bits != (half_nan ? bits | 0x200u : bits);
    wrong += bf16(static_cast<float>(bf16::from_bits(bits))).bits != (brain_nan ? bits | 0x40u : bits);
  }
  CHECK(wrong == 0);
}

TEST_CASE("float rounds to the nearest fp16 and bf16, ties to even") {
  int wrong = 0;
  for (const float x : hard_floats(half_format))
    wrong += !same(static_cast<float>(fp16(x)), round_to(x, half_format));
  CHECK(wrong == 0);
  for (const float x : hard_floats(brain_format))
    wrong += !same(static_cast<float>(bf16(x)), round_to(x, brain_format));
  CHECK(wrong == 0);
}

TEST_CASE("NaN stays NaN and keeps its sign") {
  for (const std::uint32_t u : {0x7f800001u, 0x7fc00000u, 0xff800001u, 0xffffffffu}) {
    CHECK(std::isnan(static_cast<float>(fp16(float_of(u)))));
    CHECK(std::isnan(static_cast<float>(bf16(float_of(u)))));
    CHECK((fp16(float_of(u)).bits >> 15) == (u >> 31));
    CHECK((bf16(float_of(u)).bits >> 15) == (u >> 31));
  }
}

#if defined(__F16C__)
TEST_CASE("fp16 equals F16C bit for bit, NaN payloads included") {
  int wrong = 0;
  for (const float x : hard_floats(half_format))
    wrong += fp16(x).bits != _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  for (std::uint32_t b = 0; b <= 0xffffu; ++b) {
    const auto bits = static_cast<std::uint16_t>(b);
    wrong += bits_of(static_cast<float>(fp16::from_bits(bits))) != bits_of(_cvtsh_ss(bits));
  }
  CHECK(wrong == 0);
}
#endif

#if defined(__FLT16_MANT_DIG__)
TEST_CASE("fp16 equals the compiler's _Float16") {
  int wrong = 0;
  for (const float x : hard_floats(half_format)) {
    if (std::isnan(x)) continue;
    const auto h = static_cast<_Float16>(x);
    std::uint16_t bits;
    std::memcpy(&bits, &h, 2);
    wrong += fp16(x).bits != bits;
  }
  CHECK(wrong == 0);
}
#endif

#if defined(KVF_TEST_CUDA_HEADERS)
TEST_CASE("fp16 and bf16 equal CUDA's conversions on the host") {
  int wrong = 0;
  for (const float x : hard_floats(half_format))
    if (!std::isnan(x)) wrong += fp16(x).bits != __half_as_ushort(__float2half_rn(x));
  CHECK(wrong == 0);
  for (const float x : hard_floats(brain_format))
    if (!std::isnan(x)) wrong += bf16(x).bits != __bfloat16_as_ushort(__float2bfloat16_rn(x));
  CHECK(wrong == 0);
}
#endif
