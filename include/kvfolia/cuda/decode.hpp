// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Attention of few queries over one split of a row's keys: the body of the decode kernel.
//
// Keys are the rows of mma and columns are its columns, so scores of eight heads cost no more than those of
// one; the weights become the columns of the second mma by movmatrix. Weights are kept as 2^14 times
// themselves, and times the token's scale of values, over the largest such product so far: whatever the
// scales are, none of fp16's range is missed.
// Source: online softmax, arXiv:1805.02867; splits, as in Flash-Decoding, are merged by another kernel.

#include <cstdint>

#include "kvfolia/core/attend_args.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/decode_args.hpp"
#include "kvfolia/cuda/decode_exact.hpp"
#include "kvfolia/cuda/decode_masks.hpp"
#include "kvfolia/cuda/decode_queries.hpp"
#include "kvfolia/cuda/decode_results.hpp"
#include "kvfolia/cuda/decode_shape.hpp"
#include "kvfolia/cuda/decode_tiles.hpp"
#include "kvfolia/cuda/decode_tokens.hpp"
#include "kvfolia/cuda/unpack.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

template <class Ctx, class Layout, class Quant, int Tiles, bool General>
class DecodeBlock {
 public:
  using Args = DecodeArgs<Layout, Quant>;
  using Shape = DecodeShape<Layout, Quant, Tiles>;
  using KeyShape = typename Shape::KeyShape;
  using ValueShape = typename Shape::ValueShape;
  using Loader = TileLoader<Ctx, Layout, Quant, Shape>;
  using Queries = StagedQueries<Ctx, Layout, Quant, Shape>;

  KVF_INLINE KVF_HD DecodeBlock(Ctx& ctx, const Args& args, const DecodeRow& row, int kv_head,
                                int first_column)
      : ctx_(ctx),
        args_(args),
        row_(row),
        columns_{args, row, kv_head, first_column},
        line_(ctx.lane() / 4),
        quad_(ctx.lane() % 4) {}

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
  static constexpr bool key_bf16 = KeyShape::kind == CodeKind::bf16;
  static constexpr bool value_bf16 = ValueShape::kind == CodeKind::bf16;

  /// The operands of this lane, and what it knows of the columns whose scores it gets.
  KVF_INLINE KVF_HD void read(Queries& queries) {
    KVF_UNROLLED (tile, Tiles) {
      KVF_UNROLLED (step, KeyShape::steps) {
        KVF_UNROLLED (half, 2) {
          queries_[tile][step][half] = queries.pair(8 * tile + line_, step, quad_, half);
          if constexpr (key_bf16)
            rests_[tile][step][half] = queries.pair(8 * tile + line_, step, quad_, half, true);
        }
      }
      KVF_UNROLLED (i, 2) {
        const int column = 8 * tile + 2 * quad_ + i;
        rules_[tile][i] = column_rules<General>(ctx_, columns_, column, queries.scale(column));
        if constexpr (Shape::key_offset) {
          KVF_UNROLLED (group, KeyShape::groups) sums_[tile][group][i] = queries.sum(column, group);
        }
        maxima_[tile][i] = minus_infinity();
        weights_[tile][i] = 0.0f;
        KVF_UNROLLED (group, ValueShape::groups) offsets_[tile][group][i] = 0.0f;
      }
      KVF_UNROLLED (t, Shape::value_tiles) {
        KVF_UNROLLED (i, 4) out_[tile][t][i] = 0.0f;
      }
    }
  }

  // ---- one tile ----

