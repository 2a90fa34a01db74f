// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "kvfolia/core/small_floats.hpp"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#if __has_include(<cuda_fp8.h>)
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#define KVF_TEST_CUDA_FP8 1
#endif
#if __has_include(<cuda_fp4.h>)  // the toolkits that have it convert scales, too
#include <cuda_bf16.h>
#include <cuda_fp4.h>
#define KVF_TEST_CUDA_FP4 1
#endif

#include "support/catch.hpp"
#include "support/random.hpp"

using kvfolia::e8m0;
using kvfolia::fp4_e2m1;
using kvfolia::fp8_e4m3;
using kvfolia::fp8_e5m2;

namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

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
bool same(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

/// What each code of a format means.
using Table = std::vector<double>;

/// (-1)^S * 2^(E - bias) * 1.M, and (-1)^S * 2^(1 - bias) * 0.M where E is 0.
double finite_value(int code, int exponent_bits, int mantissa_bits, int bias) {
  const int ones = 1 << mantissa_bits, exponents = 1 << exponent_bits;
  const int mantissa = code % ones, exponent = code / ones % exponents, sign = code / ones / exponents;
  const double fraction = static_cast<double>(mantissa) / ones;
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1.0 + fraction, exponent - bias);
  return sign != 0 ? -magnitude : magnitude;
}

const Table& e4m3_table() {
  static const Table table = [] {
    Table t;
    for (int code = 0; code < 256; ++code) t.push_back(finite_value(code, 4, 3, 7));
    t[0x7f] = t[0xff] = nan_value;
    return t;
  }();
  return table;
}

const Table& e5m2_table() {
  static const Table table = [] {
    Table t;
    for (int code = 0; code < 256; ++code) t.push_back(finite_value(code, 5, 2, 15));
    t[0x7c] = infinity;
    t[0xfc] = -infinity;
    for (const std::size_t code : {0x7du, 0x7eu, 0x7fu, 0xfdu, 0xfeu, 0xffu}) t[code] = nan_value;
    return t;
  }();
  return table;
}

const Table& e2m1_table() {
  static const Table table{0.0,  0.5,  1.0,  1.5,  2.0,  3.0,  4.0,  6.0,
                           -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0};
  return table;
}

const Table& e8m0_table() {
  static const Table table = [] {
    Table t;
    for (int code = 0; code < 255; ++code) t.push_back(std::ldexp(1.0, code - 127));
    t.push_back(nan_value);
    return t;
  }();
  return table;
}

struct Entry {
  double value;
  std::uint32_t code;
};

/// The finite values of one sign, by magnitude.
std::vector<Entry> magnitudes(const Table& table, bool negative) {
  std::vector<Entry> entries;
  for (std::uint32_t code = 0; code < table.size(); ++code)
    if (std::isfinite(table[code]) && std::signbit(table[code]) == negative)
      entries.push_back({std::fabs(table[code]), code});
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.value < b.value; });
  return entries;
}

/// The last entry not above x, or end() where all are.
std::vector<Entry>::const_iterator last_not_above(const std::vector<Entry>& entries, double x) {
  const auto above = std::upper_bound(entries.begin(), entries.end(), x,
                                      [](double value, const Entry& e) { return value < e.value; });
  return above == entries.begin() ? entries.end() : above - 1;
}

/// Finds the nearest value in a table that has zeros of both signs.
class Nearest {
 public:
  Nearest(const Table& table, std::uint32_t nan_code)
      : nan_code_(nan_code), positive_(magnitudes(table, false)), negative_(magnitudes(table, true)) {}

  std::uint32_t operator()(float x) const {
    if (std::isnan(x)) return nan_code_;
    const std::vector<Entry>& entries = std::signbit(x) ? negative_ : positive_;
    const double magnitude = std::fabs(static_cast<double>(x));
    const auto low = last_not_above(entries, magnitude), high = low + 1;
    if (high == entries.end()) return low->code;
    const double middle = (low->value + high->value) / 2;  // exact: few bits
    if (magnitude != middle) return magnitude < middle ? low->code : high->code;
    return low->code % 2 == 0 ? low->code : high->code;
  }

 private:
  std::uint32_t nan_code_;
  std::vector<Entry> positive_, negative_;
};

/// Largest power of two not above x, at least the smallest that there is.
class PowerNotAbove {
 public:
  std::uint32_t operator()(float x) const {
    if (!std::isfinite(x) || x < 0.0f) return 255;
    const auto entry = last_not_above(entries_, static_cast<double>(x));
    return entry == entries_.end() ? 0 : entry->code;
  }

