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

  KVF_INLINE KVF_HD DecodeBlock(Ctx& ctx, const Args& args, const DecodeRow& row, int kv_head,
                                int first_column)
      : ctx_(ctx),
        args_(args),
        row_(row),
        columns_{args, row, kv_head, first_column},
        line_(ctx.lane() / 4),
        quad_(ctx.lane() % 4),
        inverse_cap_(args.args.soft_cap > 0.0f ? Ctx::reciprocal(args.args.soft_cap) : 0.0f) {}

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
        StagedQueries<Ctx, Layout, Quant, Shape> queries(ctx_, columns_);
        queries.stage();
        ctx_.sync();
        read(queries);
      }
    }
    ctx_.template cp_async_wait<0>();
    write(split);
  }

 private:
  using Queries = StagedQueries<Ctx, Layout, Quant, Shape>;
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
        scales_[tile][i] = queries.scale(column);
        if constexpr (!General) scales_[tile][i] *= log2_e;
        if constexpr (Shape::key_offset) sums_[tile][i] = queries.sum(column);
        const std::int32_t position = row_.position + columns_.query(column);
        // No token's position, -1, is the largest of all.
        seen_[tile][i] = !args_.args.causal ? 0x80000000u
                         : position < 0     ? 0u
                                            : static_cast<std::uint32_t>(position) + 1u;
        if constexpr (General) {
          positions_[tile][i] = position;
          const float* slopes = args_.args.alibi_slopes;
          slopes_[tile][i] =
              slopes && columns_.exists(column) ? ctx_.load(slopes + columns_.head(column)) : 0.0f;
        }
        maxima_[tile][i] = minus_infinity();
        weights_[tile][i] = offsets_[tile][i] = 0.0f;
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
      // Weights, as the columns of the second product.
      std::uint32_t operands[Tiles][2], exact_operands[Tiles][2];
      KVF_UNROLLED (half, 2) {
        const TokenFacts& token = tokens[part][half];
        KVF_UNROLLED (tile, Tiles) {
          float weights[2];
          KVF_UNROLLED (i, 2) {
            weights[i] = Ctx::exp2(scores[tile][part][2 * half + i] - bases_[tile][i]);
            float weight = weights[i];
            if constexpr (Shape::value_scale) weight *= token.inverse_value_scale;
            weights_[tile][i] += weight;
            if constexpr (Shape::value_offset) offsets_[tile][i] += weight * token.value_offset;
          }
          const std::uint32_t word = pack<Ctx, value_bf16>(weights[0], weights[1]);
          operands[tile][half] = ctx_.movmatrix(token.exact ? 0 : word);
          if (has_exact[part]) exact_operands[tile][half] = ctx_.movmatrix(token.exact ? word : 0);
        }
      }
      multiply_values(stage, part, operands);
      if constexpr (Shape::several_formats)
        if (has_exact[part]) multiply_exact_values(stage, part, exact_operands);
    }
  }

  /// scores += products of sixteen keys' codes with all columns.
  KVF_INLINE KVF_HD void multiply_keys(SharedOffset stage, int part,
                                       float (&scores)[Tiles][Shape::parts][4]) {
    constexpr CodeKind kind = KeyShape::kind;
    const SharedOffset lane_row =
        stage + Shape::keys + static_cast<SharedOffset>((16 * part + ctx_.lane() % 16) * KeyShape::pitch) +
        static_cast<SharedOffset>(ctx_.lane() / 16 * 16);
    KVF_UNROLL
    for (int chunk = 0; chunk < KeyShape::chunks; chunk += 2) {
      std::uint32_t words[4];  // rows 0 to 7 and 8 to 15 of a chunk, then of the next one
      ctx_.ldmatrix_x4(words, lane_row + static_cast<SharedOffset>(chunk * 16));
      if constexpr (kind_bits(kind) == 16) {
        multiply(chunk / 2, words, scores, part);
      } else {
        KVF_UNROLLED (c, 2) {
          constexpr int pairs = pairs_per_register(kind);
          std::uint32_t upper[pairs], lower[pairs];
          unpack<Ctx, kind, false>(words[2 * c], upper);
          unpack<Ctx, kind, false>(words[2 * c + 1], lower);
          KVF_UNROLLED (i, pairs / 2) {
            const int step = (chunk + c) * (pairs / 2) + i;
            if (step >= KeyShape::steps) continue;
            const std::uint32_t a[4] = {upper[2 * i], lower[2 * i], upper[2 * i + 1], lower[2 * i + 1]};
            multiply(step, a, scores, part);
          }
        }
      }
    }
  }
  KVF_INLINE KVF_HD void multiply(int step, const std::uint32_t (&a)[4],
                                  float (&scores)[Tiles][Shape::parts][4], int part) {
    KVF_UNROLLED (tile, Tiles) {
      if constexpr (key_bf16) {
        ctx_.mma_bf16(scores[tile][part], a, queries_[tile][step]);
        if (args_.args.queries.type != DType::bf16) ctx_.mma_bf16(scores[tile][part], a, rests_[tile][step]);
      } else {
        ctx_.mma_fp16(scores[tile][part], a, queries_[tile][step]);
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
  KVF_INLINE KVF_HD void multiply_exact_values(SharedOffset stage, int part,
                                               const std::uint32_t (&operands)[Tiles][2]) {
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

  /// A token's sums of products become scores, to base 2; -infinity where they are not seen.
  KVF_INLINE KVF_HD void finish_scores(const TokenFacts& token, int part, int half,
                                       float (&scores)[Tiles][Shape::parts][4]) {
    KVF_UNROLLED (tile, Tiles)
      KVF_UNROLLED (i, 2) {
        float& score = scores[tile][part][2 * half + i];
        if constexpr (Shape::key_scale) score *= token.key_scale;
        if constexpr (Shape::key_offset) score += token.key_offset * sums_[tile][i];
        score *= scales_[tile][i];
        if constexpr (General) {
          if (args_.args.soft_cap > 0.0f) score = capped(score);
          score += slopes_[tile][i] * static_cast<float>(token.position - positions_[tile][i]);
          score *= log2_e;
          if (!sees(8 * tile + 2 * quad_ + i, positions_[tile][i], token.position)) score = minus_infinity();
        } else {
          if (static_cast<std::uint32_t>(token.position) >= seen_[tile][i]) score = minus_infinity();
        }
      }
  }

  /// soft_cap * tanh(score / soft_cap), as 1 - 2 / (1 + e^2x).
  KVF_INLINE KVF_HD float capped(float score) const {
    const float cap = args_.args.soft_cap;
    return cap - 2.0f * cap * Ctx::reciprocal(1.0f + Ctx::exp2(score * (2.0f * log2_e) * inverse_cap_));
  }
  KVF_INLINE KVF_HD bool sees(int column, std::int32_t query, std::int32_t key) {
    if (key < 0 || (args_.args.causal && key > query) || !args_.view.window.sees(query, key)) return false;
    const CustomMask& mask = args_.args.mask;
    if (!mask.bits || !columns_.exists(column)) return true;
    const std::int64_t keys = std::int64_t{row_.position} + row_.queries;
    if (key >= keys) return false;
    const std::int64_t bit = columns_.query(column) * keys + key;
    return (ctx_.load(mask.bits + ctx_.load(mask.row_offset + ctx_.block_z()) + bit / 8) >> bit % 8 & 1) != 0;
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
        offsets_[tile][i] *= factor;
        KVF_UNROLLED (t, Shape::value_tiles) {
          out_[tile][t][i] *= factor;
          out_[tile][t][2 + i] *= factor;
        }
      }
  }

  /// out += sixteen tokens' values times weights.
  KVF_INLINE KVF_HD void multiply_values(SharedOffset stage, int part,
                                         const std::uint32_t (&operands)[Tiles][2]) {
    constexpr CodeKind kind = ValueShape::kind;
    constexpr bool wide = kind_bits(kind) == 16;
    // Of wide codes two chunks of eight tokens, then of the next eight; of others two times eight tokens of a
    // chunk, then of the next one.
    const int lane = ctx_.lane(), row = wide ? lane % 8 + lane / 16 * 8 : lane % 16;
    const int chunk_of_lane = wide ? lane / 8 % 2 : lane / 16;
    const SharedOffset lane_row = stage + Shape::values +
                                  static_cast<SharedOffset>((16 * part + row) * ValueShape::pitch) +
                                  static_cast<SharedOffset>(chunk_of_lane * 16);
    KVF_UNROLL
    for (int chunk = 0; chunk < ValueShape::chunks; chunk += 2) {
      std::uint32_t words[4];
      ctx_.ldmatrix_x4_trans(words, lane_row + static_cast<SharedOffset>(chunk * 16));
      if constexpr (wide) {
        accumulate(chunk / 2, words, operands);
      } else {
        KVF_UNROLLED (c, 2) {
          constexpr int pairs = pairs_per_register(kind);
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
        float weight = weights_[tile][i], offset = offsets_[tile][i];
        KVF_UNROLL
        for (int mask = 4; mask <= 16; mask *= 2) {
          weight += ctx_.shfl_xor(weight, mask);
          if constexpr (Shape::value_offset) offset += ctx_.shfl_xor(offset, mask);
        }
        const int row = ctx_.warp() * Shape::columns + 8 * tile + 2 * quad_ + i;
        KVF_UNROLLED (t, Shape::value_tiles)
          KVF_UNROLLED (half, 2) {
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

  Ctx& ctx_;
  const Args& args_;
  const DecodeRow& row_;
  const Columns<Layout, Quant> columns_;
  const int line_;  ///< of eight: the row of an operand that this lane has
  const int quad_;  ///< of four: its elements there
  const float inverse_cap_;

  std::uint32_t queries_[Tiles][KeyShape::steps][2];
  std::uint32_t rests_[Tiles][key_bf16 ? KeyShape::steps : 1][2];  ///< what bf16 cuts off them
  // Of the two columns of each tile whose scores this lane has: what becomes of products, and the softmax.
  float scales_[Tiles][2];
  float sums_[Tiles][2];
  float slopes_[Tiles][2];
  std::int32_t positions_[Tiles][2];
  std::uint32_t seen_[Tiles][2];  ///< positions below are seen, as far as there is no other mask
  float maxima_[Tiles][2];
  float bases_[Tiles][2] = {};
  float weights_[Tiles][2];  ///< of this lane's tokens alone, as offsets_
  float offsets_[Tiles][2];
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
