// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Attention of few queries over one split of a row's keys: the body of the decode kernel.
//
// Weights are kept as 2^14 times themselves, and times the token's scale of values, over the largest such
// product so far: whatever the scales are, none of fp16's range is missed.
// Source: online softmax, arXiv:1805.02867; splits, as in Flash-Decoding, are merged by another kernel.

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/decode_args.hpp"
#include "kvfolia/cuda/decode_exact.hpp"
#include "kvfolia/cuda/decode_expand.hpp"
#include "kvfolia/cuda/decode_keys.hpp"
#include "kvfolia/cuda/decode_masks.hpp"
#include "kvfolia/cuda/decode_queries.hpp"
#include "kvfolia/cuda/decode_results.hpp"
#include "kvfolia/cuda/decode_shape.hpp"
#include "kvfolia/cuda/decode_tiles.hpp"
#include "kvfolia/cuda/decode_tokens.hpp"
#include "kvfolia/cuda/decode_values.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

template <class Ctx, class Layout, class Quant, class Shape, bool General>
class DecodeBlock {
 public:
  static constexpr int tiles = Shape::tiles;
  using Args = DecodeArgs<Layout, Quant>;
  using Loader = TileLoader<Ctx, Layout, Quant, Shape>;
  using Queries = StagedQueries<Ctx, Layout, Quant, Shape>;
  using Exact = ExactTokens<Ctx, Layout, Quant, Shape>;

  KVF_INLINE KVF_HD DecodeBlock(Ctx& ctx, const Args& args, const DecodeRow& row, int kv_head,
                                int first_column)
      : ctx_(ctx),
        args_(args),
        row_(row),
        columns_{args, row, kv_head, first_column},
        line_(ctx.lane() / 4),
        quad_(ctx.lane() % 4),
        keys_(ctx, args),
        values_(ctx, args) {}

  /// Writes the split's results of all its columns.
  KVF_INLINE KVF_HD void run(int split) {
    const int begin = split * args_.split_tokens;
    const int end = row_.length < begin + args_.split_tokens ? row_.length : begin + args_.split_tokens;
    const SharedOffset ring = static_cast<SharedOffset>(ctx_.warp()) * Shape::ring_bytes;
    constexpr int stride = Shape::tokens * Shape::warps;
    const int first = begin + ctx_.warp() * Shape::tokens;
    Loader loader(ctx_, args_, row_, columns_.kv_head, first, stride, end);
    // The first tiles are on their way while queries are made ready. One place in the code loads.
    constexpr int ahead = Shape::stages - 1;
    constexpr SharedOffset last = ahead * Shape::stage_bytes;
    const auto next = [&](SharedOffset stage) {
      return stage == ring + last ? ring : stage + Shape::stage_bytes;
    };
    SharedOffset stage = ring, free = ring;
    KVF_NO_UNROLL
    for (int at = first - ahead * stride; at < end || at < first; at += stride) {
      loader.keep_params();
      if (at >= first) {
        ctx_.template cp_async_wait<ahead - 1>();
        ctx_.sync_warp();
      }
      loader.load(free);
      free = next(free);
      if (at >= first) {
        compute(stage);
        stage = next(stage);
      } else if (at == first - stride) {
        Queries queries(ctx_, columns_);
        queries.stage();
        ctx_.sync();
        read(queries);
      }
    }
    ctx_.template cp_async_wait<0>();
    write(split);
  }

 private:
  /// The operands of this lane, and what it knows of the columns whose scores it gets.
  KVF_INLINE KVF_HD void read(Queries& queries) {
    keys_.read(queries);
    KVF_UNROLLED (tile, tiles) {
      KVF_UNROLLED (i, 2) {
        const int column = 8 * tile + 2 * quad_ + i;
        rules_[tile][i] = column_rules<General>(ctx_, columns_, column, queries.scale(column));
        maxima_[tile][i] = minus_infinity();
        weights_[tile][i] = 0.0f;
      }
    }
  }

