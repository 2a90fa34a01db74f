// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Matrix products of prefill on Intel's AMX. A float is taken as the sum of two bf16, which keeps 16 of its
// 24 bits; of the four products of two such sums the three larger ones are added, in float.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, TDPBF16PS.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/cpu/simd.hpp"
#include "kvfolia/cpu/target.hpp"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__) && \
    HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
#define KVF_CPU_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define KVF_CPU_AMX 0
#endif

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

inline constexpr bool has_amx = KVF_CPU_AMX;

/// Two bf16 each of some floats' highest bits and of what is left of them, neighbours of one word.
struct Pairs {
  std::uint32_t* high;
  std::uint32_t* low;

  /// Two halves of `words` each, in memory that floats may also have.
  Pairs(float* memory, std::int64_t words)
      : high(reinterpret_cast<std::uint32_t*>(memory)), low(high + words) {}
  Pairs(std::uint32_t* h, std::uint32_t* l) : high(h), low(l) {}
};

/// Rows and columns of a matrix register, in words.
inline constexpr int amx_tile = 16;

#if KVF_CPU_AMX

/// Whether the operating system lets this process use AMX: Linux wants to be asked, once.
inline bool permits_amx() {
  constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool permitted = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return permitted;
}

/// Configures this thread's matrix registers for as long as it lives.
class AmxScope {
 public:
  AmxScope() {
    struct alignas(64) {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {};
      std::uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = 64;
      config.rows[i] = amx_tile;
    }
    barrier();
    _tile_loadconfig(&config);
  }
  ~AmxScope() { _tile_release(); }
  AmxScope(const AmxScope&) = delete;
  AmxScope& operator=(const AmxScope&) = delete;

  /// Compilers do not know what the instructions read.
  static KVF_INLINE void barrier() { asm volatile("" ::: "memory"); }
};

/// Words of (a, b), lane by lane; false where a number is too large for two bf16, or none.
KVF_INLINE bool split(Floats a, Floats b, std::uint32_t* high, std::uint32_t* low) {
  const Uint32Tag u;
  const auto rounded = [&](Floats x) KVF_INLINE_LAMBDA {
    const __m256i half = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.raw));
    return Uint32s{_mm512_cvtepu16_epi32(half)};
  };
  const auto rest = [&](Floats x, Uint32s bits) KVF_INLINE_LAMBDA {
    return hn::Sub(x, hn::BitCast(FloatTag(), hn::ShiftLeft<16>(bits)));
  };
  const Uint32s high_a = rounded(a), high_b = rounded(b);
  const Floats rest_a = rest(a, high_a), rest_b = rest(b, high_b);
  hn::StoreU(hn::Or(high_a, hn::ShiftLeft<16>(high_b)), u, high);
  hn::StoreU(hn::Or(rounded(rest_a), hn::ShiftLeft<16>(rounded(rest_b))), u, low);
  // x - x is 0 for every number; infinities and NaN have left one of them here.
  const Floats sum = hn::Add(rest_a, rest_b);
  return hn::AllTrue(FloatTag(), hn::Eq(hn::Sub(sum, sum), zeros()));
}

/// Words of rows 2i and 2i + 1, to[i * padded_columns + column], and zeros behind `rows` and `columns`: both
/// padded counts are whole registers.
inline bool split_rows(const float* matrix, std::int64_t stride, int rows, int columns, int padded_rows,
                       int padded_columns, const Pairs& to) {
  bool whole = true;
  for (int c = 0; c < padded_columns; c += lanes) {
    const auto used = hn::FirstN(FloatTag(), static_cast<std::size_t>(std::clamp(columns - c, 0, lanes)));
    const auto row = [&](int r) KVF_INLINE_LAMBDA {
      return r < rows ? hn::IfThenElseZero(used, load(matrix + r * stride + c)) : zeros();
    };
    for (int r = 0; r < padded_rows; r += 2) {
      const int at = r / 2 * padded_columns + c;
      whole &= split(row(r), row(r + 1), to.high + at, to.low + at);
    }
  }
  return whole;
}

