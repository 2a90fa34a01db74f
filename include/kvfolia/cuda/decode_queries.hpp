// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The queries of a block: which they are, and how they become operands of mma.

#include <cstdint>

#include "kvfolia/core/attend_args.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/fp16.hpp"
#include "kvfolia/core/tensor.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/decode_args.hpp"
#include "kvfolia/cuda/decode_channels.hpp"
#include "kvfolia/cuda/decode_shape.hpp"
#include "kvfolia/cuda/unpack.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

/// A number of a tensor, through the context.
template <class Ctx>
KVF_INLINE KVF_HD float load_element(Ctx& ctx, const ConstTensor& tensor, std::int64_t at) {
  return visit_dtype(tensor.type, [&](auto element) {
    return static_cast<float>(ctx.load(static_cast<const decltype(element)*>(tensor.data) + at));
  });
}

/// Which query, head and position a column is.
template <class Layout, class Quant>
struct Columns {
  const DecodeArgs<Layout, Quant>& args;
  const DecodeRow& row;
  int kv_head;
  int first;  ///< column of the block, among the row's for this KV head

  KVF_INLINE KVF_HD int group() const { return args.query_heads / args.view.kv_heads; }
  KVF_INLINE KVF_HD bool exists(int column) const { return first + column < row.queries * group(); }
  KVF_INLINE KVF_HD int query(int column) const { return (first + column) / group(); }
  KVF_INLINE KVF_HD int head(int column) const { return kv_head * group() + (first + column) % group(); }
};

/// Rotates a vector as pages' are, of whose dims a lane of the warp has every 32nd.
template <class Q, int Dims, class Ctx, int Count>
KVF_INLINE KVF_HD void rotate(Ctx& ctx, float (&x)[Count]) {
  constexpr int block = Q::block(Dims);
  KVF_UNROLL
  for (int half = 1; half < block && half < warp_size; half *= 2) {
    KVF_UNROLLED (i, Count) {
      const float other = ctx.shfl_xor(x[i], half);
      x[i] = (ctx.lane() & half) != 0 ? other - x[i] : x[i] + other;
    }
  }
  KVF_UNROLL
  for (int half = 1; half * warp_size < block; half *= 2) {
    KVF_UNROLLED (i, Count) {
      if ((i & half) != 0) continue;
      const float a = x[i], b = x[i + half];
      x[i] = a + b;
      x[i + half] = a - b;
    }
  }
  KVF_UNROLLED (i, Count) x[i] *= Q::factor(Dims);
}

/// Queries in shared memory, as 16-bit numbers. All of a block have a part in stage(); what it gives may be
/// read behind a barrier.
template <class Ctx, class Layout, class Quant, class Shape>
class StagedQueries {
 public:
  using KeyShape = typename Shape::KeyShape;
  static constexpr bool is_bf16 = KeyShape::kind == CodeKind::bf16;

  KVF_INLINE KVF_HD StagedQueries(Ctx& ctx, const Columns<Layout, Quant>& columns)
      : ctx_(ctx), columns_(columns) {}

