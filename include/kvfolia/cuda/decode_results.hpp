// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The end of a decode block: its warps' results become one, in global memory.

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/decode_args.hpp"
#include "kvfolia/cuda/decode_queries.hpp"
#include "kvfolia/cuda/decode_shape.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

/// Weights are at most 2 to the power of this: fp16's range reaches further down than up.
inline constexpr float weight_exponent = 14.0f;

/// Puts together what warps left in shared memory, from the first to the last.
template <class Shape, class Ctx, class Layout, class Quant>
KVF_INLINE KVF_HD void write_results(Ctx& ctx, const Columns<Layout, Quant>& columns, int split) {
  const DecodeArgs<Layout, Quant>& args = columns.args;
  const auto of_warp = [&](SharedOffset what, int warp, int column) {
    return ctx.template load_shared<float>(what +
                                           static_cast<SharedOffset>((warp * Shape::columns + column) * 4));
  };
  KVF_NO_UNROLL
  for (int column = 0; column < Shape::columns && columns.exists(column); ++column) {
    float largest = minus_infinity(), sum = 0.0f, factors[Shape::warps];
    KVF_UNROLLED (warp, Shape::warps) largest = Ctx::max(largest, of_warp(Shape::maxima, warp, column));
    KVF_UNROLLED (warp, Shape::warps) {
      const float maximum = of_warp(Shape::maxima, warp, column);
      factors[warp] = maximum == minus_infinity() ? 0.0f : Ctx::exp2(maximum - largest);
      sum += factors[warp] * of_warp(Shape::weights, warp, column);
    }
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    const int head = columns.head(column);
    constexpr int pass = Shape::format == coded_format ? 0 : 1;
    const std::int64_t at = args.partials.at(columns.row.first_query + columns.query(column),
                                             args.query_heads, head, pass, split);
    KVF_NO_UNROLL
    for (int dim = ctx.thread(); dim < Layout::value_dim; dim += Shape::threads) {
      float out = 0.0f;
      KVF_UNROLLED (warp, Shape::warps)
        out += factors[warp] * ctx.template load_shared<float>(static_cast<SharedOffset>(
                                   (warp * Shape::columns + column) * Shape::sum_pitch + dim * 4));
      ctx.store(args.partials.out + at * Layout::value_dim + dim, out * inverse);
    }
    if (ctx.thread() == 0)
      ctx.store(args.partials.lse + at,
                sum == 0.0f ? minus_infinity() : (largest - weight_exponent + Ctx::log2(sum)) * ln_2);
  }
}

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