  KVF_INLINE KVF_HD void compute(SharedOffset stage) {
    const auto masks = ctx_.template load_shared<TileMasks>(stage + Shape::masks);
    if (!ctx_.any(masks.present != 0)) return;
    TokenFacts tokens[Shape::parts][2];
    KVF_UNROLLED (part, Shape::parts) {
      KVF_UNROLLED (half, 2)
        tokens[part][half] = read_token<Shape>(ctx_, args_.view.quant, stage, 16 * part + 8 * half + line_);
    }
    const SharedOffset ring = static_cast<SharedOffset>(ctx_.warp()) * Shape::ring_bytes;
    SharedOffset keys = stage + Shape::keys, values = stage + Shape::values;
    if constexpr (Shape::expands_keys) {
      StagedRows<Ctx, typename Shape::KeyRows>(ctx_, key_side(quant()), keys, stage + Shape::key_params)
          .expand(Shape::tokens, ring + Shape::fp16_keys, Shape::KeyShape::pitch);
      keys = ring + Shape::fp16_keys;
    }
    if constexpr (Shape::expands_values) {
      StagedRows<Ctx, typename Shape::ValueRows>(ctx_, value_side(quant()), values,
                                                 stage + Shape::value_params)
          .expand(Shape::tokens, ring + Shape::fp16_values, Shape::ValueShape::pitch);
      values = ring + Shape::fp16_values;
    }
    float scores[tiles][Shape::parts][4];
    keys_.multiply(stage, keys, scores);
    const bool has_exact = Shape::reads_exact && ctx_.any(masks.exact != 0);
    if (has_exact) multiply_exact_keys(stage, tokens, scores);
    float largest[tiles][2];
    finish_scores(tokens, scores, largest);
    rescale(largest);
    KVF_UNROLLED (tile, tiles) {
      KVF_UNROLLED (part, Shape::parts) {
        KVF_UNROLLED (i, 4) {
          float& weight = scores[tile][part][i];
          weight = Ctx::exp2(weight - bases_[tile][i % 2]);
          weights_[tile][i % 2] +=
              has_value_scale ? weight * tokens[part][i / 2].inverse_value_scale : weight;
        }
      }
    }
    if (has_exact) add_exact_values(stage, scores);
    values_.add(stage, values, tokens, scores);
  }

  using Tokens = TokenFacts[Shape::parts][2];
  using Scores = float[tiles][Shape::parts][4];

  KVF_INLINE KVF_HD void multiply_exact_keys(SharedOffset stage, Tokens& tokens, Scores& scores) {
    if constexpr (Shape::reads_exact) {
      Queries queries(ctx_, columns_);
      KVF_UNROLLED (part, Shape::parts) {
        Exact exact(ctx_, args_.view, columns_.kv_head, stage, part);
        keys_.multiply_exact(exact, queries, part, scores);
        KVF_UNROLLED (half, 2)
          if (exact.has(half)) tokens[part][half] = {tokens[part][half].position};
      }
    }
  }
  /// Their weights are 0 from then on: what is in place of their codes is not theirs.
  KVF_INLINE KVF_HD void add_exact_values(SharedOffset stage, Scores& weights) {
    if constexpr (Shape::reads_exact) {
      KVF_UNROLLED (part, Shape::parts) {
        Exact exact(ctx_, args_.view, columns_.kv_head, stage, part);
        values_.add_exact(exact, part, weights);
        KVF_UNROLLED (tile, tiles) {
          KVF_UNROLLED (i, 4)
            if (exact.has(i / 2)) weights[tile][part][i] = 0.0f;
        }
      }
    }
  }

  /// Products become scores, -infinity where they are not seen; and how large a column's are. Logarithms of
  /// values' scales join them: weights' products with those are at most 1, too.
  KVF_INLINE KVF_HD void finish_scores(const Tokens& tokens, Scores& scores, float (&largest)[tiles][2]) {
    KVF_UNROLLED (tile, tiles) {
      KVF_UNROLLED (i, 2) {
        largest[tile][i] = maxima_[tile][i];
        KVF_UNROLLED (part, Shape::parts) {
          KVF_UNROLLED (half, 2) {
            float& score = scores[tile][part][2 * half + i];
            score = finish_score<General>(ctx_, columns_, rules_[tile][i], 8 * tile + 2 * quad_ + i, score,
                                          tokens[part][half]);
            largest[tile][i] = Ctx::max(largest[tile][i], score);
          }
        }
      }
    }
  }

