// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// Tests of the tensor formats: blocks worked out by hand, and an independent decoder that computes
// one element at a time from its index.

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>

#include "common/dequantize.hpp"
#include "examples/gguf_builder.hpp"

using namespace kvfolia_examples;
using namespace kvfolia_examples::testing;

namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes join(const std::vector<Bytes>& parts) {
  Bytes whole;
  for (const Bytes& part : parts) {
    for (const std::uint8_t byte : part) whole.push_back(byte);
  }
  return whole;
}

constexpr std::array all_types{TensorType::F32,  TensorType::F16,  TensorType::BF16,
                               TensorType::Q4_0, TensorType::Q4_1, TensorType::Q5_0,
                               TensorType::Q8_0, TensorType::Q4_K, TensorType::Q6_K};

std::vector<float> decode(TensorType type, const Bytes& src, std::int64_t cols) {
  REQUIRE(src.size() == row_bytes(type, cols));
  std::vector<float> dst(static_cast<std::size_t>(cols));
  dequantize_row(type, reinterpret_cast<const std::byte*>(src.data()), cols, dst.data());
  return dst;
}

double half(const std::uint8_t* p) {
  const unsigned bits = p[0] | unsigned{p[1]} << 8;
  const int exponent = static_cast<int>(bits >> 10 & 31u);
  const double mantissa = bits & 1023u;
  const double sign = (bits & 0x8000u) != 0 ? -1 : 1;
  if (exponent == 31) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

int nibble(const std::uint8_t* codes, int i, bool high) { return high ? codes[i] >> 4 : codes[i] & 15; }

int bits_at(const std::uint8_t* bytes, int position, int count) {
  int value = 0;
  for (int b = 0; b < count; ++b) {
    const int at = position + b;
    value |= (bytes[at / 8] >> (at % 8) & 1) << b;
  }
  return value;
}

/// Element `i` of one block, in double: its products are exact there, and a sum that is not has a
/// term too small to move the other one's fp32 value.
double element(TensorType type, const std::uint8_t* p, int i) {
  switch (type) {
    case TensorType::F32: {
      float value;
      std::memcpy(&value, p, 4);
      return static_cast<double>(value);
    }
    case TensorType::F16: return half(p);
    case TensorType::BF16: {
      const std::uint32_t bits = (p[0] | std::uint32_t{p[1]} << 8) << 16;
      return static_cast<double>(std::bit_cast<float>(bits));
    }
    case TensorType::Q4_0: return half(p) * (nibble(p + 2, i % 16, i >= 16) - 8);
    case TensorType::Q4_1: return half(p) * nibble(p + 4, i % 16, i >= 16) + half(p + 2);
    case TensorType::Q5_0: return half(p) * (nibble(p + 6, i % 16, i >= 16) + 16 * bits_at(p + 2, i, 1) - 16);
    case TensorType::Q8_0: return half(p) * static_cast<std::int8_t>(p[2 + i]);
    case TensorType::Q4_K: {
      const int sub = i / 32;
      const std::uint8_t* s = p + 4;
      // Low parts: six bits of a byte of its own, or a nibble of bytes 8-11; then two spare bits.
      int scale = sub < 4 ? bits_at(s, sub * 8, 6) : bits_at(s, 64 + (sub - 4) * 8, 4);
      int minimum = sub < 4 ? bits_at(s, 32 + sub * 8, 6) : bits_at(s, 64 + (sub - 4) * 8 + 4, 4);
      if (sub >= 4) {
        scale += 16 * bits_at(s, (sub - 4) * 8 + 6, 2);
        minimum += 16 * bits_at(s, 32 + (sub - 4) * 8 + 6, 2);
      }
      const int code = nibble(p + 16, i / 64 * 32 + i % 32, i % 64 >= 32);
      return half(p) * scale * code - half(p + 2) * minimum;
    }
    case TensorType::Q6_K: {
      const int in_half = i % 128;
      const int low = nibble(p, i / 128 * 64 + in_half % 64, in_half >= 64);
      const int high = bits_at(p + 128, (i / 128 * 32 + i % 32) * 8 + in_half / 32 * 2, 2);
      const int scale = static_cast<std::int8_t>(p[192 + i / 16]);
      return half(p + 208) * scale * (low + 16 * high - 32);
    }
  }
  FAIL("no such type");
  return 0;
}

int block_elements(TensorType type) {
  for (const int n : {1, 32, 256}) {
    try {
      row_bytes(type, n);
      return n;
    } catch (const std::runtime_error&) {
    }
  }
  return 0;
}

void check_against_elements(TensorType type, const Bytes& src, std::int64_t cols) {
  const std::vector<float> got = decode(type, src, cols);
  const int elements = block_elements(type);
  const std::size_t bytes = row_bytes(type, elements);
  for (std::size_t i = 0; i < got.size(); ++i) {
    const auto block = i / static_cast<std::size_t>(elements);
    const auto within = static_cast<int>(i % static_cast<std::size_t>(elements));
    const auto want = static_cast<float>(element(type, src.data() + block * bytes, within));
    const bool equal = std::isnan(want)
                           ? std::isnan(got[i])
                           : std::bit_cast<std::uint32_t>(got[i]) == std::bit_cast<std::uint32_t>(want);
    if (!equal) {
      INFO(type_name(type) << " element " << i << ": " << got[i] << " is not " << want);
      REQUIRE(equal);
    }
  }
}

}  // namespace

