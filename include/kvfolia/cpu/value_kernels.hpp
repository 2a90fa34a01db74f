// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Weighted sums of values where they lie: the innermost loops of outputs. Every sum adds its tokens in
// ascending order, whatever else is computed beside it. Templates on what a code is, not on quantizers or
// dims: those share their machine code.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/cpu/byte_weights.hpp"
#include "kvfolia/cpu/codes.hpp"
#include "kvfolia/cpu/key_kernels.hpp"
#include "kvfolia/cpu/prefetch.hpp"
#include "kvfolia/cpu/row_blocks.hpp"
#include "kvfolia/cpu/simd.hpp"
#include "kvfolia/cpu/target.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

/// Rows of weights in memory: of row r, token t, group g at g * group_stride + r * score_stride + t.
struct Weights {
  const float* data;
  std::int64_t group_stride;
};

/// Where the codes of tokens begin: at addresses of their own, or one behind the other.
struct TokenAddresses {
  const std::byte* const* addresses;
  KVF_INLINE const std::byte* operator()(int t) const { return addresses[t]; }
};
struct TokenRows {
  const std::byte* first;
  std::int64_t stride;
  KVF_INLINE const std::byte* operator()(int t) const { return first + t * stride; }
};

inline constexpr int tokens_at_once = 64;

/// sums[r][d] += weight * value over tokens [begin, end), for Rows rows and lanes * Vectors dims from `dim`
/// on.
template <CodeKind Kind, bool Groups, int Rows, int Vectors, class Tokens>
void add_tokens(const Tokens& tokens, int begin, int end, int dim, int group_dims, const Weights& weights,
                float* sums, std::int64_t sum_stride, Prefetch& prefetch) {
  Floats totals[Rows][Vectors];
  unroll<Rows>([&](auto r) KVF_INLINE_LAMBDA {
    unroll<Vectors>([&](auto v)
                        KVF_INLINE_LAMBDA { totals[r][v] = load(sums + r * sum_stride + dim + v * lanes); });
  });
  std::int64_t group_at[Vectors] = {};
  if constexpr (Groups)
    for (int v = 0; v < Vectors; ++v) group_at[v] = (dim + v * lanes) / group_dims * weights.group_stride;
  for (int t = begin; t < end; ++t) {
    prefetch.step();
    const std::byte* token = tokens(t);
    Floats codes[Vectors];
    unroll<Vectors>([&](auto v) KVF_INLINE_LAMBDA { codes[v] = load_codes<Kind>(token, dim + v * lanes); });
    unroll<Rows>([&](auto r) KVF_INLINE_LAMBDA {
      const float* row = weights.data + r * score_stride + t;
      unroll<Vectors>([&](auto v) KVF_INLINE_LAMBDA {
        const Floats weight = broadcast(row[Groups ? group_at[v] : 0]);
        totals[r][v] = hn::MulAdd(weight, codes[v], totals[r][v]);
      });
    });
  }
  unroll<Rows>([&](auto r) KVF_INLINE_LAMBDA {
    unroll<Vectors>([&](auto v)
                        KVF_INLINE_LAMBDA { store(totals[r][v], sums + r * sum_stride + dim + v * lanes); });
  });
}

/// The same for a range of rows and all dims, a multiple of lanes.
template <CodeKind Kind, bool Groups, class Tokens>
void add_tokens(const Tokens& tokens, int count, int dims, int group_dims, const Weights& all,
                const RowRange& range, float* sums, std::int64_t stride, Prefetch& prefetch) {
  each_row_block(range, [&](auto block, std::int64_t row) KVF_INLINE_LAMBDA {
    constexpr int rows = decltype(block)::value;
    constexpr int most = lanes < 16 ? (rows == 8 ? 1 : 2) : (rows == 8 ? 2 : 4);  // as registers allow
    const Weights weights{all.data + row * score_stride, all.group_stride};
    float* to = sums + row * stride;
    // Few tokens at a time: from the first dims to the last ones they stay in the nearest cache.
    for (int begin = 0; begin < count; begin += tokens_at_once) {
      const int end = std::min(begin + tokens_at_once, count);
      int dim = 0;
      for (; dim + most * lanes <= dims; dim += most * lanes)
        add_tokens<Kind, Groups, rows, most>(tokens, begin, end, dim, group_dims, weights, to, stride,
                                             prefetch);
      for (; dim < dims; dim += lanes)
        add_tokens<Kind, Groups, rows, 1>(tokens, begin, end, dim, group_dims, weights, to, stride, prefetch);
    }
  });
}

/// Weights of words, four slots side by side, as two signed bytes each: weight = step * (128 * high + low).
struct ByteWeights {
  const std::int32_t* high;  ///< of row r, group g, word i at (r * groups + g) * stride + i
  const std::int32_t* low;
  const ByteSums* sums;  ///< [row][group]
  const float* steps;    ///< [row][group]
  int groups;
  int group_dims;
  std::int64_t stride;
};

