// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Scores of queries with keys where they lie: the innermost loops. Every score adds its dims in ascending
// order (in every lane, where lanes are dims), whatever else is computed beside it. Templates on what a code
// is, not on quantizers or dims: those share their machine code.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/cpu/attend_plan.hpp"
#include "kvfolia/cpu/codes.hpp"
#include "kvfolia/cpu/prefetch.hpp"
#include "kvfolia/cpu/row_blocks.hpp"
#include "kvfolia/cpu/simd.hpp"
#include "kvfolia/cpu/target.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

/// Columns of a row of scores: a tile's, and what vectors write behind them.
inline constexpr int score_stride = tile_positions + 32;

/// Queries as kernels meet them, [row][...], and what scores they make.
struct KeyRows {
  int dims;
  int group_dims;        ///< dims, where there is one group
  const float* queries;  ///< [row][dims]
  const float* bases;    ///< [row], added to every score
  const float* sums;     ///< [row][group] of queries, which meet offsets
  // Queries rounded to 15 bits, as two signed bytes each: query = step * (128 * high + low). Four
  // neighbours make a word; of 4-bit codes the even dims of eight make one, the odd ones the next.
  const std::int32_t* high;  ///< [row][dims / 4]
  const std::int32_t* low;
  const std::int32_t* high_sums;  ///< [row][group]
  const std::int32_t* low_sums;
  const float* steps;  ///< [row]
  float* scores;       ///< [row][score_stride], from the first column on

  int groups() const { return (dims + group_dims - 1) / group_dims; }
};

/// Keys of one call, from the first column on.
struct KeyColumns {
  const float* scales;  ///< [group][score_stride], as offsets
  const float* offsets;
};

/// Whether scores of a kind are computed in integers.
template <CodeKind Kind, int X>
inline constexpr bool in_bytes = has_dot4 &&
                                 ((Kind == CodeKind::int8 && X == 4) ||
                                  ((Kind == CodeKind::uint4 || Kind == CodeKind::int4) && X == 8));
/// What must be added to the codes to make them unsigned.
template <CodeKind Kind>
inline constexpr int byte_bias = Kind == CodeKind::int8   ? 128
                                 : Kind == CodeKind::int4 ? 8
                                                          : 0;

/// sums[r][v] += products over dims [begin, end) of Rows queries with lanes * Vectors neighbouring slots.
/// `codes` is the first slot's in dim 0, `row_bytes` lie between the words of its dims.
template <CodeKind Kind, int X, int Rows, int Vectors>
KVF_INLINE void dot_slots(const std::byte* codes, std::int64_t row_bytes, int begin, int end,
                          const float* queries, std::int64_t stride, Floats (&sums)[Rows][Vectors],
                          Prefetch& prefetch) {
  constexpr int vector_bytes = lanes * X * kind_bits(Kind) / 8;
  codes += begin / X * row_bytes;
  for (int d = begin; d < end; d += X, codes += row_bytes) {
    prefetch.step();
    Floats dims[Vectors][X];
    unroll<Vectors>([&](auto v)
                        KVF_INLINE_LAMBDA { load_slots<Kind, X>(codes + v * vector_bytes, dims[v]); });
    const float* query = queries + d;
    unroll<X>([&](auto x) KVF_INLINE_LAMBDA {
      unroll<Rows>([&](auto r) KVF_INLINE_LAMBDA {
        const Floats q = broadcast(query[r * stride + x]);
        unroll<Vectors>([&](auto v)
                            KVF_INLINE_LAMBDA { sums[r][v] = hn::MulAdd(q, dims[v][x], sums[r][v]); });
      });
    });
  }
}