TEST_CASE("4-bit codes: low nibbles are the first half of a block, for all bytes") {
  // scale 0.5; minimum -1, which only Q4_1 has
  for (unsigned value = 0; value < 256; ++value) {
    const auto byte = static_cast<std::uint8_t>(value);
    const auto other = static_cast<std::uint8_t>(value ^ 0x5au);
    Bytes codes(16, byte);
    codes[3] = other;
    const Bytes q4_0 = join({{0x00, 0x38}, codes});
    const Bytes q4_1 = join({{0x00, 0x38, 0x00, 0xbc}, codes});
    const auto d0 = decode(TensorType::Q4_0, q4_0, 32);
    const auto d1 = decode(TensorType::Q4_1, q4_1, 32);
    for (std::size_t i = 0; i < 32; ++i) {
      const int source = i % 16 == 3 ? other : byte;
      const int code = i < 16 ? source % 16 : source / 16;
      CHECK(d0[i] == 0.5f * static_cast<float>(code - 8));
      CHECK(d1[i] == 0.5f * static_cast<float>(code) - 1.0f);
    }
  }
}

TEST_CASE("blocks worked out by hand decode to their values") {
  // Q5_0: scale 1; fifth bits of elements 0 and 31; codes 1 (low) and 2 (high).
  const Bytes q5_0 = join({{0x00, 0x3c, 0x01, 0x00, 0x00, 0x80}, Bytes(16, 0x21)});
  const auto d5 = decode(TensorType::Q5_0, q5_0, 32);
  CHECK(d5[0] == 1.0f);     // 16 + 1 - 16
  CHECK(d5[1] == -15.0f);   // 1 - 16
  CHECK(d5[16] == -14.0f);  // 2 - 16
  CHECK(d5[31] == 2.0f);    // 16 + 2 - 16

  // Q8_0: scale 0.25.
  Bytes q8_0{0x00, 0x34};
  for (int i = 0; i < 32; ++i) q8_0.push_back(static_cast<std::uint8_t>(i * 8 - 128));
  const auto d8 = decode(TensorType::Q8_0, q8_0, 32);
  CHECK(d8[0] == -32.0f);
  CHECK(d8[31] == 30.0f);

  // Q4_K: scale 1, minimum scale 0.5. Sub-block 1 has scale 3, minimum 2; sub-block 4 has scale
  // 2 + 16 * 3 = 50, minimum 1 + 16 * 2 = 33. All codes are 5 (low) and 6 (high).
  const Bytes q4_k =
      join({{0x00, 0x3c, 0x00, 0x38}, {0xc0, 3, 0, 0, 0x80, 2, 0, 0, 0x12, 0, 0, 0}, Bytes(128, 0x65)});
  const auto dk = decode(TensorType::Q4_K, q4_k, 256);
  CHECK(dk[0] == 0.0f);
  CHECK(dk[32] == 17.0f);  // 3 * 6 - 0.5 * 2
  CHECK(dk[63] == 17.0f);
  CHECK(dk[64] == 0.0f);
  CHECK(dk[128] == 233.5f);  // 50 * 5 - 0.5 * 33
  CHECK(dk[159] == 233.5f);

  // Q6_K: scale 2, every sub-block's scale 1 but the second's -3; nibbles 1 and 2, and bit pairs
  // 3, 2, 1, 0 for the four quarters of a half.
  Bytes sub_scales(16, 1);
  sub_scales[1] = 0xfd;
  const Bytes q6_k = join({Bytes(128, 0x21), Bytes(64, 0x1b), sub_scales, {0x00, 0x40}});
  const auto d6 = decode(TensorType::Q6_K, q6_k, 256);
  CHECK(d6[0] == 34.0f);     // 2 * (1 + 48 - 32)
  CHECK(d6[16] == -102.0f);  // -3 times that
  CHECK(d6[32] == 2.0f);     // 2 * (1 + 32 - 32)
  CHECK(d6[64] == -28.0f);   // 2 * (2 + 16 - 32)
  CHECK(d6[96] == -60.0f);   // 2 * (2 + 0 - 32)
  CHECK(d6[255] == -60.0f);

  CHECK(decode(TensorType::BF16, {0xc0, 0x3f}, 1)[0] == 1.5f);
  CHECK(decode(TensorType::F16, {0x00, 0x3e}, 1)[0] == 1.5f);
  CHECK(decode(TensorType::F32, {0x00, 0x00, 0xc0, 0x3f}, 1)[0] == 1.5f);
}