  KVF_INLINE KVF_HD void compute(SharedOffset stage) {
    float scores[Tiles][Shape::parts][4];
    KVF_UNROLLED (tile, Tiles)
      KVF_UNROLLED (part, Shape::parts)
        KVF_UNROLLED (i, 4) scores[tile][part][i] = 0.0f;
    KVF_UNROLLED (part, Shape::parts) multiply_keys(stage, part, scores);

    TokenFacts tokens[Shape::parts][2];
    bool has_exact[Shape::parts] = {};
    float largest[Tiles][2];
    KVF_UNROLLED (tile, Tiles)
      KVF_UNROLLED (i, 2) largest[tile][i] = maxima_[tile][i];
    KVF_UNROLLED (part, Shape::parts) {
      KVF_UNROLLED (half, 2)
        tokens[part][half] = read_token<Shape>(ctx_, args_.view.quant, stage, 16 * part + 8 * half + line_);
      if constexpr (Shape::several_formats) {
        has_exact[part] = ctx_.any(tokens[part][0].exact || tokens[part][1].exact);
        if (has_exact[part]) multiply_exact_keys(stage, part, tokens[part], scores);
      }
      KVF_UNROLLED (half, 2) {
        const TokenFacts& token = tokens[part][half];
        finish_scores(token, part, half, scores);
        KVF_UNROLLED (tile, Tiles)
          KVF_UNROLLED (i, 2) {
            float& score = scores[tile][part][2 * half + i];
            // Logarithms of values' scales join the exponents: products with them are at most 1, too.
            if constexpr (Shape::value_scale) score += token.log_value_scale;
            largest[tile][i] = Ctx::max(largest[tile][i], score);
          }
      }
    }
    rescale(largest);

    KVF_UNROLLED (part, Shape::parts) {
      float weights[Tiles][4];
      KVF_UNROLLED (tile, Tiles)
        KVF_UNROLLED (i, 4) {
          weights[tile][i] = Ctx::exp2(scores[tile][part][i] - bases_[tile][i % 2]);
          weights_[tile][i % 2] += Shape::value_scale
                                       ? weights[tile][i] * tokens[part][i / 2].inverse_value_scale
                                       : weights[tile][i];
        }
      multiply_values(stage, part, tokens[part], weights);
      if constexpr (Shape::several_formats)
        if (has_exact[part]) multiply_exact_values(stage, part, tokens[part], weights);
    }
  }

  /// scores += products of sixteen keys' codes with all columns.
  KVF_INLINE KVF_HD void multiply_keys(SharedOffset stage, int part,
                                       float (&scores)[Tiles][Shape::parts][4]) {
    constexpr CodeKind kind = KeyShape::kind;
    const SharedOffset lane_row =
        stage + Shape::keys + static_cast<SharedOffset>((16 * part + ctx_.lane() % 16) * KeyShape::pitch) +
        static_cast<SharedOffset>(ctx_.lane() / 16 * 16);
    float sums[Tiles][4];  // of a group
    KVF_UNROLL
    for (int chunk = 0; chunk < KeyShape::chunks; chunk += 2) {
      std::uint32_t words[4];  // rows 0 to 7 and 8 to 15 of a chunk, then of the next one
      ctx_.ldmatrix_x4(words, lane_row + static_cast<SharedOffset>(chunk * 16));
      if constexpr (kind_bits(kind) == 16) {
        KVF_UNROLLED (tile, Tiles) multiply(scores[tile][part], chunk / 2, words, tile);
      } else {
        KVF_UNROLLED (c, 2) {
          constexpr int pairs = pairs_per_register(kind);
          const int group = (chunk + c) / KeyShape::group_chunks;
          if (group >= KeyShape::groups) continue;
          if ((chunk + c) % KeyShape::group_chunks == 0) {
            KVF_UNROLLED (tile, Tiles)
              KVF_UNROLLED (i, 4) sums[tile][i] = 0.0f;
          }
          std::uint32_t upper[pairs], lower[pairs];
          unpack<Ctx, kind, false>(words[2 * c], upper);
          unpack<Ctx, kind, false>(words[2 * c + 1], lower);
          KVF_UNROLLED (i, pairs / 2) {
            const int step = (chunk + c) * (pairs / 2) + i;
            if (step >= KeyShape::steps) continue;
            const std::uint32_t a[4] = {upper[2 * i], lower[2 * i], upper[2 * i + 1], lower[2 * i + 1]};
            KVF_UNROLLED (tile, Tiles) multiply(sums[tile], step, a, tile);
          }
          if ((chunk + c + 1) % KeyShape::group_chunks == 0 || chunk + c + 1 == KeyShape::chunks)
            add_group(stage, part, group, sums, scores);
        }
      }
    }
  }
  /// sums += a step's products, of one tile of columns.
  KVF_INLINE KVF_HD void multiply(float (&sums)[4], int step, const std::uint32_t (&a)[4], int tile) {
    if constexpr (key_bf16) {
      ctx_.mma_bf16(sums, a, queries_[tile][step]);
      if (args_.args.queries.type != DType::bf16) ctx_.mma_bf16(sums, a, rests_[tile][step]);
    } else {
      ctx_.mma_fp16(sums, a, queries_[tile][step]);
    }
  }
  /// scores += a group's sums of products with codes, as products with keys.
  KVF_INLINE KVF_HD void add_group(SharedOffset stage, int part, int group, const float (&sums)[Tiles][4],
                                   float (&scores)[Tiles][Shape::parts][4]) {
    KVF_UNROLLED (half, 2) {
      const GroupParams p =
          read_group<KeyShape>(ctx_, key_side(format_quant<coded_format>(args_.view.quant)),
                               stage + Shape::key_params, 16 * part + 8 * half + line_, group);
      KVF_UNROLLED (tile, Tiles)
        KVF_UNROLLED (i, 2) {
          float& score = scores[tile][part][2 * half + i];
          score += p.scale * sums[tile][2 * half + i];
          if constexpr (Shape::key_offset) score += p.offset * sums_[tile][group][i];
        }
    }
  }