 private:
  std::vector<Entry> entries_ = magnitudes(e8m0_table(), false);
};

Nearest nearest_e4m3() { return Nearest(e4m3_table(), 0x7f); }
Nearest nearest_e5m2() { return Nearest(e5m2_table(), 0x7f); }
Nearest nearest_e2m1() { return Nearest(e2m1_table(), 7); }

/// Floats on and beside a format's values and ties, some of every exponent, and special ones.
std::vector<float> hard_floats(const Table& table) {
  std::vector<float> floats;
  const auto add_near = [&](double x) {
    const auto center = static_cast<float>(x);
    for (const float f : {center, std::nextafter(center, -INFINITY), std::nextafter(center, INFINITY)}) {
      floats.push_back(f);
      floats.push_back(-f);
    }
  };
  const std::vector<Entry> entries = magnitudes(table, false);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const double x = entries[i].value;
    add_near(x);
    // Beyond the largest value, the ties that there would be if the format went on.
    const double step = i + 1 < entries.size() ? entries[i + 1].value - x : x - entries[i - 1].value;
    if (x + step <= FLT_MAX) {
      add_near(x + step / 2);
      add_near(x + step);
    }
  }
  kvfolia_tests::Random random(1);
  for (std::uint32_t exponent = 0; exponent < 512; ++exponent)  // and the sign
    for (int i = 0; i < 16; ++i)
      floats.push_back(float_of((exponent << 23) | static_cast<std::uint32_t>(random.next() >> 41)));
  for (const std::uint32_t u : {0x00000000u, 0x00000001u, 0x00000002u, 0x003fffffu, 0x00400000u, 0x00400001u,
                                0x007fffffu, 0x00800000u, 0x00800001u, 0x7f000000u, 0x7f7fffffu, 0x7f800000u,
                                0x7f800001u, 0x7f812345u, 0x7fa00000u, 0x7fc00000u, 0x7fc00001u, 0x7fffffffu})
    for (const std::uint32_t sign : {0u, 0x80000000u}) floats.push_back(float_of(u | sign));
  return floats;
}

/// Every upper half of a float's bits, with lower halves that tell apart what rounds by them.
std::vector<float> all_upper_halves() {
  std::vector<float> floats;
  kvfolia_tests::Random random(2);
  for (std::uint32_t upper = 0; upper <= 0xffffu; ++upper) {
    for (const std::uint32_t lower : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0xffffu})
      floats.push_back(float_of((upper << 16) | lower));
    floats.push_back(float_of((upper << 16) | static_cast<std::uint32_t>(random.next() >> 48)));
  }
  return floats;
}

using Bits = std::vector<std::uint32_t>;
constexpr std::size_t shown = 8;

/// Bits of the first floats that T takes to another code than `expected` does; all NaN codes are one.
template <typename T, typename Expected>
Bits wrongly_rounded(const std::vector<float>& floats, const Table& table, const Expected& expected) {
  std::vector<T> got(floats.size());
  for (std::size_t i = 0; i < floats.size(); ++i) got[i] = T(floats[i]);
  Bits wrong;
  for (std::size_t i = 0; i < floats.size() && wrong.size() < shown; ++i) {
    const std::uint32_t code = got[i].bits, wanted = expected(floats[i]);
    const bool good =
        code < table.size() && (code == wanted || (std::isnan(table[code]) && std::isnan(table[wanted])));
    if (!good) wrong.push_back(bits_of(floats[i]));
  }
  return wrong;
}

/// The first codes that T widens to something other than `table` says.
template <typename T>
Bits wrongly_widened(const Table& table) {
  Bits wrong;
  for (std::uint32_t code = 0; code < table.size() && wrong.size() < shown; ++code) {
    const T value = T::from_bits(static_cast<std::uint8_t>(code));
    if (value.bits != code || !same(static_cast<float>(value), table[code])) wrong.push_back(code);
  }
  return wrong;
}

/// The first finite codes that widening and rounding again does not give back.
template <typename T>
Bits not_given_back(const Table& table) {
  Bits wrong;
  for (std::uint32_t code = 0; code < table.size() && wrong.size() < shown; ++code) {
    const T value = T::from_bits(static_cast<std::uint8_t>(code));
    if (std::isfinite(table[code]) && T(static_cast<float>(value)).bits != code) wrong.push_back(code);
  }
  return wrong;
}