TEST_CASE("random rows of every type equal the element-wise decoder bit for bit") {
  const unsigned seed = std::random_device{}();
  INFO("seed " << seed);
  std::mt19937 random(seed);
  for (const TensorType type : all_types) {
    for (const std::int64_t blocks : {0, 1, 2, 3, 17, 64}) {
      const std::int64_t cols = blocks * block_elements(type);
      Bytes src(row_bytes(type, cols));
      for (std::uint8_t& byte : src) byte = static_cast<std::uint8_t>(random() & 255u);
      check_against_elements(type, src, cols);
    }
  }
}

TEST_CASE("row sizes are whole blocks, and anything else is refused by name") {
  CHECK(row_bytes(TensorType::F32, 7) == 28);
  CHECK(row_bytes(TensorType::F16, 7) == 14);
  CHECK(row_bytes(TensorType::BF16, 0) == 0);
  CHECK(row_bytes(TensorType::Q4_0, 64) == 36);
  CHECK(row_bytes(TensorType::Q4_1, 64) == 40);
  CHECK(row_bytes(TensorType::Q5_0, 64) == 44);
  CHECK(row_bytes(TensorType::Q8_0, 64) == 68);
  CHECK(row_bytes(TensorType::Q4_K, 512) == 288);
  CHECK(row_bytes(TensorType::Q6_K, 512) == 420);
  check_mentions(error_of([&] { row_bytes(TensorType::Q4_1, 33); }), "Q4_1");
  CHECK_THROWS_AS(row_bytes(TensorType::F32, -1), std::runtime_error);
  CHECK_THROWS_AS(row_bytes(TensorType::F32, std::numeric_limits<std::int64_t>::max()), std::runtime_error);
  const auto q2_k = static_cast<TensorType>(10);
  float out = 0;
  std::byte in{};
  CHECK_FALSE(is_supported(q2_k));
  check_mentions(error_of([&] { row_bytes(q2_k, 256); }), "Q2_K");
  check_mentions(error_of([&] { dequantize_row(q2_k, &in, 0, &out); }), "Q2_K");
  CHECK(type_name(static_cast<TensorType>(77)) == "type 77");
  for (const TensorType type : all_types) CHECK(is_supported(type));
}
