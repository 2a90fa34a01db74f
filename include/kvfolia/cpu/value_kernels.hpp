// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Weighted sums of values where they lie: the innermost loops of outputs. Every sum adds its tokens in
// ascending order, whatever else is computed beside it. Templates on what a code is, not on quantizers or
// dims: those share their machine code.

#include <cstddef>
#include <cstdint>

#include "kvfolia/core/config.hpp"
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

/// sums[r][d] += weight * value over `count` tokens, for Rows rows and lanes * Vectors dims from `dim` on.
template <CodeKind Kind, bool Groups, int Rows, int Vectors, class Tokens>
void add_tokens(const Tokens& tokens, int count, int dim, int group_dims, const Weights& weights, float* sums,
                std::int64_t sum_stride, Prefetch& prefetch) {
  Floats totals[Rows][Vectors];
  unroll<Rows>([&](auto r) KVF_INLINE_LAMBDA {
    unroll<Vectors>([&](auto v)
                        KVF_INLINE_LAMBDA { totals[r][v] = load(sums + r * sum_stride + dim + v * lanes); });
  });
  std::int64_t group_at[Vectors] = {};
  if constexpr (Groups)
    for (int v = 0; v < Vectors; ++v) group_at[v] = (dim + v * lanes) / group_dims * weights.group_stride;
  for (int t = 0; t < count; ++t) {
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
    int dim = 0;
    for (; dim + most * lanes <= dims; dim += most * lanes)
      add_tokens<Kind, Groups, rows, most>(tokens, count, dim, group_dims, weights, to, stride, prefetch);
    for (; dim < dims; dim += lanes)
      add_tokens<Kind, Groups, rows, 1>(tokens, count, dim, group_dims, weights, to, stride, prefetch);
  });
}

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