  /// Products of exact tokens, in place of what their absent codes gave.
  KVF_INLINE KVF_HD void multiply_exact_keys(SharedOffset stage, int part, const TokenFacts (&tokens)[2],
                                             float (&scores)[Tiles][Shape::parts][4]) {
    KVF_UNROLLED (tile, Tiles) {
      KVF_UNROLLED (i, 4) scores[tile][part][i] = tokens[i / 2].exact ? 0.0f : scores[tile][part][i];
    }
    ExactTokens<Ctx, Layout, Quant, Shape> exact(ctx_, args_.view, columns_.kv_head, stage, part);
    Queries queries(ctx_, columns_);
    KVF_NO_UNROLL
    for (int step = 0; step < KeyShape::steps; ++step) {
      std::uint32_t a[4];
      exact.key_operand(step, a);
      KVF_UNROLLED (tile, Tiles) {
        const std::uint32_t b[2] = {queries.pair(8 * tile + line_, step, quad_, 0),
                                    queries.pair(8 * tile + line_, step, quad_, 1)};
        ctx_.mma_fp16(scores[tile][part], a, b);
      }
    }
  }
  /// The same for values. Sums go round: a loop can have its next one in the same registers.
  KVF_INLINE KVF_HD void multiply_exact_values(SharedOffset stage, int part, const TokenFacts (&tokens)[2],
                                               const float (&weights)[Tiles][4]) {
    std::uint32_t operands[Tiles][2];
    KVF_UNROLLED (tile, Tiles)
      KVF_UNROLLED (half, 2)
        operands[tile][half] = operand(weights[tile], half, tokens[half].exact ? 1.0f : 0.0f);
    ExactTokens<Ctx, Layout, Quant, Shape> exact(ctx_, args_.view, columns_.kv_head, stage, part);
    KVF_NO_UNROLL
    for (int t = 0; t < Shape::value_tiles; ++t) {
      std::uint32_t a[4];
      exact.value_operand(t, a);
      accumulate(0, a, operands);
      KVF_UNROLLED (tile, Tiles) {
        KVF_UNROLLED (i, 4) {
          const float first = out_[tile][0][i];
          KVF_UNROLLED (next, Shape::value_tiles - 1) out_[tile][next][i] = out_[tile][next + 1][i];
          out_[tile][Shape::value_tiles - 1][i] = first;
        }
      }
    }
  }

  /// A token's products with queries become scores, to base 2; -infinity where they are not seen.
  KVF_INLINE KVF_HD void finish_scores(const TokenFacts& token, int part, int half,
                                       float (&scores)[Tiles][Shape::parts][4]) {
    KVF_UNROLLED (tile, Tiles)
      KVF_UNROLLED (i, 2) {
        float& score = scores[tile][part][2 * half + i];
        score = finish_score<General>(ctx_, columns_, rules_[tile][i], 8 * tile + 2 * quad_ + i, score,
                                      token.position);
      }
  }

  /// Raises maxima, where they rose, and brings down what is weighted by the old ones.
  KVF_INLINE KVF_HD void rescale(float (&largest)[Tiles][2]) {
    bool rose = false;
    KVF_UNROLLED (tile, Tiles)
      KVF_UNROLLED (i, 2) {
        KVF_UNROLL
        for (int mask = 4; mask <= 16; mask *= 2)
          largest[tile][i] = Ctx::max(largest[tile][i], ctx_.shfl_xor(largest[tile][i], mask));
        rose = rose || largest[tile][i] != maxima_[tile][i];
      }
    if (!ctx_.any(rose)) return;
    KVF_UNROLLED (tile, Tiles)
      KVF_UNROLLED (i, 2) {
        const float now = largest[tile][i];
        const float factor = now == minus_infinity() ? 1.0f : Ctx::exp2(maxima_[tile][i] - now);
        maxima_[tile][i] = now;
        bases_[tile][i] = now == minus_infinity() ? 0.0f : now - weight_exponent;
        weights_[tile][i] *= factor;
        KVF_UNROLLED (group, ValueShape::groups) offsets_[tile][group][i] *= factor;
        KVF_UNROLLED (t, Shape::value_tiles) {
          out_[tile][t][i] *= factor;
          out_[tile][t][2 + i] *= factor;
        }
      }
  }

