// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// How the threads of a block encode tokens that lie in shared memory: the bytes that encode() writes, each
// thread those of a group of a token's dims, or of two channels of a block of tokens.

#include <cstdint>
#include <type_traits>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/fp16.hpp"
#include "kvfolia/core/rounding.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/page_values.hpp"
#include "kvfolia/cuda/staged_tile.hpp"
#include "kvfolia/quant/centered.hpp"
#include "kvfolia/quant/code_kind.hpp"
#include "kvfolia/quant/compact.hpp"
#include "kvfolia/quant/int4.hpp"
#include "kvfolia/quant/rotated.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

inline constexpr int write_threads = 128;  ///< of a block that writes pages
inline constexpr int write_blocks = 6;     ///< of a multiprocessor, whose registers must suffice
inline constexpr int write_warps = write_threads / warp_size;

/// Where a token lies: an entry, and the slot in its page.
struct alignas(8) Place {
  std::int32_t entry;  ///< negative: nowhere
  std::int32_t slot;
};

/// Bytes of a parameter of every channel of a block; 0: there is none.
template <class Q>
inline constexpr int channel_bytes = 0;
template <int Tokens>
inline constexpr int channel_bytes<Int4Channels<Tokens>> = sizeof(ScaleMin);
template <int Tokens>
inline constexpr int channel_bytes<Compact4Channels<Tokens>> =
    sizeof(typename Compact4Channels<Tokens>::Param);
template <class Q, int Tokens>
inline constexpr int channel_bytes<Centered<Q, Tokens>> = sizeof(fp16);
template <class Q, int Block>
inline constexpr int channel_bytes<Rotated<Q, Block>> = channel_bytes<Q>;

/// Bytes of a token's own parameters.
template <class Q>
KVF_INLINE KVF_HD constexpr int token_param_bytes(int dims) {
  return Q::seal_tokens == 1 ? static_cast<int>(Q::param_bytes(dims, 1)) : 0;
}
template <class Q>
inline constexpr bool is_centered = false;
template <class Q, int Tokens>
inline constexpr bool is_centered<Centered<Q, Tokens>> = true;
template <class Q, int Block>
inline constexpr bool is_centered<Rotated<Q, Block>> = is_centered<Q>;

/// What Centered codes the rest with; any other quantizer itself.
template <class Q>
struct CoderOf {
  using type = Q;
};
template <class Q, int Tokens>
struct CoderOf<Centered<Q, Tokens>> {
  using type = Q;
};
template <class Q, int Block>
struct CoderOf<Rotated<Q, Block>> : CoderOf<Q> {};

/// Tokens in shared memory on their way into pages: what of them lies where.
template <class Q, int DimsT>
struct EncodeShape {
  using Quant = Q;
  static constexpr int dims = DimsT;
  static constexpr bool is_block = Q::seal_tokens > 1;
  /// Floats of 16 or 32 bits, which need no encoding.
  static constexpr bool is_exact = !is_block &&
                                   kvfolia::detail::kind_bits(kvfolia::detail::code_kind<Q>) >= 16 &&
                                   kvfolia::detail::code_kind<Q> != kvfolia::detail::CodeKind::other;
  static constexpr int rows = is_block ? Q::seal_tokens : dims > 256 ? 16 : 32;
  static constexpr int param_bytes = token_param_bytes<typename CoderOf<Q>::type>(dims);
  using Values = ValueRows<dims>;
  using Codes = ByteRows<code_bytes<Q>(dims)>;
  using Params = ByteRows<param_bytes == 0 ? 4 : param_bytes>;
  using Channels = ChannelCells<dims, channel_bytes<Q> == 0 ? 1 : channel_bytes<Q>>;

  static constexpr std::uint32_t scratch = 0;                       ///< of two reductions
  static constexpr std::uint32_t references = 2 * write_warps * 4;  ///< of Compact4Channels
  static constexpr std::uint32_t targets = references + 8;          ///< of codes, then those of parameters
  static constexpr std::uint32_t values = (targets + 2 * rows * 8 + 15) / 16 * 16;
  static constexpr std::uint32_t codes = (values + Values::bytes(rows) + 15) / 16 * 16;
  static constexpr std::uint32_t params = codes + (is_exact ? 0 : Codes::bytes(rows));
  static constexpr std::uint32_t channels = params + (param_bytes == 0 ? 0 : Params::bytes(rows));
  static constexpr std::uint32_t bytes = channels + (channel_bytes<Q> == 0 ? 0 : Channels::bytes);
};

