// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Products of a tile's keys with a block's queries. Keys are the rows of mma and columns are its columns, so
// products with eight heads cost no more than those with one.

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/tensor.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/decode_args.hpp"
#include "kvfolia/cuda/decode_channels.hpp"
#include "kvfolia/cuda/decode_exact.hpp"
#include "kvfolia/cuda/decode_queries.hpp"
#include "kvfolia/cuda/decode_shape.hpp"
#include "kvfolia/cuda/decode_tiles.hpp"
#include "kvfolia/cuda/decode_tokens.hpp"
#include "kvfolia/cuda/unpack.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

/// A lane has rows lane / 4 and lane / 4 + 8 of each part of a tile, and of each tile of columns those from
/// 2 * (lane % 4) on: element 2 * half + i of a product is of row half, column i.
template <class Ctx, class Layout, class Quant, class Shape>
class KeyProducts {
 public:
  static constexpr int tiles = Shape::tiles;
  using Side = typename Shape::KeyShape;
  using Queries = StagedQueries<Ctx, Layout, Quant, Shape>;
  using Products = float[tiles][Shape::parts][4];

  KVF_INLINE KVF_HD KeyProducts(Ctx& ctx, const DecodeArgs<Layout, Quant>& args)
      : ctx_(ctx), args_(args), line_(ctx.lane() / 4), quad_(ctx.lane() % 4) {}

  /// Takes this lane's operands.
  KVF_INLINE KVF_HD void read(Queries& queries) {
    KVF_UNROLLED (tile, tiles) {
      KVF_UNROLLED (step, Side::steps) {
        KVF_UNROLLED (half, 2) {
          queries_[tile][step][half] = queries.pair(8 * tile + line_, step, quad_, half);
          if constexpr (is_bf16)
            rests_[tile][step][half] = queries.pair(8 * tile + line_, step, quad_, half, true);
        }
      }
      if constexpr (Side::token_offset) {
        KVF_UNROLLED (group, Side::groups) {
          KVF_UNROLLED (i, 2) sums_[tile][group][i] = queries.sum(8 * tile + 2 * quad_ + i, group);
        }
      }
    }
  }

  /// Products with the tile's coded keys, `rows` being where these are.
  KVF_INLINE KVF_HD void multiply(SharedOffset stage, SharedOffset rows, Products& products) {
    if constexpr (kind_bits(Side::kind) == 16)
      multiply_wide(rows, products);
    else
      multiply_codes(stage, rows, products);
  }

  /// Products with the exact keys of a part, in place of what their absent codes gave.
  KVF_INLINE KVF_HD void multiply_exact(ExactTokens<Ctx, Layout, Quant, Shape>& exact, Queries& queries,
                                        int part, Products& products) {
    KVF_UNROLLED (tile, tiles) {
      KVF_UNROLLED (i, 4) {
        if (exact.has(i / 2)) products[tile][part][i] = 0.0f;
      }
    }
    KVF_NO_UNROLL
    for (int step = 0; step < Side::steps; ++step) {
      std::uint32_t a[4];
      exact.key_operand(step, a);
      KVF_UNROLLED (tile, tiles) {
        const std::uint32_t b[2] = {queries.pair(8 * tile + line_, step, quad_, 0),
                                    queries.pair(8 * tile + line_, step, quad_, 1)};
        ctx_.mma_fp16(products[tile][part], a, b);
      }
    }
  }

 private:
  static constexpr bool is_bf16 = Side::kind == CodeKind::bf16;
  static constexpr int pairs = pairs_per_register(Side::kind);
  static constexpr int chunk_steps = pairs / 2;  ///< of narrow codes
  static constexpr bool scales_queries = Side::Quant::affine.channel_scale;

  template <int Parts>
  KVF_INLINE KVF_HD static void clear(float (&products)[tiles][Parts][4]) {
    KVF_UNROLLED (tile, tiles) {
      KVF_UNROLLED (part, Parts) {
        KVF_UNROLLED (i, 4) products[tile][part][i] = 0.0f;
      }
    }
  }

  /// Sixteen rows of two chunks: rows 0 to 7 and 8 to 15 of the first one, then of the next one.
  KVF_INLINE KVF_HD void read_rows(SharedOffset rows, int part, int chunk, std::uint32_t (&words)[4]) {
    const SharedOffset row = static_cast<SharedOffset>((16 * part + ctx_.lane() % 16) * Side::pitch);
    const SharedOffset of_lane = static_cast<SharedOffset>(ctx_.lane() / 16 * 16 + chunk * 16);
    ctx_.ldmatrix_x4(words, rows + row + of_lane);
  }