int count_nan(const Table& table) {
  return static_cast<int>(std::count_if(table.begin(), table.end(), [](double x) { return std::isnan(x); }));
}
int count_infinite(const Table& table) {
  return static_cast<int>(std::count_if(table.begin(), table.end(), [](double x) { return std::isinf(x); }));
}

template <typename T>
constexpr bool converts_explicitly = std::is_constructible_v<T, float> && !std::is_convertible_v<float, T> &&
                                     std::is_constructible_v<float, T> && !std::is_convertible_v<T, float>;
template <typename T>
constexpr bool is_one_plain_byte = sizeof(T) == 1 &&
                                   alignof(T) == 1 && std::is_trivial_v<T>&& std::is_standard_layout_v<T>;

static_assert(converts_explicitly<fp8_e4m3> && converts_explicitly<fp8_e5m2>);
static_assert(converts_explicitly<fp4_e2m1> && converts_explicitly<e8m0>);
static_assert(is_one_plain_byte<fp8_e4m3> && is_one_plain_byte<fp8_e5m2>);
static_assert(is_one_plain_byte<fp4_e2m1> && is_one_plain_byte<e8m0>);
// The compiler converts, too.
static_assert(fp8_e4m3(-std::numeric_limits<float>::infinity()).bits == 0xfe);
static_assert(fp8_e5m2(std::numeric_limits<float>::infinity()).bits == 0x7b);
static_assert(fp4_e2m1(std::numeric_limits<float>::quiet_NaN()).bits == 7);
static_assert(e8m0(std::numeric_limits<float>::quiet_NaN()).bits == 255);
static_assert(static_cast<float>(e8m0::from_bits(0)) == 0x1p-127f);

}  // namespace

TEST_CASE("the tables hold what the formats' definitions list") {
  const Table& e4m3 = e4m3_table();
  REQUIRE(e4m3.size() == 256);
  CHECK(e4m3[0x01] == 0x1p-9);
  CHECK(e4m3[0x07] == 0.875 * 0x1p-6);
  CHECK(e4m3[0x08] == 0x1p-6);
  CHECK(e4m3[0x38] == 1.0);
  CHECK(e4m3[0x7e] == 448.0);
  CHECK(e4m3[0xfe] == -448.0);
  CHECK(same(e4m3[0x80], -0.0));
  CHECK(count_nan(e4m3) == 2);
  CHECK(count_infinite(e4m3) == 0);

  const Table& e5m2 = e5m2_table();
  REQUIRE(e5m2.size() == 256);
  CHECK(e5m2[0x01] == 0x1p-16);
  CHECK(e5m2[0x03] == 0.75 * 0x1p-14);
  CHECK(e5m2[0x04] == 0x1p-14);
  CHECK(e5m2[0x3c] == 1.0);
  CHECK(e5m2[0x7b] == 57344.0);
  CHECK(e5m2[0xfb] == -57344.0);
  CHECK(same(e5m2[0x80], -0.0));
  CHECK(count_nan(e5m2) == 6);
  CHECK(count_infinite(e5m2) == 2);

  REQUIRE(e2m1_table().size() == 16);
  for (int code = 0; code < 16; ++code)
    CHECK(same(e2m1_table()[static_cast<std::size_t>(code)], finite_value(code, 2, 1, 1)));

  REQUIRE(e8m0_table().size() == 256);
  CHECK(e8m0_table()[0] == 0x1p-127);
  CHECK(e8m0_table()[127] == 1.0);
  CHECK(e8m0_table()[254] == 0x1p127);
  CHECK(count_nan(e8m0_table()) == 1);
}

TEST_CASE("every small float widens to what its bits mean") {
  CHECK(wrongly_widened<fp8_e4m3>(e4m3_table()) == Bits{});
  CHECK(wrongly_widened<fp8_e5m2>(e5m2_table()) == Bits{});
  CHECK(wrongly_widened<fp4_e2m1>(e2m1_table()) == Bits{});
  CHECK(wrongly_widened<e8m0>(e8m0_table()) == Bits{});
}

TEST_CASE("widening and rounding again gives every finite small float back") {
  CHECK(not_given_back<fp8_e4m3>(e4m3_table()) == Bits{});
  CHECK(not_given_back<fp8_e5m2>(e5m2_table()) == Bits{});
  CHECK(not_given_back<fp4_e2m1>(e2m1_table()) == Bits{});
  CHECK(not_given_back<e8m0>(e8m0_table()) == Bits{});
}