/// Runs f(i) for 0 <= i < count, a block's threads in turn.
template <class Ctx, class F>
KVF_INLINE KVF_HD void each_thread(Ctx& ctx, int count, const F& f) {
  KVF_NO_UNROLL
  for (int i = ctx.thread(); i < count; i += write_threads) f(i);
}

/// The same, where several at a time hide what memory takes.
template <int Count, class Ctx, class F>
KVF_INLINE KVF_HD void each_thread_ahead(Ctx& ctx, const F& f) {
  KVF_UNROLL_4
  for (int first = 0; first < Count; first += write_threads)
    if (Count % write_threads == 0 || first + ctx.thread() < Count) f(first + ctx.thread());
}

/// The largest of a number that each thread of a block has, none of them negative or NaN.
template <class Ctx>
KVF_INLINE KVF_HD float block_max(Ctx& ctx, float x, SharedOffset scratch) {
  KVF_UNROLL
  for (int half = warp_size / 2; half > 0; half /= 2) {
    const float other = ctx.shfl_xor(x, half);
    x = other > x ? other : x;
  }
  if (ctx.lane() == 0) ctx.store_shared(scratch + 4 * static_cast<std::uint32_t>(ctx.warp()), x);
  ctx.sync();
  float most = 0.0f;
  KVF_UNROLLED (warp, write_warps) {
    const float other = ctx.template load_shared<float>(scratch + 4 * static_cast<std::uint32_t>(warp));
    most = other > most ? other : most;
  }
  return most;
}

template <class Ctx, class Shape>
class Encoder {
 public:
  using Quant = typename Shape::Quant;
  static constexpr int dims = Shape::dims;

  KVF_INLINE KVF_HD explicit Encoder(Ctx& ctx) : ctx_(ctx) {}

  KVF_INLINE KVF_HD float value(int row, int dim) const {
    return ctx_.template load_shared<float>(values.at(row, dim));
  }
  KVF_INLINE KVF_HD void set_value(int row, int dim, float x) const {
    ctx_.store_shared(values.at(row, dim), x);
  }

  /// Hadamard transforms of the rows from `first` on, as Rotated::rotate makes them: the same sums in the
  /// same order. Called by all of a block, behind a barrier; ends with one.
  template <class Rotation>
  KVF_INLINE KVF_HD void rotate(int first, int end) const {
    constexpr int block = Rotation::block(dims);
    rotate_from<block, 1>(first, end, Rotation::factor(dims));
  }

  /// Encodes rows of which has(row) is true; of a block of tokens, all. As rotate().
  template <class Has>
  KVF_INLINE KVF_HD void encode(const Quant& quant, const Has& has) const {
    if constexpr (Shape::is_block)
      encode_block(quant, has);
    else
      encode_tokens(quant, has, [&](int row, int dim) { return value(row, dim); });
    ctx_.sync();
  }

  const typename Shape::Values values{Shape::values};
  const typename Shape::Codes codes{Shape::codes};
  const typename Shape::Params params{Shape::params};
  const typename Shape::Channels channels{Shape::channels};

 private:
  /// Sixteen numbers at a time are in registers.
  template <int Block, int Stride>
  KVF_INLINE KVF_HD void rotate_from(int first, int end, float factor) const {
    constexpr int left = Block / Stride, radix = left < 16 ? left : 16;
    constexpr bool is_last = radix == left;
    constexpr int groups = dims / radix;
    each_thread(ctx_, (end - first) * groups, [&](int i) {
      const int row = first + i % (end - first), group = i / (end - first);
      const int begin = group / Stride * Stride * radix + group % Stride;
      float x[radix];
      KVF_UNROLLED (j, radix) x[j] = value(row, begin + j * Stride);
      KVF_UNROLL
      for (int half = 1; half < radix; half *= 2) {
        KVF_UNROLLED (j, radix) {
          if ((j & half) != 0) continue;
          const float a = x[j], b = x[j + half];
          x[j] = a + b;
          x[j + half] = a - b;
        }
      }
      KVF_UNROLLED (j, radix)
        set_value(row, begin + j * Stride, is_last ? __builtin_fmaf(x[j], factor, 0.0f) : x[j]);
    });
    ctx_.sync();
    if constexpr (!is_last) rotate_from<Block, Stride * radix>(first, end, factor);
  }

