// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What the bytes of a slot-major tile mean, written from the documented byte layouts one number at a
// time, in double, and without any of the library's code. The oracle of every quantizer.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace kvfolia_tests::scalar {

// Numbers from their bits.

/// (-1)^S 2^(E - bias) 1.M, and (-1)^S 2^(1 - bias) 0.M where E is 0.
inline double finite_float(unsigned bits, int exponent_bits, int mantissa_bits, int bias) {
  const unsigned ones = 1u << mantissa_bits, exponents = 1u << exponent_bits;
  const double fraction = static_cast<double>(bits % ones) / ones;
  const int exponent = static_cast<int>(bits / ones % exponents);
  const double size =
      exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1.0 + fraction, exponent - bias);
  return bits / ones / exponents % 2 != 0 ? -size : size;
}

/// The same, where the largest exponent stands for infinity (M = 0) and NaN.
inline double ieee_float(unsigned bits, int exponent_bits, int mantissa_bits, int bias) {
  const unsigned ones = 1u << mantissa_bits, exponents = 1u << exponent_bits;
  if (bits / ones % exponents != exponents - 1) return finite_float(bits, exponent_bits, mantissa_bits, bias);
  if (bits % ones != 0) return std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  return bits / ones / exponents % 2 != 0 ? -infinity : infinity;
}

inline double e5m2(unsigned bits) { return ieee_float(bits, 5, 2, 15); }
/// No infinity, and NaN only where all bits but the sign are set.
inline double e4m3(unsigned bits) {
  return bits % 128 == 127 ? std::numeric_limits<double>::quiet_NaN() : finite_float(bits, 4, 3, 7);
}
inline double e2m1(unsigned bits) { return finite_float(bits, 2, 1, 1); }
inline double e8m0(unsigned bits) {
  return bits == 255 ? std::numeric_limits<double>::quiet_NaN()
                     : std::ldexp(1.0, static_cast<int>(bits) - 127);
}
inline double bf16(unsigned bits) { return ieee_float(bits, 8, 7, 127); }
inline double fp16(unsigned bits) {
  static const std::vector<double> table = [] {  // asked for often
    std::vector<double> all;
    for (unsigned b = 0; b < 65536; ++b) all.push_back(ieee_float(b, 5, 10, 15));
    return all;
  }();
  return table[bits];
}

// Little-endian bytes.

inline unsigned byte_at(const std::byte* at) { return std::to_integer<unsigned>(*at); }
inline unsigned half_at(const std::byte* at) { return byte_at(at) + 256 * byte_at(at + 1); }
inline double float_at(const std::byte* at) {
  return ieee_float(half_at(at) + 65536 * half_at(at + 2), 8, 23, 127);
}
inline int int8_at(const std::byte* at) {
  const int byte = static_cast<int>(byte_at(at));
  return byte < 128 ? byte : byte - 256;
}
/// The 4 bits of a dimension: two dims a byte, the even one in the low half.
inline unsigned nibble_at(const std::byte* codes, int dim) {
  const unsigned byte = byte_at(codes + dim / 2);
  return dim % 2 == 0 ? byte % 16 : byte / 16;
}

/// Tokens behind one another, at a stride of bytes, and so their parameters.
struct RawTile {
  const std::byte* codes;
  const std::byte* params;
  int dims;
  int tokens;
  int code_stride;
  int param_stride;

  const std::byte* code(int token) const { return codes + std::ptrdiff_t{token} * code_stride; }
  const std::byte* param(int token) const { return params + std::ptrdiff_t{token} * param_stride; }
};

/// [token][dim].
using Values = std::vector<double>;

inline int groups(int dims, int group) { return group == 0 ? 1 : (dims + group - 1) / group; }
inline int group_of(int dim, int group) { return group == 0 ? 0 : dim / group; }

// Formats: code_bytes(dims) of a token, param_bytes(dims, tokens) of a tile, value(tile, token, dim).

struct Fp16 {
  int code_bytes(int dims) const { return 2 * dims; }
  int param_bytes(int, int) const { return 0; }
  double value(const RawTile& tile, int t, int d) const { return fp16(half_at(tile.code(t) + 2 * d)); }
};
struct Bf16 {
  int code_bytes(int dims) const { return 2 * dims; }
  int param_bytes(int, int) const { return 0; }
  double value(const RawTile& tile, int t, int d) const { return bf16(half_at(tile.code(t) + 2 * d)); }
};

/// Signed bytes; an fp16 scale a group of dims, 0 being all of them.
struct Int8 {
  int group = 0;
  int code_bytes(int dims) const { return dims; }
  int param_bytes(int dims, int tokens) const { return 2 * tokens * groups(dims, group); }
  double value(const RawTile& tile, int t, int d) const {
    return fp16(half_at(tile.param(t) + 2 * group_of(d, group))) * int8_at(tile.code(t) + d);
  }
};