  /// Queries as mma takes them: of magnitude 1 to 2 at most, with the power of two that this took kept
  /// beside them.
  KVF_INLINE KVF_HD void stage() {
    // A warp takes columns in turn, its lanes dims.
    KVF_NO_UNROLL
    for (int column = ctx_.warp(); column < Shape::columns; column += Shape::warps) {
      constexpr int dims_per_lane = (Layout::key_dim + warp_size - 1) / warp_size;
      const bool exists = columns_.exists(column);
      const std::int64_t at =
          exists ? args().args.queries.offset(columns_.row.first_query + columns_.query(column),
                                              columns_.head(column))
                 : 0;
      float x[dims_per_lane], largest = 0.0f;
      KVF_UNROLLED (i, dims_per_lane) {
        const int dim = i * warp_size + ctx_.lane();
        x[i] = exists && dim < Layout::key_dim ? load_element(ctx_, args().args.queries, at + dim) : 0.0f;
      }
      if constexpr (rotates<typename Shape::Key>) rotate<typename Shape::Key, Layout::key_dim>(ctx_, x);
      KVF_UNROLLED (i, dims_per_lane) {
        const float magnitude = x[i] < 0.0f ? -x[i] : x[i];
        largest = Ctx::max(largest, magnitude);
      }
      KVF_UNROLL
      for (int mask = 16; mask > 0; mask /= 2) largest = Ctx::max(largest, ctx_.shfl_xor(largest, mask));
      // 2^-e and 2^e, where 2^e is the largest one's; 1 where that is 0, tiny or not finite.
      const std::uint32_t exponent = __builtin_bit_cast(std::uint32_t, largest) >> 23;
      const bool fits = 1 < exponent && exponent < 253;
      const float down = fits ? __builtin_bit_cast(float, (254 - exponent) << 23) : 1.0f;
      const float up = fits ? __builtin_bit_cast(float, exponent << 23) : 1.0f;
      KVF_UNROLLED (i, dims_per_lane) {
        const int dim = i * warp_size + ctx_.lane();
        const std::uint32_t rounded = pack<Ctx, is_bf16>(x[i] * down, 0.0f);
        store_pair(Shape::queries, column, dim, rounded);
        if constexpr (is_bf16)
          store_pair(Shape::query_rests, column, dim,
                     pack<Ctx, true>(x[i] * down - number_of(rounded), 0.0f));
        // What offsets are multiplied by is what codes are.
        x[i] = number_of(rounded);
      }
      if constexpr (KeyShape::token_offset) {
        KVF_UNROLLED (group, KeyShape::groups) {
          float sum = 0.0f;
          KVF_UNROLLED (i, dims_per_lane) {
            if (KeyShape::groups == 1 || (i * warp_size + ctx_.lane()) / KeyShape::group_dims == group)
              sum += x[i];
          }
          KVF_UNROLL
          for (int mask = 16; mask > 0; mask /= 2) sum += ctx_.shfl_xor(sum, mask);
          if (ctx_.lane() == 0) ctx_.store_shared(sum_at(column, group), sum);
        }
      }
      if (ctx_.lane() == 0)
        ctx_.store_shared(Shape::query_scales + static_cast<SharedOffset>(column * 4), up * args().scale);
    }
  }

  /// A lane's operand of one step; `quad` is lane % 4, its column its own. `rest`: what bf16 cut off.
  KVF_INLINE KVF_HD std::uint32_t pair(int column, int step, int quad, int half, bool rest = false) {
    const SharedOffset queries = rest ? Shape::query_rests : Shape::queries;
    const int dim = key_dim_of(KeyShape::kind, step, quad, half, 0);
    if constexpr (kind_bits(KeyShape::kind) == 4)
      return element(queries, column, dim) |
             element(queries, column, key_dim_of(KeyShape::kind, step, quad, half, 1)) << 16;
    else  // neighbours
      return ctx_.template load_shared<std::uint32_t>(queries + query_at(column, dim));
  }
  /// What a column's products are multiplied by to become scores, to base e.
  KVF_INLINE KVF_HD float scale(int column) {
    return ctx_.template load_shared<float>(Shape::query_scales + static_cast<SharedOffset>(column * 4));
  }
  /// The sum of a column's elements in a group, where offsets need it.
  KVF_INLINE KVF_HD float sum(int column, int group) {
    return ctx_.template load_shared<float>(sum_at(column, group));
  }

 private:
  /// Two lanes' elements of a column make a word.
  KVF_INLINE KVF_HD void store_pair(SharedOffset queries, int column, int dim, std::uint32_t element) {
    const std::uint32_t other = ctx_.shfl_xor(element, 1);
    if (ctx_.lane() % 2 == 0 && dim < Shape::query_pitch / 2)
      ctx_.store_shared(queries + query_at(column, dim), (element & 0xffffu) | other << 16);
  }
  static KVF_INLINE KVF_HD SharedOffset query_at(int column, int dim) {
    return static_cast<SharedOffset>(column * Shape::query_pitch + dim * 2);
  }
  static KVF_INLINE KVF_HD float number_of(std::uint32_t word) {
    return is_bf16 ? static_cast<float>(bf16::from_bits(static_cast<std::uint16_t>(word))) : half_of(word, 0);
  }

  /// Dims beyond the last one are 0.
  KVF_INLINE KVF_HD std::uint32_t element(SharedOffset queries, int column, int dim) {
    if (dim >= Layout::key_dim) return 0;
    const auto word = ctx_.template load_shared<std::uint32_t>(queries + query_at(column, dim & ~1));
    return dim % 2 == 0 ? word & 0xffffu : word >> 16;
  }
  static KVF_INLINE KVF_HD SharedOffset sum_at(int column, int group) {
    return Shape::query_sums + static_cast<SharedOffset>((column * KeyShape::groups + group) * 4);
  }
  KVF_INLINE KVF_HD const DecodeArgs<Layout, Quant>& args() const { return columns_.args; }

  Ctx& ctx_;
  const Columns<Layout, Quant>& columns_;
};

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