/// The same in integers: sums[r][v] = products of codes and queries, in steps of the query.
template <CodeKind Kind, int X, int Rows, int Vectors>
KVF_INLINE void dot_slots_in_bytes(const std::byte* codes, std::int64_t row_bytes, int begin, int end,
                                   const KeyRows& rows, std::int64_t row, int group,
                                   Floats (&sums)[Rows][Vectors], Prefetch& prefetch) {
  const Uint32Tag u;
  constexpr int words = X / 4, bias = byte_bias<Kind>;
  const std::int64_t stride = rows.dims / 4;
  const std::int32_t* queries_high = rows.high + row * stride;
  const std::int32_t* queries_low = rows.low + row * stride;
  Int32s high[Rows][Vectors], low[Rows][Vectors];
  unroll<Rows>([&](auto r) KVF_INLINE_LAMBDA {
    const std::int64_t at = (row + r) * rows.groups() + group;
    unroll<Vectors>([&](auto v) KVF_INLINE_LAMBDA {
      high[r][v] = hn::Set(Int32Tag(), bias == 0 ? 0 : -bias * rows.high_sums[at]);
      low[r][v] = hn::Set(Int32Tag(), bias == 0 ? 0 : -bias * rows.low_sums[at]);
    });
  });
  codes += begin / X * row_bytes;
  for (int w = begin / 4; w < end / 4; w += words, codes += row_bytes) {
    prefetch.step();
    Uint32s bytes[Vectors][words];
    unroll<Vectors>([&](auto v) KVF_INLINE_LAMBDA {
      const Uint32s loaded = load_as<std::uint32_t>(codes + v * lanes * 4);
      if constexpr (Kind == CodeKind::int8) {
        bytes[v][0] = hn::Xor(loaded, hn::Set(u, 0x80808080u));
      } else {
        bytes[v][0] = hn::And(loaded, hn::Set(u, 0x0f0f0f0fu));
        bytes[v][words - 1] = hn::And(hn::ShiftRight<4>(loaded), hn::Set(u, 0x0f0f0f0fu));
      }
    });
    unroll<words>([&](auto x) KVF_INLINE_LAMBDA {
      unroll<Rows>([&](auto r) KVF_INLINE_LAMBDA {
        const std::int64_t at = r * stride + w + x;
        const Int32s q_high = hn::Set(Int32Tag(), queries_high[at]);
        unroll<Vectors>([&](auto v)
                            KVF_INLINE_LAMBDA { high[r][v] = dot4(high[r][v], bytes[v][x], q_high); });
        const Int32s q_low = hn::Set(Int32Tag(), queries_low[at]);
        unroll<Vectors>([&](auto v) KVF_INLINE_LAMBDA { low[r][v] = dot4(low[r][v], bytes[v][x], q_low); });
      });
    });
  }
  unroll<Rows>([&](auto r) KVF_INLINE_LAMBDA {
    const Floats step = broadcast(rows.steps[row + r]);
    unroll<Vectors>([&](auto v) KVF_INLINE_LAMBDA {
      const Int32s sum = hn::Add(hn::ShiftLeft<7>(high[r][v]), low[r][v]);
      // Fused with zero, so that no compiler fuses the product with what is added to it, here or there.
      sums[r][v] = hn::MulAdd(step, hn::ConvertTo(FloatTag(), sum), zeros());
    });
  });
}

/// Scores of Rows rows with lanes * Vectors neighbouring slots.
template <CodeKind Kind, int X, Affine Has, int Vectors, int Rows>
void score_slots(const std::byte* codes, std::int64_t row_bytes, const KeyRows& rows, std::int64_t row,
                 const KeyColumns& columns, std::int64_t column, Prefetch& prefetch) {
  Floats scores[Rows][Vectors];
  unroll<Rows>([&](auto r) KVF_INLINE_LAMBDA {
    unroll<Vectors>([&](auto v) KVF_INLINE_LAMBDA { scores[r][v] = broadcast(rows.bases[row + r]); });
  });
  const int groups = rows.groups();
  for (int group = 0; group < groups; ++group) {
    const int begin = group * rows.group_dims, end = std::min(begin + rows.group_dims, rows.dims);
    Floats parts[Rows][Vectors];
    if constexpr (in_bytes<Kind, X>) {
      dot_slots_in_bytes<Kind, X>(codes, row_bytes, begin, end, rows, row, group, parts, prefetch);
    } else {
      unroll<Rows>([&](auto r) KVF_INLINE_LAMBDA {
        unroll<Vectors>([&](auto v) KVF_INLINE_LAMBDA { parts[r][v] = zeros(); });
      });
      dot_slots<Kind, X>(codes, row_bytes, begin, end, rows.queries + row * rows.dims, rows.dims, parts,
                         prefetch);
    }
    unroll<Vectors>([&](auto v) KVF_INLINE_LAMBDA {
      const std::int64_t at = group * score_stride + column + v * lanes;
      Floats scale = zeros(), offset = zeros();
      if constexpr (Has.token_scale) scale = load(columns.scales + at);
      if constexpr (Has.token_offset) offset = load(columns.offsets + at);
      unroll<Rows>([&](auto r) KVF_INLINE_LAMBDA {
        if constexpr (Has.token_scale)
          scores[r][v] = hn::MulAdd(scale, parts[r][v], scores[r][v]);
        else
          scores[r][v] = hn::Add(parts[r][v], scores[r][v]);
        if constexpr (Has.token_offset)
          scores[r][v] = hn::MulAdd(offset, broadcast(rows.sums[(row + r) * groups + group]), scores[r][v]);
      });
    });
  }
  unroll<Rows>([&](auto r) KVF_INLINE_LAMBDA {
    unroll<Vectors>([&](auto v) KVF_INLINE_LAMBDA {
      store(scores[r][v], rows.scores + (row + r) * score_stride + column + v * lanes);
    });
  });
}