/// Whether weighted sums of values, X slots of a dim side by side in a word, are computed in integers.
template <CodeKind Kind, int X>
inline constexpr bool sums_in_bytes = has_dot4&& Kind == CodeKind::int8&& X == 4;

/// Dims of values, at most.
inline constexpr int most_word_dims = 512;

/// Sums of products of codes with Rows rows' weights, both halves, while they are integers.
template <int Rows>
struct WordSums {
  std::int32_t high[Rows][most_word_dims];
  std::int32_t low[Rows][most_word_dims];
};

/// sums[r][d] += weight * code for words [begin, end), Rows rows and lanes * Vectors dims from `dim` on, of
/// one group. `words` points to the first dim's word of each four slots.
template <int Rows, int Vectors>
void add_words(const std::byte* const* words, int begin, int end, int dim, const ByteWeights& weights,
               std::int64_t row, WordSums<Rows>& sums, Prefetch& prefetch) {
  const Int32Tag i32;
  const std::int64_t row_stride = std::int64_t{weights.groups} * weights.stride;
  const std::int64_t first = (row * weights.groups + dim / weights.group_dims) * weights.stride;
  const std::int32_t *row_high = weights.high + first, *row_low = weights.low + first;
  Int32s high[Rows][Vectors], low[Rows][Vectors];
  unroll<Rows>([&](auto r) KVF_INLINE_LAMBDA {
    unroll<Vectors>([&](auto v) KVF_INLINE_LAMBDA {
      high[r][v] = hn::LoadU(i32, sums.high[r] + dim + v * lanes);
      low[r][v] = hn::LoadU(i32, sums.low[r] + dim + v * lanes);
    });
  });
  for (int w = begin; w < end; ++w) {
    prefetch.step();
    Uint32s codes[Vectors];
    unroll<Vectors>([&](auto v) KVF_INLINE_LAMBDA {
      codes[v] = hn::Xor(load_as<std::uint32_t>(words[w] + (dim + v * lanes) * 4),
                         hn::Set(Uint32Tag(), 0x80808080u));
    });
    unroll<Rows>([&](auto r) KVF_INLINE_LAMBDA {
      const Int32s by_high = hn::Set(i32, row_high[r * row_stride + w]);
      unroll<Vectors>([&](auto v) KVF_INLINE_LAMBDA { high[r][v] = dot4(high[r][v], codes[v], by_high); });
      const Int32s by_low = hn::Set(i32, row_low[r * row_stride + w]);
      unroll<Vectors>([&](auto v) KVF_INLINE_LAMBDA { low[r][v] = dot4(low[r][v], codes[v], by_low); });
    });
  }
  unroll<Rows>([&](auto r) KVF_INLINE_LAMBDA {
    unroll<Vectors>([&](auto v) KVF_INLINE_LAMBDA {
      hn::StoreU(high[r][v], i32, sums.high[r] + dim + v * lanes);
      hn::StoreU(low[r][v], i32, sums.low[r] + dim + v * lanes);
    });
  });
}

/// The same from the first word to the last, few words at a time, as floats in the end.
template <int Rows>
void add_words(const std::byte* const* words, int count, int dims, const ByteWeights& weights,
               std::int64_t row, float* sums, std::int64_t stride, Prefetch& prefetch) {
  constexpr int most = Rows == 8 || lanes < 16 ? 1 : 2;  // as registers allow
  constexpr int bias = 128;                              // what makes codes unsigned
  const bool fits = weights.group_dims % (most * lanes) == 0;
  const Int32Tag i32;
  WordSums<Rows> products;
  for (int r = 0; r < Rows; ++r)
    for (int d = 0; d < dims; d += lanes) {
      const ByteSums& all = weights.sums[(row + r) * weights.groups + d / weights.group_dims];
      hn::StoreU(hn::Set(i32, -bias * all.high), i32, products.high[r] + d);
      hn::StoreU(hn::Set(i32, -bias * all.low), i32, products.low[r] + d);
    }
  for (int begin = 0; begin < count; begin += tokens_at_once / 4) {
    const int end = std::min(begin + tokens_at_once / 4, count);
    int d = 0;
    for (; fits && d + most * lanes <= dims; d += most * lanes)
      add_words<Rows, most>(words, begin, end, d, weights, row, products, prefetch);
    for (; d < dims; d += lanes) add_words<Rows, 1>(words, begin, end, d, weights, row, products, prefetch);
  }
  for (int r = 0; r < Rows; ++r)
    for (int d = 0; d < dims; d += lanes) {
      const Int32s high = hn::LoadU(i32, products.high[r] + d), low = hn::LoadU(i32, products.low[r] + d);
      const Floats sum = hn::ConvertTo(FloatTag(), hn::Add(hn::ShiftLeft<7>(high), low));
      const Floats step = broadcast(weights.steps[(row + r) * weights.groups + d / weights.group_dims]);
      float* to = sums + r * stride + d;
      store(hn::MulAdd(step, sum, load(to)), to);
    }
}

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
