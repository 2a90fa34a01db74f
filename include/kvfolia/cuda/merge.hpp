// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Putting the results of a row's splits together: the body of the merge kernel.

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/tensor.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/decode_args.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

inline constexpr int merge_threads = 128;

/// A block's work: x is the query head, y the row's query, z the row. Splits are added from the first to the
/// last. Rows without keys get 0 and -infinity, or the sink logit.
template <class Layout, class Quant, class Ctx>
KVF_INLINE KVF_HD void merge_splits(Ctx& ctx, const DecodeArgs<Layout, Quant>& args) {
  const int head = ctx.block_x();
  const int kv_head = head / (args.query_heads / args.view.kv_heads);
  const DecodeRow row = read_row(ctx, args.batch, ctx.block_z(), kv_head, args.view.page_tokens);
  if (ctx.block_y() >= row.queries) return;
  const int splits = (row.length + args.split_tokens - 1) / args.split_tokens;
  const std::int64_t token = row.first_query + ctx.block_y();
  const std::int64_t first = args.partials.at(token, args.query_heads, head, 0);

  const float* sink = args.args.sink_logits;
  const bool has_sink = sink && !args.args.partial;
  float largest = has_sink ? ctx.load(sink + head) * log2_e : minus_infinity();
  KVF_NO_UNROLL
  for (int s = 0; s < splits; ++s)
    largest = Ctx::max(largest, ctx.load(args.partials.lse + first + s) * log2_e);
  const float base = largest == minus_infinity() ? 0.0f : largest;
  float sum = has_sink ? Ctx::exp2(ctx.load(sink + head) * log2_e - base) : 0.0f;
  KVF_NO_UNROLL
  for (int s = 0; s < splits; ++s) sum += Ctx::exp2(ctx.load(args.partials.lse + first + s) * log2_e - base);

  KVF_NO_UNROLL
  for (int dim = ctx.thread(); dim < Layout::value_dim; dim += merge_threads) {
    float out = 0.0f;
    KVF_NO_UNROLL
    for (int s = 0; s < splits; ++s) {
      const float weight = Ctx::exp2(ctx.load(args.partials.lse + first + s) * log2_e - base);
      out += weight * ctx.load(args.partials.out + (first + s) * Layout::value_dim + dim);
    }
    out = sum == 0.0f ? 0.0f : out / sum;
    visit_dtype(args.args.out.type, [&](auto element) {
      using T = decltype(element);
      ctx.store(static_cast<T*>(args.args.out.data) + args.args.out.offset(token, head) + dim,
                static_cast<T>(out));
    });
  }
  if (args.args.lse.data && ctx.thread() == 0)
    ctx.store(&args.args.lse.at(token, head),
              NaturalLse{sum == 0.0f ? minus_infinity() : (base + Ctx::log2(sum)) * ln_2});
}

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