  KVF_INLINE KVF_HD void multiply_wide(SharedOffset rows, Products& products) {
    clear(products);
    KVF_UNROLLED (part, Shape::parts) {
      KVF_UNROLLED (step, Side::chunks / 2) {
        std::uint32_t a[4];
        read_rows(rows, part, 2 * step, a);
        KVF_UNROLLED (tile, tiles) {
          if constexpr (is_bf16) {
            ctx_.mma_bf16(products[tile][part], a, queries_[tile][step]);
            if (rotates<typename Shape::Key> || args_.args.queries.type != DType::bf16)
              ctx_.mma_bf16(products[tile][part], a, rests_[tile][step]);
          } else {
            ctx_.mma_fp16(products[tile][part], a, queries_[tile][step]);
          }
        }
      }
    }
  }

  KVF_INLINE KVF_HD void multiply_codes(SharedOffset stage, SharedOffset rows, Products& products) {
    float sums[tiles][Shape::parts][4];  // of a group
    ChannelSums channels;
    if constexpr (Side::has_channels) {
      clear(channels.offsets);
      clear(channels.scales);
    }
    KVF_UNROLL
    for (int chunk = 0; chunk < Side::chunks; chunk += 2) {
      std::uint32_t words[Shape::parts][4];
      KVF_UNROLLED (part, Shape::parts) read_rows(rows, part, chunk, words[part]);
      KVF_UNROLLED (c, 2) {
        const int at = chunk + c, group = at / Side::group_chunks;
        if (group >= Side::groups) continue;
        if (at % Side::group_chunks == 0) clear(sums);
        std::uint32_t queries[tiles][chunk_steps][2];
        take_queries(stage, at, queries, channels);
        KVF_UNROLLED (part, Shape::parts) {
          std::uint32_t upper[pairs], lower[pairs];
          unpack<Ctx, Side::kind, false, Side::is_biased>(words[part][2 * c], upper);
          unpack<Ctx, Side::kind, false, Side::is_biased>(words[part][2 * c + 1], lower);
          if constexpr (has_fine_scales<typename Side::Quant>) {
            scale_codes(stage, 16 * part + line_, at, upper);
            scale_codes(stage, 16 * part + 8 + line_, at, lower);
          }
          KVF_UNROLLED (i, chunk_steps) {
            if (at * chunk_steps + i >= Side::steps) continue;
            const std::uint32_t a[4] = {upper[2 * i], lower[2 * i], upper[2 * i + 1], lower[2 * i + 1]};
            KVF_UNROLLED (tile, tiles) ctx_.mma_fp16(sums[tile][part], a, queries[tile][i]);
          }
          if ((at + 1) % Side::group_chunks == 0 || at + 1 == Side::chunks)
            add_group(stage, part, group, sums, products);
        }
      }
    }
    if constexpr (Side::has_channels) add_channels(stage, channels, products);
  }