  /// out += sixteen tokens' values times weights.
  KVF_INLINE KVF_HD void multiply_values(SharedOffset stage, int part, const TokenFacts (&tokens)[2],
                                         const float (&weights)[Tiles][4]) {
    constexpr CodeKind kind = ValueShape::kind;
    constexpr bool wide = kind_bits(kind) == 16;
    // Of wide codes two chunks of eight tokens, then of the next eight; of others two times eight tokens of a
    // chunk, then of the next one.
    std::uint32_t operands[Tiles][2];
    const int lane = ctx_.lane(), row = wide ? lane % 8 + lane / 16 * 8 : lane % 16;
    const int chunk_of_lane = wide ? lane / 8 % 2 : lane / 16;
    const SharedOffset lane_row = stage + Shape::values +
                                  static_cast<SharedOffset>((16 * part + row) * ValueShape::pitch) +
                                  static_cast<SharedOffset>(chunk_of_lane * 16);
    KVF_UNROLL
    for (int chunk = 0; chunk < ValueShape::chunks; chunk += 2) {
      std::uint32_t words[4];
      if (chunk == 0) weigh_group(stage, part, 0, tokens, weights, operands);
      ctx_.ldmatrix_x4_trans(words, lane_row + static_cast<SharedOffset>(chunk * 16));
      if constexpr (wide) {
        accumulate(chunk / 2, words, operands);
      } else {
        KVF_UNROLLED (c, 2) {
          constexpr int pairs = pairs_per_register(kind);
          const int group = (chunk + c) / ValueShape::group_chunks;
          if (group >= ValueShape::groups) continue;
          if (chunk + c > 0 && (chunk + c) % ValueShape::group_chunks == 0)
            weigh_group(stage, part, group, tokens, weights, operands);
          std::uint32_t first[pairs], second[pairs];  // eight tokens, the next eight
          unpack<Ctx, kind, true>(words[2 * c], first);
          unpack<Ctx, kind, true>(words[2 * c + 1], second);
          KVF_UNROLLED (i, pairs / 2) {
            const std::uint32_t a[4] = {first[2 * i], first[2 * i + 1], second[2 * i], second[2 * i + 1]};
            accumulate((chunk + c) * (pairs / 2) + i, a, operands);
          }
        }
      }
    }
  }
  /// Weights times scales of a group of values, as operands; the group's offsets are added up beside.
  KVF_INLINE KVF_HD void weigh_group(SharedOffset stage, int part, int group, const TokenFacts (&tokens)[2],
                                     const float (&weights)[Tiles][4], std::uint32_t (&operands)[Tiles][2]) {
    KVF_UNROLLED (half, 2) {
      const TokenFacts& token = tokens[half];
      GroupParams p;
      if constexpr (Shape::value_scale || Shape::value_offset)
        p = read_group<ValueShape>(ctx_, value_side(format_quant<coded_format>(args_.view.quant)),
                                   stage + Shape::value_params, 16 * part + 8 * half + line_, group);
      // Weights have the largest group's scale already.
      const float ratio = ValueShape::groups == 1 ? 1.0f : p.scale * token.inverse_value_scale;
      KVF_UNROLLED (tile, Tiles) {
        operands[tile][half] = operand(weights[tile], half, token.exact ? 0.0f : ratio);
        if constexpr (Shape::value_offset)
          KVF_UNROLLED (i, 2)
            offsets_[tile][group][i] += weights[tile][2 * half + i] * token.inverse_value_scale * p.offset;
      }
    }
  }
  /// Eight tokens' weights times something, as the columns of the second product.
  KVF_INLINE KVF_HD std::uint32_t operand(const float (&weights)[4], int half, float factor) {
    return ctx_.movmatrix(pack<Ctx, value_bf16>(weights[2 * half] * factor, weights[2 * half + 1] * factor));
  }
  KVF_INLINE KVF_HD void accumulate(int t, const std::uint32_t (&a)[4],
                                    const std::uint32_t (&operands)[Tiles][2]) {
    KVF_UNROLLED (tile, Tiles) {
      if constexpr (value_bf16)
        ctx_.mma_bf16(out_[tile][t], a, operands[tile]);
      else
        ctx_.mma_fp16(out_[tile][t], a, operands[tile]);
    }
  }