TEST_CASE("float rounds to the nearest small float, ties to even, beside every value and tie") {
  CHECK(wrongly_rounded<fp8_e4m3>(hard_floats(e4m3_table()), e4m3_table(), nearest_e4m3()) == Bits{});
  CHECK(wrongly_rounded<fp8_e5m2>(hard_floats(e5m2_table()), e5m2_table(), nearest_e5m2()) == Bits{});
  CHECK(wrongly_rounded<fp4_e2m1>(hard_floats(e2m1_table()), e2m1_table(), nearest_e2m1()) == Bits{});
}

TEST_CASE("float rounds to the nearest small float for every upper half of its bits") {
  const std::vector<float> floats = all_upper_halves();
  CHECK(wrongly_rounded<fp8_e4m3>(floats, e4m3_table(), nearest_e4m3()) == Bits{});
  CHECK(wrongly_rounded<fp8_e5m2>(floats, e5m2_table(), nearest_e5m2()) == Bits{});
  CHECK(wrongly_rounded<fp4_e2m1>(floats, e2m1_table(), nearest_e2m1()) == Bits{});
}

TEST_CASE("a scale is the largest power of two not above the float") {
  for (std::vector<float> floats : {hard_floats(e8m0_table()), all_upper_halves()}) {
    const auto is_negative_zero = [](float x) { return x == 0.0f && std::signbit(x); };  // has its own case
    floats.erase(std::remove_if(floats.begin(), floats.end(), is_negative_zero), floats.end());
    CHECK(wrongly_rounded<e8m0>(floats, e8m0_table(), PowerNotAbove{}) == Bits{});
  }
  CHECK(e8m0(0.0f).bits == 0);
  CHECK(e8m0(float_of(0x00000001u)).bits == 0);
  CHECK(e8m0(float_of(0x003fffffu)).bits == 0);  // below 2^-127
  CHECK(e8m0(0x1p-127f).bits == 0);
  CHECK(e8m0(float_of(0x007fffffu)).bits == 0);  // below 2^-126
  CHECK(e8m0(0x1p-126f).bits == 1);
  CHECK(e8m0(FLT_MAX).bits == 254);
  CHECK(e8m0(INFINITY).bits == 255);
  CHECK(e8m0(-INFINITY).bits == 255);
  CHECK(e8m0(-1.0f).bits == 255);
  CHECK(e8m0(float_of(0x80000001u)).bits == 255);
  CHECK(e8m0(float_of(0x7f800001u)).bits == 255);
  CHECK(e8m0(float_of(0xffc00000u)).bits == 255);
}

TEST_CASE("a scale counts negative zero as negative") { CHECK(e8m0(-0.0f).bits == 255); }

TEST_CASE("what is larger than the largest small float gives the largest") {
  for (const float x : {448.0f, 463.0f, 464.0f, 465.0f, 480.0f, 512.0f, 1000.0f, 1e10f, FLT_MAX, INFINITY}) {
    CHECK(static_cast<float>(fp8_e4m3(x)) == 448.0f);
    CHECK(static_cast<float>(fp8_e4m3(-x)) == -448.0f);
  }
  for (const float x : {57344.0f, 61439.0f, 61440.0f, 61441.0f, 65536.0f, 1e10f, FLT_MAX, INFINITY}) {
    CHECK(static_cast<float>(fp8_e5m2(x)) == 57344.0f);
    CHECK(static_cast<float>(fp8_e5m2(-x)) == -57344.0f);
  }
  for (const float x : {6.0f, 6.5f, 7.0f, 7.5f, 8.0f, 1e10f, FLT_MAX, INFINITY}) {
    CHECK(static_cast<float>(fp4_e2m1(x)) == 6.0f);
    CHECK(static_cast<float>(fp4_e2m1(-x)) == -6.0f);
  }
  CHECK(fp8_e4m3::largest == magnitudes(e4m3_table(), false).back().value);
  CHECK(fp8_e5m2::largest == magnitudes(e5m2_table(), false).back().value);
  CHECK(fp4_e2m1::largest == magnitudes(e2m1_table(), false).back().value);
}