/// Nibbles; fp16 scale, then fp16 min, a group of dims.
struct Int4 {
  int group = 0;
  int code_bytes(int dims) const { return dims / 2; }
  int param_bytes(int dims, int tokens) const { return 4 * tokens * groups(dims, group); }
  double value(const RawTile& tile, int t, int d) const {
    const std::byte* param = tile.param(t) + 4 * group_of(d, group);
    return fp16(half_at(param)) * nibble_at(tile.code(t), d) + fp16(half_at(param + 2));
  }
};

/// Nibbles, 8 stands for 0; an fp16 scale a group.
struct Int4Symmetric {
  int group;
  int code_bytes(int dims) const { return dims / 2; }
  int param_bytes(int dims, int tokens) const { return 2 * tokens * groups(dims, group); }
  double value(const RawTile& tile, int t, int d) const {
    return fp16(half_at(tile.param(t) + 2 * group_of(d, group))) *
           (static_cast<double>(nibble_at(tile.code(t), d)) - 8.0);
  }
};

/// Nibbles; fp16 scale, then fp16 min, a channel: [block of tokens][dim].
struct Int4Channels {
  int block;
  int code_bytes(int dims) const { return dims / 2; }
  int param_bytes(int dims, int tokens) const { return tokens / block * dims * 4; }
  double value(const RawTile& tile, int t, int d) const {
    const std::byte* param = tile.params + 4 * (t / block * tile.dims + d);
    return fp16(half_at(param)) * nibble_at(tile.code(t), d) + fp16(half_at(param + 2));
  }
};

/// Nibbles; a block of tokens has two fp16 references, then an unsigned and a signed byte a channel.
struct Compact4Channels {
  int block;
  int code_bytes(int dims) const { return dims / 2; }
  int block_bytes(int dims) const { return (4 + 2 * dims + 3) / 4 * 4; }
  int param_bytes(int dims, int tokens) const { return tokens / block * block_bytes(dims); }
  double scale(const RawTile& tile, int t, int d) const {
    const std::byte* params = tile.params + t / block * block_bytes(tile.dims);
    if (std::to_integer<int>(params[5 + 2 * d]) == 128) return std::nan("");
    return fp16(half_at(params)) * std::to_integer<int>(params[4 + 2 * d]) / 256;
  }
  double min(const RawTile& tile, int t, int d) const {
    const std::byte* params = tile.params + t / block * block_bytes(tile.dims);
    const int code = std::to_integer<int>(params[5 + 2 * d]);
    if (code == 128) return std::nan("");
    return fp16(half_at(params + 2)) * (code < 128 ? code : code - 256) / 128;
  }
  double value(const RawTile& tile, int t, int d) const {
    return scale(tile, t, d) * nibble_at(tile.code(t), d) + min(tile, t, d);
  }
};

/// One byte a dimension, what it stands for given by a function of its bits.
using Byte = double (*)(unsigned);

/// An fp16 scale a token.
struct Fp8 {
  Byte code;
  int code_bytes(int dims) const { return dims; }
  int param_bytes(int, int tokens) const { return 2 * tokens; }
  double value(const RawTile& tile, int t, int d) const {
    return fp16(half_at(tile.param(t))) * code(byte_at(tile.code(t) + d));
  }
};
/// A float scale a group of dims.
struct Fp8Blocks {
  Byte code;
  int group;
  int code_bytes(int dims) const { return dims; }
  int param_bytes(int dims, int tokens) const { return 4 * tokens * groups(dims, group); }
  double value(const RawTile& tile, int t, int d) const {
    return float_at(tile.param(t) + 4 * (d / group)) * code(byte_at(tile.code(t) + d));
  }
};
/// One scale that lies elsewhere.
struct Fp8Tensor {
  Byte code;
  double scale;
  int code_bytes(int dims) const { return dims; }
  int param_bytes(int, int) const { return 0; }
  double value(const RawTile& tile, int t, int d) const { return scale * code(byte_at(tile.code(t) + d)); }
};

/// e2m1 nibbles; an e4m3 scale for 16 dims, and a global one that lies elsewhere.
struct Nvfp4 {
  double global;
  int code_bytes(int dims) const { return dims / 2; }
  int param_bytes(int dims, int tokens) const { return tokens * groups(dims, 16); }
  double value(const RawTile& tile, int t, int d) const {
    return e4m3(byte_at(tile.param(t) + d / 16)) * global * e2m1(nibble_at(tile.code(t), d));
  }
};
/// e2m1 nibbles; an e8m0 scale for 32 dims.
struct Mxfp4 {
  int code_bytes(int dims) const { return dims / 2; }
  int param_bytes(int dims, int tokens) const { return tokens * groups(dims, 32); }
  double value(const RawTile& tile, int t, int d) const {
    return e8m0(byte_at(tile.param(t) + d / 32)) * e2m1(nibble_at(tile.code(t), d));
  }
};