  /// Queries' products with what the channels have: the same for all rows.
  struct ChannelSums {
    float offsets[tiles][1][4];
    float scales[tiles][1][4];
  };
  /// A chunk's operands, times channels' scales; their products with the channels are added up beside, with
  /// queries that are not yet rounded again.
  KVF_INLINE KVF_HD void take_queries(SharedOffset stage, int chunk,
                                      std::uint32_t (&queries)[tiles][chunk_steps][2], ChannelSums& sums) {
    using Channels = StagedChannels<Ctx, typename Side::Quant>;
    constexpr int run = 4 * chunk_steps;  // a lane's channels
    if constexpr (Side::has_channels) {
      // Beyond the dims queries are 0, but what is read there may be anything.
      const int channel = (4 * chunk + quad_) * run;
      const bool exists = Side::dims % (4 * run) == 0 || channel < Side::dims;
      const typename Channels::template Run<run> channels(ctx_, stage + Shape::key_channels,
                                                          exists ? channel : 0);
      KVF_UNROLLED (i, chunk_steps) {
        const int step = chunk * chunk_steps + i;
        if (step >= Side::steps) continue;
        ChannelPair halves[2];
        KVF_UNROLLED (half, 2)
          halves[half] =
              channels.pair(key_dim_of(Side::kind, i, 0, half, 0), key_dim_of(Side::kind, i, 0, half, 1));
        add_rows(halves[0].offsets, halves[1].offsets, step, sums.offsets);
        if constexpr (scales_queries) add_rows(halves[0].scales, halves[1].scales, step, sums.scales);
        KVF_UNROLLED (tile, tiles) {
          KVF_UNROLLED (half, 2)
            queries[tile][i][half] =
                scales_queries ? multiply_fp16x2<Ctx>(queries_[tile][step][half], halves[half].scales)
                               : queries_[tile][step][half];
        }
      }
    } else {
      KVF_UNROLLED (i, chunk_steps) {
        const int step = chunk * chunk_steps + i;
        if (step >= Side::steps) continue;
        KVF_UNROLLED (tile, tiles) {
          KVF_UNROLLED (half, 2) queries[tile][i][half] = queries_[tile][step][half];
        }
      }
    }
  }
  /// sums += products of queries and sixteen rows that are all the same.
  KVF_INLINE KVF_HD void add_rows(std::uint32_t first, std::uint32_t second, int step,
                                  float (&sums)[tiles][1][4]) {
    const std::uint32_t a[4] = {first, first, second, second};
    KVF_UNROLLED (tile, tiles) ctx_.mma_fp16(sums[tile][0], a, queries_[tile][step]);
  }

  /// Codes of a row, times the scale of those of them that a lane has.
  KVF_INLINE KVF_HD void scale_codes(SharedOffset stage, int token, int chunk,
                                     std::uint32_t (&codes)[pairs]) {
    const StagedParams<Ctx> params{ctx_, stage + Shape::key_params, Shape::KeyParams::pitch};
    const auto scale = params.template param<std::uint8_t>(token, 2 * chunk + quad_ / 2);
    const std::uint32_t both = Ctx::e4m3x2_to_fp16x2(static_cast<std::uint32_t>(scale) * 0x101u);
    KVF_UNROLLED (i, pairs) codes[i] = multiply_fp16x2<Ctx>(codes[i], both);
  }

  /// products += a group's sums of products with codes, as products with keys.
  KVF_INLINE KVF_HD void add_group(SharedOffset stage, int part, int group,
                                   const float (&sums)[tiles][Shape::parts][4], Products& products) {
    KVF_UNROLLED (half, 2) {
      const GroupParams p =
          read_group<Side>(ctx_, quant(), stage + Shape::key_params, 16 * part + 8 * half + line_, group);
      KVF_UNROLLED (tile, tiles) {
        KVF_UNROLLED (i, 2) {
          const float sum =
              Side::token_scale ? p.scale * sums[tile][part][2 * half + i] : sums[tile][part][2 * half + i];
          float& product = products[tile][part][2 * half + i];
          product = group == 0 ? sum : product + sum;
          if constexpr (Side::token_offset) product += p.offset * sums_[tile][group][i];
        }
      }
    }
  }
  /// products += what the channels add, the same for all rows.
  KVF_INLINE KVF_HD void add_channels(SharedOffset stage, const ChannelSums& sums, Products& products) {
    const ChannelUnits units =
        StagedChannels<Ctx, typename Side::Quant>::units(ctx_, stage + Shape::key_channels);
    KVF_UNROLLED (tile, tiles) {
      KVF_UNROLLED (i, 2) {
        float offset = units.offset * sums.offsets[tile][0][i];
        // Codes are read with an excess, which rounded queries must not see.
        if constexpr (scales_queries)
          offset -= static_cast<float>(Side::excess) * units.scale * sums.scales[tile][0][i];
        KVF_UNROLLED (part, Shape::parts) {
          KVF_UNROLLED (half, 2) {
            float& product = products[tile][part][2 * half + i];
            product = scales_queries ? units.scale * product + offset : product + offset;
          }
        }
      }
    }
  }
  KVF_INLINE KVF_HD const auto& quant() const {
    return key_side(format_quant<Shape::format>(args_.view.quant));
  }

  Ctx& ctx_;
  const DecodeArgs<Layout, Quant>& args_;
  const int line_;
  const int quad_;
  std::uint32_t queries_[tiles][Side::steps][2];
  std::uint32_t rests_[tiles][is_bf16 ? Side::steps : 1][2];  ///< what bf16 cuts off them
  float sums_[tiles][Side::groups][2];                        ///< of a column's elements in a group
};

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