  // ---- the end ----

  /// Puts the warps' results together, from the first to the last, and writes them.
  KVF_INLINE KVF_HD void write(int split) {
    ctx_.sync();
    KVF_UNROLLED (tile, Tiles)
      KVF_UNROLLED (i, 2) {
        const float weight = sum_of_lines(weights_[tile][i]);
        if constexpr (Shape::value_offset) {
          KVF_UNROLLED (group, ValueShape::groups)
            offsets_[tile][group][i] = sum_of_lines(offsets_[tile][group][i]);
        }
        const int row = ctx_.warp() * Shape::columns + 8 * tile + 2 * quad_ + i;
        KVF_UNROLLED (t, Shape::value_tiles)
          KVF_UNROLLED (half, 2) {
            // A tile's dims are all of one group; those of the last ones may be none.
            const int group = value_dim_of(ValueShape::kind, t, 0, 0) / ValueShape::group_dims;
            const float offset =
                Shape::value_offset && group < ValueShape::groups ? offsets_[tile][group][i] : 0.0f;
            const int dim = value_dim_of(ValueShape::kind, t, line_, half);
            if (dim < Layout::value_dim)
              ctx_.store_shared(static_cast<SharedOffset>(row * Shape::sum_pitch + dim * 4),
                                out_[tile][t][2 * half + i] + offset);
          }
        if (line_ == 0) {
          ctx_.store_shared(Shape::maxima + static_cast<SharedOffset>(row * 4), maxima_[tile][i]);
          ctx_.store_shared(Shape::weights + static_cast<SharedOffset>(row * 4), weight);
        }
      }
    ctx_.sync();
    write_results<Shape>(ctx_, columns_, split);
  }
  /// Over the lanes that have other tokens of the same columns.
  KVF_INLINE KVF_HD float sum_of_lines(float x) {
    KVF_UNROLL
    for (int mask = 4; mask <= 16; mask *= 2) x += ctx_.shfl_xor(x, mask);
    return x;
  }

  Ctx& ctx_;
  const Args& args_;
  const DecodeRow& row_;
  const Columns<Layout, Quant> columns_;
  const int line_;  ///< of eight: the row of an operand that this lane has
  const int quad_;  ///< of four: its elements there

  std::uint32_t queries_[Tiles][KeyShape::steps][2];
  std::uint32_t rests_[Tiles][key_bf16 ? KeyShape::steps : 1][2];  ///< what bf16 cuts off them
  // Of the two columns of each tile whose scores this lane has: what becomes of products, and the softmax.
  ColumnRules rules_[Tiles][2];
  float sums_[Tiles][KeyShape::groups][2];
  float maxima_[Tiles][2];
  float bases_[Tiles][2] = {};
  float weights_[Tiles][2];  ///< of this lane's tokens alone, as offsets_
  float offsets_[Tiles][ValueShape::groups][2];
  float out_[Tiles][Shape::value_tiles][4];
};

/// A block's work: x is the split, y the KV head and block of columns, z the row. Without `General` there is
/// no window, custom mask, soft-cap or slope.
template <class Layout, class Quant, int Tiles, bool General, class Ctx>
KVF_INLINE KVF_HD void decode(Ctx& ctx, const DecodeArgs<Layout, Quant>& args) {
  using Shape = DecodeShape<Layout, Quant, Tiles>;
  const int kv_head = ctx.block_y() / args.column_blocks;
  const int first_column = ctx.block_y() % args.column_blocks * Shape::columns;
  const DecodeRow row = read_row(ctx, args.batch, ctx.block_z(), kv_head, args.view.page_tokens);
  if (ctx.block_x() * args.split_tokens >= row.length ||
      first_column >= row.queries * (args.query_heads / args.view.kv_heads))
    return;
  DecodeBlock<Ctx, Layout, Quant, Tiles, General>(ctx, args, row, kv_head, first_column).run(ctx.block_x());
}

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