/// `count` neighbouring floats, a multiple of 32, as words of neighbours.
inline bool split_row(const float* row, int count, std::uint32_t* high, std::uint32_t* low) {
  const FloatTag f;
  bool whole = true;
  for (int i = 0; i < count; i += 2 * lanes) {
    Floats even, odd;
    hn::LoadInterleaved2(f, row + i, even, odd);
    whole &= split(even, odd, high + i / 2, low + i / 2);
  }
  return whole;
}

/// sums[r][c] (+)= products of `steps` * 16 words of rows with columns, for 32 rows and 32 columns, or 16 of
/// either; strides are in words.
template <int Rows, int Columns>
KVF_INLINE void amx_products(Pairs rows, std::int64_t row_stride, Pairs columns, std::int64_t column_stride,
                             int steps, bool add, float* sums, std::int64_t stride) {
  const auto bytes = static_cast<std::size_t>(stride) * 4,
             row_bytes = static_cast<std::size_t>(row_stride) * 4,
             column_bytes = static_cast<std::size_t>(column_stride) * 4;
  float* sums_below = sums + amx_tile * stride;
  if (add) {
    _tile_loadd(0, sums, bytes);
    if (Columns > 16) _tile_loadd(1, sums + amx_tile, bytes);
    if (Rows > 16) _tile_loadd(2, sums_below, bytes);
    if (Rows > 16 && Columns > 16) _tile_loadd(3, sums_below + amx_tile, bytes);
  } else {
    _tile_zero(0);
    if (Columns > 16) _tile_zero(1);
    if (Rows > 16) _tile_zero(2);
    if (Rows > 16 && Columns > 16) _tile_zero(3);
  }
  const auto multiply = []() KVF_INLINE_LAMBDA {
    _tile_dpbf16ps(0, 4, 6);
    if (Columns > 16) _tile_dpbf16ps(1, 4, 7);
    if (Rows > 16) _tile_dpbf16ps(2, 5, 6);
    if (Rows > 16 && Columns > 16) _tile_dpbf16ps(3, 5, 7);
  };
  const auto load_rows = [&](const std::uint32_t* at) KVF_INLINE_LAMBDA {
    _tile_loadd(4, at, row_bytes);
    if (Rows > 16) _tile_loadd(5, at + amx_tile * row_stride, row_bytes);
  };
  const auto load_columns = [&](const std::uint32_t* at) KVF_INLINE_LAMBDA {
    _tile_loadd(6, at, column_bytes);
    if (Columns > 16) _tile_loadd(7, at + amx_tile, column_bytes);
  };
  for (int step = 0; step < steps; ++step) {
    const std::int64_t row = step * amx_tile, column = step * amx_tile * column_stride;
    load_rows(rows.low + row);
    load_columns(columns.high + column);
    multiply();
    load_rows(rows.high + row);
    multiply();
    load_columns(columns.low + column);
    multiply();
  }
  _tile_stored(0, sums, bytes);
  if (Columns > 16) _tile_stored(1, sums + amx_tile, bytes);
  if (Rows > 16) _tile_stored(2, sums_below, bytes);
  if (Rows > 16 && Columns > 16) _tile_stored(3, sums_below + amx_tile, bytes);
}

/// The same for any multiple of 16 rows and columns. Needs an AmxScope.
inline void amx_multiply(Pairs rows, std::int64_t row_count, std::int64_t row_stride, Pairs columns,
                         std::int64_t column_count, std::int64_t column_stride, int steps, bool add,
                         float* sums, std::int64_t stride) {
  AmxScope::barrier();
  for (std::int64_t r = 0; r < row_count; r += 2 * amx_tile)
    for (std::int64_t c = 0; c < column_count; c += 2 * amx_tile) {
      const Pairs at{rows.high + r * row_stride, rows.low + r * row_stride},
          to{columns.high + c, columns.low + c};
      const auto multiply = [&]<int Rows, int Columns>() KVF_INLINE_LAMBDA {
        amx_products<Rows, Columns>(at, row_stride, to, column_stride, steps, add, sums + r * stride + c,
                                    stride);
      };
      if (row_count - r >= 32)
        column_count - c >= 32 ? multiply.template operator()<32, 32>()
                               : multiply.template operator()<32, 16>();
      else
        column_count - c >= 32 ? multiply.template operator()<16, 32>()
                               : multiply.template operator()<16, 16>();
    }
  AmxScope::barrier();
}

#else

inline bool permits_amx() { return false; }

#endif

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