TEST_CASE("NaN stays NaN in 8 bits and gives 6 in 4 bits") {
  for (const std::uint32_t u : {0x7f800001u, 0x7f8fffffu, 0x7fc00000u, 0x7fffffffu, 0xff800001u, 0xffc00000u,
                                0xffc12345u, 0xffffffffu}) {
    CHECK(std::isnan(static_cast<float>(fp8_e4m3(float_of(u)))));
    CHECK(std::isnan(static_cast<float>(fp8_e5m2(float_of(u)))));
    CHECK(std::isnan(static_cast<float>(e8m0(float_of(u)))));
    CHECK(static_cast<float>(fp4_e2m1(float_of(u))) == 6.0f);
  }
}

TEST_CASE("zero and what rounds to it keep their sign") {
  for (const float x : {0.0f, FLT_TRUE_MIN, FLT_MIN, 0x1p-17f}) {
    CHECK(fp8_e4m3(x).bits == 0);
    CHECK(fp8_e4m3(-x).bits == 0x80);
    CHECK(fp8_e5m2(x).bits == 0);
    CHECK(fp8_e5m2(-x).bits == 0x80);
    CHECK(fp4_e2m1(x).bits == 0);
    CHECK(fp4_e2m1(-x).bits == 8);
  }
}

#if defined(KVF_TEST_CUDA_FP8)
TEST_CASE("8-bit floats equal CUDA's conversions on the host") {
  const auto cuda_e4m3 = [](float x) -> std::uint32_t {
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  };
  const auto cuda_e5m2 = [](float x) -> std::uint32_t {
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2);
  };
  const std::vector<float> floats = all_upper_halves();
  CHECK(wrongly_rounded<fp8_e4m3>(floats, e4m3_table(), cuda_e4m3) == Bits{});
  CHECK(wrongly_rounded<fp8_e5m2>(floats, e5m2_table(), cuda_e5m2) == Bits{});
  CHECK(wrongly_rounded<fp8_e4m3>(hard_floats(e4m3_table()), e4m3_table(), cuda_e4m3) == Bits{});
  CHECK(wrongly_rounded<fp8_e5m2>(hard_floats(e5m2_table()), e5m2_table(), cuda_e5m2) == Bits{});

  Table e4m3, e5m2;
  for (std::uint32_t code = 0; code < 256; ++code) {
    const auto bits = static_cast<std::uint8_t>(code);
    e4m3.push_back(__half2float(__half(__nv_cvt_fp8_to_halfraw(bits, __NV_E4M3))));
    e5m2.push_back(__half2float(__half(__nv_cvt_fp8_to_halfraw(bits, __NV_E5M2))));
  }
  CHECK(wrongly_widened<fp8_e4m3>(e4m3) == Bits{});
  CHECK(wrongly_widened<fp8_e5m2>(e5m2) == Bits{});
}
#endif

#if defined(KVF_TEST_CUDA_FP4)
TEST_CASE("4-bit floats equal CUDA's conversions on the host") {
  const auto cuda_e2m1 = [](float x) -> std::uint32_t {
    return __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest);
  };
  CHECK(wrongly_rounded<fp4_e2m1>(all_upper_halves(), e2m1_table(), cuda_e2m1) == Bits{});
  CHECK(wrongly_rounded<fp4_e2m1>(hard_floats(e2m1_table()), e2m1_table(), cuda_e2m1) == Bits{});

  Table e2m1;
  for (std::uint32_t code = 0; code < 16; ++code)
    e2m1.push_back(__half2float(__half(__nv_cvt_fp4_to_halfraw(static_cast<std::uint8_t>(code), __NV_E2M1))));
  CHECK(wrongly_widened<fp4_e2m1>(e2m1) == Bits{});
}

TEST_CASE("scales equal CUDA's conversions on the host") {
  const auto cuda_e8m0 = [](float x) -> std::uint32_t {
    return __nv_cvt_float_to_e8m0(x, __NV_NOSAT, cudaRoundZero);
  };
  for (std::vector<float> floats : {hard_floats(e8m0_table()), all_upper_halves()}) {
    const auto has_sign = [](float x) { return std::signbit(x); };  // CUDA drops it
    floats.erase(std::remove_if(floats.begin(), floats.end(), has_sign), floats.end());
    CHECK(wrongly_rounded<e8m0>(floats, e8m0_table(), cuda_e8m0) == Bits{});
  }

  Table scales;
  for (std::uint32_t code = 0; code < 256; ++code)
    scales.push_back(
        __bfloat162float(__nv_bfloat16(__nv_cvt_e8m0_to_bf16raw(static_cast<std::uint8_t>(code)))));
  CHECK(wrongly_widened<e8m0>(scales) == Bits{});
}
#endif