  /// Tokens coded by themselves: a group of dims a thread, where groups are independent.
  template <class Q, class Has, class Values>
  KVF_INLINE KVF_HD void encode_tokens(const Q& quant, const Has& has, const Values& of) const {
    constexpr bool apart = is_known<Q> && Q::group_dims > 0 && Q::group_dims < dims;
    constexpr int group = apart ? Q::group_dims : dims, whole = dims / group;
    each_thread(ctx_, Shape::rows * whole, [&](int i) {
      if (has(i % Shape::rows)) encode_group<group, group>(quant, i % Shape::rows, i / Shape::rows, of);
    });
    if constexpr (dims % group != 0)
      each_thread(ctx_, Shape::rows, [&](int row) {
        if (has(row)) encode_group<group, dims % group>(quant, row, whole, of);
      });
  }
  template <int Group, int Dims, class Q, class Values>
  KVF_INLINE KVF_HD void encode_group(const Q& quant, int row, int group, const Values& of) const {
    using Tile = StagedTile<Ctx, Dims, typename Shape::Codes, typename Shape::Params>;
    const int begin = group * Group;
    const Tile tile{
        ctx_, codes, params, row, code_bytes<Q>(begin), group * static_cast<int>(Q::param_bytes(Group, 1))};
    quant.encode(tile, 0, 1, [&](int, int d) { return of(row, begin + d); });
  }

  /// Two channels of a block, which share a byte of 4-bit codes, are a thread's.
  using Pair = StagedTile<Ctx, 2, typename Shape::Codes, typename Shape::Channels>;
  KVF_INLINE KVF_HD Pair pair(int p) const { return {ctx_, codes, channels, 0, p, 2 * p}; }

  template <int Tokens, class Has>
  KVF_INLINE KVF_HD void encode_block(const Int4Channels<Tokens>& quant, const Has&) const {
    each_thread(ctx_, dims / 2, [&](int p) {
      quant.encode(pair(p), 0, Tokens, [&](int t, int d) { return value(t, 2 * p + d); });
    });
  }

  template <class Q, int Tokens, class Has>
  KVF_INLINE KVF_HD void encode_block(const Centered<Q, Tokens>& quant, const Has& has) const {
    each_thread(ctx_, dims / 2, [&](int p) {
      quant.write_means(pair(p), 0, [&](int t, int d) { return value(t, 2 * p + d); });
    });
    ctx_.sync();
    encode_tokens(quant.inner, has, [&](int row, int dim) {
      return value(row, dim) - static_cast<float>(ctx_.template load_shared<fp16>(channels.at(dim)));
    });
  }

  template <int Tokens, class Has>
  KVF_INLINE KVF_HD void encode_block(const Compact4Channels<Tokens>&, const Has&) const {
    using Q = Compact4Channels<Tokens>;
    constexpr int turns = (dims / 2 + write_threads - 1) / write_threads;
    kvfolia::detail::Range ranges[turns][2];
    typename Q::Block block;
    float low = 0.0f, reach = 0.0f;
    KVF_UNROLLED (turn, turns) {
      const int p = turn * write_threads + ctx_.thread();
      if (p >= dims / 2) continue;
      KVF_NO_UNROLL
      for (int t = 0; t < Tokens; ++t)
        KVF_UNROLLED (i, 2) ranges[turn][i].add(value(t, 2 * p + i));
      KVF_UNROLLED (i, 2) {
        const auto& range = ranges[turn][i];
        const float magnitude = kvfolia::detail::magnitude(range.smallest());
        if (range.is_finite() && magnitude > low) low = magnitude;
      }
    }
    block.min = Q::Block::min_reference(block_max(ctx_, low, Shape::scratch));
    KVF_UNROLLED (turn, turns) {
      if (turn * write_threads + ctx_.thread() >= dims / 2) continue;
      KVF_UNROLLED (i, 2) {
        const float needed = block.needed(ranges[turn][i]);
        if (needed > reach) reach = needed;
      }
    }
    block.scale = Q::Block::scale_reference(block_max(ctx_, reach, Shape::scratch + 4 * write_warps));
    if (ctx_.thread() == 0) {
      ctx_.store_shared(Shape::references, block.scale);
      ctx_.store_shared(Shape::references + 2, block.min);
    }
    KVF_UNROLLED (turn, turns) {
      const int p = turn * write_threads + ctx_.thread();
      if (p >= dims / 2) continue;
      float min[2], inverse[2];
      KVF_UNROLLED (i, 2) {
        const typename Q::Param fitted = block.round(ranges[turn][i]);
        ctx_.store_shared(channels.at(2 * p + i), fitted);
        min[i] = block.min_of(fitted);
        inverse[i] = block.inverse_of(fitted);
      }
      for (int t = 0; t < Tokens; ++t)
        kvfolia::detail::write_nibbles(pair(p), t, 0, 2, [&](int i) {
          return kvfolia::detail::asymmetric_code(value(t, 2 * p + i), min[i], inverse[i]);
        });
    }
  }

  Ctx& ctx_;
};

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
