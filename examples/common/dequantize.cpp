// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// One struct for each supported format (its block size, bytes, and decoding), and the visitor that
// turns a run-time type into one of them. Scales are stored as little-endian fp16.

#include "common/dequantize.hpp"

#include <array>
#include <bit>
#include <limits>
#include <stdexcept>
#include <string_view>

#include "common/bytes.hpp"
#include "kvfolia/core/fp16.hpp"

namespace kvfolia_examples {
namespace {

inline float load_half(const std::byte* src) {
  return static_cast<float>(kvfolia::fp16::from_bits(load<std::uint16_t>(src)));
}

/// Widening through a signed int keeps to the conversions that vector units have.
inline float as_float(int code) { return static_cast<float>(code); }

/// The codes of a block as a local array: the compiler then knows that stores to `dst` cannot
/// change them.
template <class Code, std::size_t N>
std::array<Code, N> load_codes(const std::byte* src) {
  return load<std::array<Code, N>>(src);
}

struct F32 {
  static constexpr int elements = 1;
  static constexpr int bytes = 4;
  static void decode(const std::byte* src, float* dst) { *dst = load<float>(src); }
};

struct F16 {
  static constexpr int elements = 1;
  static constexpr int bytes = 2;
  static void decode(const std::byte* src, float* dst) { *dst = load_half(src); }
};

struct BF16 {
  static constexpr int elements = 1;
  static constexpr int bytes = 2;
  static void decode(const std::byte* src, float* dst) {
    *dst = std::bit_cast<float>(std::uint32_t{load<std::uint16_t>(src)} << 16);
  }
};

/// scale, 16 bytes of codes: low nibbles are elements 0-15, high nibbles 16-31; offset 8.
struct Q4_0 {
  static constexpr int elements = 32;
  static constexpr int bytes = 18;
  static void decode(const std::byte* src, float* dst) {
    const float scale = load_half(src);
    const auto codes = load_codes<std::uint8_t, 16>(src + 2);
    for (std::size_t i = 0; i < 16; ++i) dst[i] = scale * as_float((codes[i] & 15) - 8);
    for (std::size_t i = 0; i < 16; ++i) dst[16 + i] = scale * as_float((codes[i] >> 4) - 8);
  }
};

/// scale, minimum, 16 bytes of codes in the order of Q4_0.
struct Q4_1 {
  static constexpr int elements = 32;
  static constexpr int bytes = 20;
  static void decode(const std::byte* src, float* dst) {
    const float scale = load_half(src);
    const float minimum = load_half(src + 2);
    const auto codes = load_codes<std::uint8_t, 16>(src + 4);
    for (std::size_t i = 0; i < 16; ++i) dst[i] = scale * as_float(codes[i] & 15) + minimum;
    for (std::size_t i = 0; i < 16; ++i) dst[16 + i] = scale * as_float(codes[i] >> 4) + minimum;
  }
};

/// scale, 32 fifth bits (bit i belongs to element i), 16 bytes of codes as in Q4_0; offset 16.
struct Q5_0 {
  static constexpr int elements = 32;
  static constexpr int bytes = 22;
  static void decode(const std::byte* src, float* dst) {
    const float scale = load_half(src);
    const auto high = load<std::uint32_t>(src + 2);
    const auto codes = load_codes<std::uint8_t, 16>(src + 6);
    for (std::uint32_t i = 0; i < 16; ++i) {
      const int low_fifth = static_cast<int>((high >> i) & 1u) << 4;
      const int high_fifth = static_cast<int>((high >> (i + 16)) & 1u) << 4;
      dst[i] = scale * as_float(((codes[i] & 15) | low_fifth) - 16);
      dst[16 + i] = scale * as_float(((codes[i] >> 4) | high_fifth) - 16);
    }
  }
};

/// scale, 32 signed bytes.
struct Q8_0 {
  static constexpr int elements = 32;
  static constexpr int bytes = 34;
  static void decode(const std::byte* src, float* dst) {
    const float scale = load_half(src);
    const auto codes = load_codes<std::int8_t, 32>(src + 2);
    for (std::size_t i = 0; i < 32; ++i) dst[i] = scale * as_float(codes[i]);
  }
};

/// scale, minimum scale, 8 sub-blocks' 6-bit {scale, minimum} in 12 bytes, 128 bytes of codes. Each
/// 32 bytes of codes hold two sub-blocks: one in the low nibbles, the next in the high ones.
struct Q4_K {
  static constexpr int elements = 256;
  static constexpr int bytes = 144;
  static void decode(const std::byte* src, float* dst) {
    const float scale = load_half(src);
    const float minimum = load_half(src + 2);
    const auto packed = load_codes<std::uint8_t, 12>(src + 4);
    for (std::size_t sub = 0; sub < 8; ++sub) {
      // Sub-blocks 0-3 have whole bytes' low 6 bits. 4-7 have a nibble of bytes 8-11, and their top
      // two bits are the spare ones of bytes 0-7.
      const std::size_t i = sub % 4;
      const bool whole = sub < 4;
      const int sub_scale = whole ? packed[i] & 63 : (packed[8 + i] & 15) | (packed[i] >> 6 << 4);
      const int sub_minimum = whole ? packed[4 + i] & 63 : (packed[8 + i] >> 4) | (packed[4 + i] >> 6 << 4);
      const float d = scale * as_float(sub_scale);
      const float m = minimum * as_float(sub_minimum);
      const auto codes = load_codes<std::uint8_t, 32>(src + 16 + sub / 2 * 32);
      const int shift = sub % 2 == 0 ? 0 : 4;
      float* out = dst + sub * 32;
      for (std::size_t j = 0; j < 32; ++j) out[j] = d * as_float((codes[j] >> shift) & 15) - m;
    }
  }
};

/// 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 signed sub-block scales, scale; offset
/// 32. A half of the block is 128 elements: quarter q of it takes its nibbles from 32 of 64 bytes
/// (quarters 0, 1 low; 2, 3 high) and its bit pairs from bits 2q of 32 bytes.
struct Q6_K {
  static constexpr int elements = 256;
  static constexpr int bytes = 210;
  static void decode(const std::byte* src, float* dst) {
    const float scale = load_half(src + 208);
    const auto sub_scales = load_codes<std::int8_t, 16>(src + 192);
    for (std::size_t run = 0; run < 8; ++run) {
      const std::size_t half = run / 4;
      const std::size_t quarter = run % 4;
      const auto low = load_codes<std::uint8_t, 32>(src + half * 64 + quarter % 2 * 32);
      const auto high = load_codes<std::uint8_t, 32>(src + 128 + half * 32);
      const int low_shift = quarter < 2 ? 0 : 4;
      const int high_shift = static_cast<int>(quarter) * 2;
      for (std::size_t sub = 0; sub < 2; ++sub) {
        const float d = scale * as_float(sub_scales[run * 2 + sub]);
        float* out = dst + run * 32 + sub * 16;
        for (std::size_t j = 0; j < 16; ++j) {
          const int low_bits = (low[sub * 16 + j] >> low_shift) & 15;
          const int high_bits = (high[sub * 16 + j] >> high_shift) & 3;
          out[j] = d * as_float((low_bits | high_bits << 4) - 32);
        }
      }
    }
  }
};

/// Kept out of line: inlined into the loop over blocks, gcc vectorizes across the scale's
/// conversion and widens it to every element, which halves the speed.
template <class Format>
[[gnu::noinline]] void decode_block(const std::byte* __restrict src, float* __restrict dst) {
  Format::decode(src, dst);
}

template <class Format>
void decode_row(const std::byte* __restrict src, std::int64_t cols, float* __restrict dst) {
  const std::int64_t blocks = cols / Format::elements;
  for (std::int64_t b = 0; b < blocks; ++b, src += Format::bytes, dst += Format::elements) {
    if constexpr (Format::elements == 1) {
      Format::decode(src, dst);
    } else {
      decode_block<Format>(src, dst);
    }
  }
}

/// Calls `visit` with the format of `type`; false when there is none.
template <class Visit>
bool visit_format(TensorType type, Visit visit) {
  switch (type) {
    case TensorType::F32: return visit(F32{}), true;
    case TensorType::F16: return visit(F16{}), true;
    case TensorType::BF16: return visit(BF16{}), true;
    case TensorType::Q4_0: return visit(Q4_0{}), true;
    case TensorType::Q4_1: return visit(Q4_1{}), true;
    case TensorType::Q5_0: return visit(Q5_0{}), true;
    case TensorType::Q8_0: return visit(Q8_0{}), true;
    case TensorType::Q4_K: return visit(Q4_K{}), true;
    case TensorType::Q6_K: return visit(Q6_K{}), true;
  }
  return false;
}

[[noreturn]] void fail_unsupported(TensorType type) {
  throw std::runtime_error("the tensor type " + type_name(type) + " is not supported");
}

}  // namespace

std::string type_name(TensorType type) {
  // Ids without a name here were given up by the format.
  static constexpr std::array<std::string_view, 40> names{
      "F32",    "F16",   "Q4_0",  "Q4_1",   "",      "",      "Q5_0",    "Q5_1",   "Q8_0",    "Q8_1",
      "Q2_K",   "Q3_K",  "Q4_K",  "Q5_K",   "Q6_K",  "Q8_K",  "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S",
      "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8",    "I16",   "I32",     "I64",    "F64",     "IQ1_M",
      "BF16",   "",      "",      "",       "TQ1_0", "TQ2_0", "",        "",       "",        "MXFP4"};
  const auto id = static_cast<std::uint32_t>(type);
  if (id < names.size() && !names[id].empty()) return std::string(names[id]);
  return "type " + std::to_string(id);
}

bool is_supported(TensorType type) {
  return visit_format(type, [](auto) {});
}

std::size_t row_bytes(TensorType type, std::int64_t cols) {
  std::size_t bytes = 0;
  const bool known = visit_format(type, [&]<class Format>(Format) {
    if (cols < 0 || cols % Format::elements != 0) {
      throw std::runtime_error("a row of " + std::to_string(cols) + " elements is not whole " +
                               type_name(type) + " blocks of " + std::to_string(Format::elements));
    }
    const auto blocks = static_cast<std::size_t>(cols / Format::elements);
    if (blocks > std::numeric_limits<std::size_t>::max() / Format::bytes) {
      throw std::runtime_error("a row of " + std::to_string(cols) + " elements is too long");
    }
    bytes = blocks * Format::bytes;
  });
  if (!known) fail_unsupported(type);
  return bytes;
}

void dequantize_row(TensorType type, const std::byte* src, std::int64_t cols, float* dst) {
  const bool known = visit_format(type, [&]<class Format>(Format) { decode_row<Format>(src, cols, dst); });
  if (!known) fail_unsupported(type);
}

}  // namespace kvfolia_examples