  /// Raises maxima, where they rose, and brings down what is weighted by the old ones.
  KVF_INLINE KVF_HD void rescale(float (&largest)[tiles][2]) {
    bool rose = false;
    KVF_UNROLLED (tile, tiles) {
      KVF_UNROLLED (i, 2) {
        KVF_UNROLL
        for (int mask = 4; mask <= 16; mask *= 2)
          largest[tile][i] = Ctx::max(largest[tile][i], ctx_.shfl_xor(largest[tile][i], mask));
        rose = rose || largest[tile][i] != maxima_[tile][i];
      }
    }
    if (!ctx_.any(rose)) return;
    KVF_UNROLLED (tile, tiles) {
      KVF_UNROLLED (i, 2) {
        const float now = largest[tile][i];
        const float factor = now == minus_infinity() ? 1.0f : Ctx::exp2(maxima_[tile][i] - now);
        maxima_[tile][i] = now;
        bases_[tile][i] = now == minus_infinity() ? 0.0f : now - weight_exponent;
        weights_[tile][i] *= factor;
        values_.scale(tile, i, factor);
      }
    }
  }

  /// Puts the warps' results together, from the first to the last, and writes them.
  KVF_INLINE KVF_HD void write(int split) {
    ctx_.sync();
    KVF_UNROLLED (tile, tiles) {
      KVF_UNROLLED (i, 2) {
        const float weight = sum_of_lines(ctx_, weights_[tile][i]);
        const int row = ctx_.warp() * Shape::columns + 8 * tile + 2 * quad_ + i;
        values_.store(tile, i, static_cast<SharedOffset>(row * Shape::sum_pitch));
        if (line_ == 0) {
          ctx_.store_shared(Shape::maxima + static_cast<SharedOffset>(row * 4), maxima_[tile][i]);
          ctx_.store_shared(Shape::weights + static_cast<SharedOffset>(row * 4), weight);
        }
      }
    }
    ctx_.sync();
    write_results<Shape>(ctx_, columns_, split);
  }

  KVF_INLINE KVF_HD decltype(auto) quant() const { return format_quant<Shape::format>(args_.view.quant); }

  static constexpr bool has_value_scale = Shape::ValueShape::token_scale;

  Ctx& ctx_;
  const Args& args_;
  const DecodeRow& row_;
  const Columns<Layout, Quant> columns_;
  const int line_;  ///< of eight: the rows of products that this lane has
  const int quad_;  ///< of four: their columns
  KeyProducts<Ctx, Layout, Quant, Shape> keys_;
  ValueSums<Ctx, Layout, Quant, Shape> values_;
  // Of the two columns of each tile whose scores this lane has: what becomes of products, and the softmax.
  ColumnRules rules_[tiles][2];
  float maxima_[tiles][2];
  float bases_[tiles][2] = {};
  float weights_[tiles][2];  ///< of this lane's tokens alone
};

/// A block's work: x is the split, y the KV head and block of columns, z the row. Without `General` there is
/// no window, custom mask, soft-cap or slope. `Capability` is one of those that are tuned.
template <class Layout, class Quant, int Tiles, bool General, int Format, int Capability, class Ctx>
KVF_INLINE KVF_HD void decode(Ctx& ctx, const DecodeArgs<Layout, Quant>& args) {
  using Shape = DecodeShape<Layout, Quant, Tiles, Format, Capability>;
  const int blocks = Tiles == 1 ? args.blocks_of_8 : args.blocks_of_16;
  const int kv_head = ctx.block_y() / blocks, first_column = ctx.block_y() % blocks * Shape::columns;
  const DecodeRow row = read_row(ctx, args.batch, ctx.block_z(), kv_head, args.view.page_tokens);
  const int columns = row.queries * (args.query_heads / args.view.kv_heads);
  const bool is_long = args.blocks_of_16 > 0 && columns > 8;
  if (is_long != (Tiles == 2) || first_column >= columns || ctx.block_x() * args.split_tokens >= row.length)
    return;
  DecodeBlock<Ctx, Layout, Quant, Shape, General>(ctx, args, row, kv_head, first_column).run(ctx.block_x());
}

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