/// Blocks of an fp16 scale and 32 signed bytes.
struct Q8_0 {
  int code_bytes(int dims) const { return dims / 32 * 34; }
  int param_bytes(int, int) const { return 0; }
  double value(const RawTile& tile, int t, int d) const {
    const std::byte* block = tile.code(t) + d / 32 * 34;
    return fp16(half_at(block)) * int8_at(block + 2 + d % 32);
  }
};
/// Blocks of an fp16 scale and 16 bytes; byte j holds dimension j in its low half and j + 16 in its high
/// half, 8 more than the number meant.
struct Q4_0 {
  int code_bytes(int dims) const { return dims / 32 * 18; }
  int param_bytes(int, int) const { return 0; }
  double value(const RawTile& tile, int t, int d) const {
    const std::byte* block = tile.code(t) + d / 32 * 18;
    const int j = d % 32, byte = static_cast<int>(byte_at(block + 2 + j % 16));
    return fp16(half_at(block)) * ((j < 16 ? byte % 16 : byte / 16) - 8);
  }
};

/// In front of the parameters of `Inner`: fp16 means [block of tokens][dim], padded to 16 bytes.
template <class Inner>
struct Centered {
  Inner inner;
  int block;
  int mean_bytes(int dims, int tokens) const { return (tokens / block * dims * 2 + 15) / 16 * 16; }
  int code_bytes(int dims) const { return inner.code_bytes(dims); }
  int param_bytes(int dims, int tokens) const {
    return mean_bytes(dims, tokens) + inner.param_bytes(dims, tokens);
  }
  double value(const RawTile& tile, int t, int d) const {
    RawTile rest = tile;
    rest.params += mean_bytes(tile.dims, tile.tokens);
    rest.param_stride = inner.param_bytes(tile.dims, 1);
    return inner.value(rest, t, d) + fp16(half_at(tile.params + 2 * (t / block * tile.dims + d)));
  }
};

/// Entry (i, j) of the Hadamard matrix whose size is a power of two: -1 to the number of bits that both
/// have.
inline double hadamard(unsigned i, unsigned j) {
  double sign = 1.0;
  for (unsigned common = i & j; common != 0; common /= 2) sign = common % 2 != 0 ? -sign : sign;
  return sign;
}

/// x becomes H x / sqrt(size) in every `size` neighbouring numbers.
inline void rotate(double* x, int dims, int size) {
  const auto n = static_cast<std::size_t>(size);
  static std::vector<double> matrix;  // of the size asked for last
  if (matrix.size() != n * n) {
    matrix.resize(n * n);
    for (unsigned i = 0; i < n; ++i)
      for (unsigned j = 0; j < n; ++j)
        matrix[i * n + j] = hadamard(i, j) / std::sqrt(static_cast<double>(size));
  }
  std::vector<double> sums(n);
  for (int begin = 0; begin < dims; begin += size) {
    sums.assign(n, 0.0);
    for (std::size_t j = 0; j < n; ++j)  // the matrix is symmetric: its row j is its column j
      for (std::size_t i = 0; i < n; ++i) sums[i] += matrix[j * n + i] * x[begin + static_cast<int>(j)];
    for (std::size_t i = 0; i < n; ++i) x[begin + static_cast<int>(i)] = sums[i];
  }
}
/// The largest power of two that divides dims.
inline int rotation_size(int dims) {
  int size = 1;
  while (dims % (2 * size) == 0) size *= 2;
  return size;
}

/// The tile of `Inner` holds rotated vectors; the values are those of vectors that are not.
template <class Inner>
struct Rotated {
  Inner inner;
  int size = 0;  ///< 0 is the largest that fits
  int code_bytes(int dims) const { return inner.code_bytes(dims); }
  int param_bytes(int dims, int tokens) const { return inner.param_bytes(dims, tokens); }
};

/// All values of a tile.
template <class Format>
Values decode(const Format& format, const RawTile& tile) {
  Values values;
  values.reserve(static_cast<std::size_t>(tile.tokens * tile.dims));
  for (int t = 0; t < tile.tokens; ++t)
    for (int d = 0; d < tile.dims; ++d) values.push_back(format.value(tile, t, d));
  return values;
}
template <class Inner>
Values decode(const Rotated<Inner>& format, const RawTile& tile) {
  Values values = decode(format.inner, tile);
  const int size = format.size != 0 ? format.size : rotation_size(tile.dims);
  for (int t = 0; t < tile.tokens; ++t) rotate(values.data() + t * tile.dims, tile.dims, size);
  return values;
}

}  // namespace kvfolia_tests::scalar
