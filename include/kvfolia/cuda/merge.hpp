// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Putting the results of a row's splits together: the body of the merge kernel.

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/tensor.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/decode_args.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

inline constexpr int merge_threads = 128;

/// What a block has in shared memory, rotated but for the factor.
template <class Q, int Dims, class Ctx>
KVF_INLINE KVF_HD void rotate_back(Ctx& ctx) {
  KVF_NO_UNROLL
  for (int half = 1; half < Q::block(Dims); half *= 2) {
    ctx.sync();
    KVF_NO_UNROLL
    for (int i = ctx.thread(); i < Dims / 2; i += merge_threads) {
      const auto first = static_cast<SharedOffset>((i / half * 2 * half + i % half) * 4);
      const SharedOffset second = first + static_cast<SharedOffset>(half * 4);
      const float a = ctx.template load_shared<float>(first), b = ctx.template load_shared<float>(second);
      ctx.store_shared(first, a + b);
      ctx.store_shared(second, a - b);
    }
  }
  ctx.sync();
}

/// Shared memory of a block: an output, where it has to be rotated back.
template <class Layout, class Quant>
inline constexpr SharedOffset merge_shared_bytes =
    rotates<ValueSide<FormatQuant<coded_format, Quant>>> ? Layout::value_dim * 4 : 0;

/// A block's work: x is the query head, y the row's query, z the row. Splits are added from the first to the
/// last. Rows without keys get 0 and -infinity, or the sink logit.
template <class Layout, class Quant, class Ctx>
KVF_INLINE KVF_HD void merge_splits(Ctx& ctx, const DecodeArgs<Layout, Quant>& args) {
  using Value = ValueSide<FormatQuant<coded_format, Quant>>;
  const int head = ctx.block_x();
  const int kv_head = head / (args.query_heads / args.view.kv_heads);
  const DecodeRow row = read_row(ctx, args.batch, ctx.block_z(), kv_head, args.view.page_tokens);
  if (ctx.block_y() >= row.queries) return;
  const int splits = (row.length + args.split_tokens - 1) / args.split_tokens;
  const std::int64_t token = row.first_query + ctx.block_y();
  const auto each_state = [&](auto&& f) {
    KVF_NO_UNROLL
    for (int pass = 0; pass < pass_count<Quant>; ++pass) {
      KVF_NO_UNROLL
      for (int s = 0; s < splits; ++s) {
        const std::int64_t at = args.partials.at(token, args.query_heads, head, pass, s);
        f(ctx.load(args.partials.lse + at) * log2_e, at);
      }
    }
  };

  const float* sink = args.args.sink_logits;
  const bool has_sink = sink && !args.args.partial;
  float largest = has_sink ? ctx.load(sink + head) * log2_e : minus_infinity();
  each_state([&](float lse, std::int64_t) { largest = Ctx::max(largest, lse); });
  const float base = largest == minus_infinity() ? 0.0f : largest;
  float sum = has_sink ? Ctx::exp2(ctx.load(sink + head) * log2_e - base) : 0.0f;
  each_state([&](float lse, std::int64_t) { sum += Ctx::exp2(lse - base); });

  const auto write = [&](int dim, float x) {
    visit_dtype(args.args.out.type, [&](auto element) {
      using T = decltype(element);
      ctx.store(static_cast<T*>(args.args.out.data) + args.args.out.offset(token, head) + dim,
                static_cast<T>(x));
    });
  };
  KVF_NO_UNROLL
  for (int dim = ctx.thread(); dim < Layout::value_dim; dim += merge_threads) {
    float out = 0.0f;
    each_state([&](float lse, std::int64_t at) {
      out += Ctx::exp2(lse - base) * ctx.load(args.partials.out + at * Layout::value_dim + dim);
    });
    out = sum == 0.0f ? 0.0f : out / sum;
    if constexpr (rotates<Value>)
      ctx.store_shared(static_cast<SharedOffset>(dim * 4), out);
    else
      write(dim, out);
  }
  if constexpr (rotates<Value>) {
    rotate_back<Value, Layout::value_dim>(ctx);
    KVF_NO_UNROLL
    for (int dim = ctx.thread(); dim < Layout::value_dim; dim += merge_threads)
      write(dim, ctx.template load_shared<float>(static_cast<SharedOffset>(dim * 4)) *
                     Value::factor(Layout::value_dim));
  }
  if (args.args.lse.data && ctx.thread() == 0)
    ctx.store(&args.args.lse.at(token, head),
              NaturalLse{sum == 0.0f ? minus_infinity() : (base + Ctx::log2(sum)) * ln_2});
}

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