/// The same for a range of rows.
template <CodeKind Kind, int X, Affine Has, int Vectors>
void score_slots(const std::byte* codes, std::int64_t row_bytes, const KeyRows& rows, const RowRange& range,
                 const KeyColumns& columns, std::int64_t column, Prefetch& prefetch) {
  constexpr int vector_bytes = lanes * X * kind_bits(Kind) / 8;
  each_row_block(range, [&](auto block, std::int64_t row) KVF_INLINE_LAMBDA {
    constexpr int count = decltype(block)::value;
    // Eight rows of two vectors and what else they need are more than some registers hold.
    constexpr int vectors = count == 8 && (in_bytes<Kind, X> || lanes < 16) ? 1 : Vectors;
    for (int v = 0; v < Vectors; v += vectors)
      score_slots<Kind, X, Has, vectors, count>(codes + v * vector_bytes, row_bytes, rows, row, columns,
                                                column + v * lanes, prefetch);
  });
}

/// Scores of Rows rows with Tokens tokens whose codes are contiguous; a multiple of lanes dims. Where
/// groups have scales, codes are multiplied by them; nothing else is folded.
template <CodeKind Kind, bool GroupScales, int Rows, int Tokens>
void score_tokens(const std::byte* const* tokens, const KeyRows& rows, std::int64_t row,
                  const KeyColumns& columns, std::int64_t column, Prefetch& prefetch) {
  Floats sums[Rows][Tokens];
  unroll<Rows>([&](auto r) KVF_INLINE_LAMBDA {
    unroll<Tokens>([&](auto t) KVF_INLINE_LAMBDA { sums[r][t] = zeros(); });
  });
  const float* queries = rows.queries + row * rows.dims;
  for (int begin = 0, group = 0; begin < rows.dims; begin += rows.group_dims, ++group) {
    Floats scales[Tokens];
    if constexpr (GroupScales)
      unroll<Tokens>([&](auto t) KVF_INLINE_LAMBDA {
        scales[t] = broadcast(columns.scales[group * score_stride + column + t]);
      });
    const int end = std::min(begin + rows.group_dims, rows.dims);
    for (int d = begin; d < end; d += lanes) {
      prefetch.step();
      Floats codes[Tokens];
      unroll<Tokens>([&](auto t) KVF_INLINE_LAMBDA {
        codes[t] = load_codes<Kind>(tokens[column + t], d);
        if constexpr (GroupScales) codes[t] = hn::Mul(codes[t], scales[t]);
      });
      unroll<Rows>([&](auto r) KVF_INLINE_LAMBDA {
        const Floats q = load(queries + r * rows.dims + d);
        unroll<Tokens>([&](auto t) KVF_INLINE_LAMBDA { sums[r][t] = hn::MulAdd(q, codes[t], sums[r][t]); });
      });
    }
  }
  // Summed over their lanes four at a time, whatever they belong to: the same additions for each.
  constexpr int count = Rows * Tokens;
  float flat[round_up(count, 4)];
  unroll<(count + 3) / 4>([&](auto i) KVF_INLINE_LAMBDA {
    const auto vector = [&](auto k) KVF_INLINE_LAMBDA {
      constexpr int n = 4 * decltype(i)::value + decltype(k)::value;
      if constexpr (n < count)
        return sums[n / Tokens][n % Tokens];
      else
        return zeros();
    };
    store_sums(vector(std::integral_constant<int, 0>()), vector(std::integral_constant<int, 1>()),
               vector(std::integral_constant<int, 2>()), vector(std::integral_constant<int, 3>()),
               flat + 4 * i);
  });
  for (int r = 0; r < Rows; ++r)
    std::copy_n(flat + r * Tokens, Tokens, rows.scores + (row + r) * score_stride + column);
}

/// The same for a range of rows and `count` tokens, with everything folded.
template <CodeKind Kind, Affine Has, bool Groups>
void score_tokens(const std::byte* const* tokens, const KeyRows& rows, const RowRange& range,
                  const KeyColumns& columns, int column, int count, Prefetch& prefetch) {
  constexpr bool group_scales = Groups && Has.token_scale;
  each_row_block(range, [&](auto block, std::int64_t row) KVF_INLINE_LAMBDA {
    constexpr int block_rows = decltype(block)::value, at_once = block_rows == 8 ? 2 : 4;
    int at = column;
    for (; at + at_once <= column + count; at += at_once)
      score_tokens<Kind, group_scales, block_rows, at_once>(tokens, rows, row, columns, at, prefetch);
    for (; at < column + count; ++at)
      score_tokens<Kind, group_scales, block_rows, 1>(tokens, rows, row, columns, at, prefetch);
  });
  const int groups = rows.groups();
  for (std::int64_t row = range.first; row < range.first + range.count; ++row) {
    float* scores = rows.scores + row * score_stride;
    // Behind the last column lies room that vectors may write to.
    for (int c = column; c < column + count; c += lanes) {
      Floats score = load(scores + c);
      if constexpr (Has.token_scale && !group_scales) score = hn::Mul(score, load(columns.scales + c));
      if constexpr (Has.token_offset)
        for (int group = 0; group < groups; ++group)
          score = hn::MulAdd(load(columns.offsets + group * score_stride + c),
                             broadcast(rows.sums[row * groups + group]), score);
      store(hn::Add(score, broadcast(rows.bases[row])), scores + c);
    }
  }
}

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
