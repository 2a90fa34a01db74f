// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Sums of values times weights: values are the rows of mma, a tile's weights become its columns by movmatrix.

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/decode_args.hpp"
#include "kvfolia/cuda/decode_channels.hpp"
#include "kvfolia/cuda/decode_exact.hpp"
#include "kvfolia/cuda/decode_shape.hpp"
#include "kvfolia/cuda/decode_tiles.hpp"
#include "kvfolia/cuda/decode_tokens.hpp"
#include "kvfolia/cuda/unpack.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

/// Over the lanes that have other tokens of the same columns.
template <class Ctx>
KVF_INLINE KVF_HD float sum_of_lines(Ctx& ctx, float x) {
  KVF_UNROLL
  for (int mask = 4; mask <= 16; mask *= 2) x += ctx.shfl_xor(x, mask);
  return x;
}

/// A lane has, of each sixteen dims and tile of columns, four sums: of dims half, columns i, as KeyProducts
/// has tokens.
template <class Ctx, class Layout, class Quant, class Shape>
class ValueSums {
 public:
  static constexpr int tiles = Shape::tiles;
  using Side = typename Shape::ValueShape;
  using Tokens = TokenFacts[Shape::parts][2];
  using Weights = float[tiles][Shape::parts][4];

  KVF_INLINE KVF_HD ValueSums(Ctx& ctx, const DecodeArgs<Layout, Quant>& args)
      : ctx_(ctx), args_(args), line_(ctx.lane() / 4), quad_(ctx.lane() % 4) {
    KVF_UNROLLED (tile, tiles) {
      KVF_UNROLLED (t, Shape::value_tiles) {
        KVF_UNROLLED (i, 4) out_[tile][t][i] = 0.0f;
      }
      KVF_UNROLLED (group, Side::groups) {
        KVF_UNROLLED (i, 2) offsets_[tile][group][i] = 0.0f;
      }
    }
  }

  KVF_INLINE KVF_HD void scale(int tile, int i, float factor) {
    KVF_UNROLLED (group, Side::groups) offsets_[tile][group][i] *= factor;
    KVF_UNROLLED (t, Shape::value_tiles) {
      out_[tile][t][i] *= factor;
      out_[tile][t][2 + i] *= factor;
    }
  }

  /// Adds the tile's coded values, `rows` being where these are. Weights have the token's largest scale.
  KVF_INLINE KVF_HD void add(SharedOffset stage, SharedOffset rows, const Tokens& tokens,
                             const Weights& weights) {
    std::uint32_t operands[Shape::parts][tiles][2];
    float block_weights[tiles][2];
    if constexpr (Side::has_channels) weigh_block(tokens, weights, block_weights);
    KVF_UNROLL
    for (int chunk = 0; chunk < Side::chunks; chunk += 2) {
      std::uint32_t words[Shape::parts][4];
      if (chunk == 0) weigh_group(stage, 0, tokens, weights, operands);
      KVF_UNROLLED (part, Shape::parts) read_columns(rows, part, chunk, words[part]);
      if constexpr (is_wide) {
        KVF_UNROLLED (part, Shape::parts) {
          KVF_UNROLLED (tile, tiles) multiply(out_[tile][chunk / 2], words[part], operands[part][tile]);
        }
      } else {
        KVF_UNROLLED (c, 2) {
          const int at = chunk + c, group = at / Side::group_chunks;
          if (group >= Side::groups) continue;
          if (at > 0 && at % Side::group_chunks == 0) weigh_group(stage, group, tokens, weights, operands);
          std::uint32_t codes[Shape::parts][2][pairs];  // of eight tokens, of the next eight
          KVF_UNROLLED (part, Shape::parts) {
            KVF_UNROLLED (half, 2) {
              unpack<Ctx, Side::kind, true, Side::is_biased>(words[part][2 * c + half], codes[part][half]);
              if constexpr (has_fine_scales<typename Side::Quant>)
                scale_codes(stage, 16 * part + 8 * half, at, codes[part][half]);
            }
          }
          KVF_UNROLLED (i, pairs / 2) {
            const int t = at * (pairs / 2) + i;
            float sums[tiles][4];
            KVF_UNROLLED (tile, tiles) {
              KVF_UNROLLED (e, 4) sums[tile][e] = scales_sums ? 0.0f : out_[tile][t][e];
            }
            KVF_UNROLLED (part, Shape::parts) {
              const std::uint32_t a[4] = {codes[part][0][2 * i], codes[part][0][2 * i + 1],
                                          codes[part][1][2 * i], codes[part][1][2 * i + 1]};
              KVF_UNROLLED (tile, tiles) multiply(sums[tile], a, operands[part][tile]);
            }
            if constexpr (Side::has_channels) {
              add_channels(stage, t, block_weights, sums);
            } else {
              KVF_UNROLLED (tile, tiles) {
                KVF_UNROLLED (e, 4) out_[tile][t][e] = sums[tile][e];
              }
            }
          }
        }
      }
    }
  }

  /// Adds a part's exact values. Sums go round: a loop can have its next ones in the same registers.
  KVF_INLINE KVF_HD void add_exact(ExactTokens<Ctx, Layout, Quant, Shape>& exact, int part,
                                   const Weights& weights) {
    std::uint32_t operands[tiles][2];
    KVF_UNROLLED (tile, tiles) {
      KVF_UNROLLED (half, 2)
        operands[tile][half] = operand(weights[tile][part], half, exact.has(half) ? 1.0f : 0.0f);
    }
    KVF_NO_UNROLL
    for (int t = 0; t < Shape::value_tiles; ++t) {
      std::uint32_t a[4];
      exact.value_operand(t, a);
      KVF_UNROLLED (tile, tiles) {
        multiply(out_[tile][0], a, operands[tile]);
        KVF_UNROLLED (i, 4) {
          const float first = out_[tile][0][i];
          KVF_UNROLLED (next, Shape::value_tiles - 1) out_[tile][next][i] = out_[tile][next + 1][i];
          out_[tile][Shape::value_tiles - 1][i] = first;
        }
      }
    }
  }

  /// Leaves the sums of a tile's column i in shared memory, from its row on.
  KVF_INLINE KVF_HD void store(int tile, int i, SharedOffset row) {
    if constexpr (Side::token_offset) {
      KVF_UNROLLED (group, Side::groups)
        offsets_[tile][group][i] = sum_of_lines(ctx_, offsets_[tile][group][i]);
    }
    KVF_UNROLLED (t, Shape::value_tiles) {
      KVF_UNROLLED (half, 2) {
        // A tile's dims are all of one group; those of the last ones may be none.
        const int group = value_dim_of(Side::kind, t, 0, 0) / Side::group_dims;
        const float offset = Side::token_offset && group < Side::groups ? offsets_[tile][group][i] : 0.0f;
        const int dim = value_dim_of(Side::kind, t, line_, half);
        if (dim < Layout::value_dim)
          ctx_.store_shared(row + static_cast<SharedOffset>(dim * 4), out_[tile][t][2 * half + i] + offset);
      }
    }
  }

 private:
  static constexpr bool is_wide = kind_bits(Side::kind) == 16;
  static constexpr bool is_bf16 = Side::kind == CodeKind::bf16;
  static constexpr int pairs = pairs_per_register(Side::kind);
  static constexpr bool scales_sums = Side::Quant::affine.channel_scale;

  /// Of wide codes two chunks of eight tokens, then of the next eight; of others two times eight tokens of a
  /// chunk, then of the next one; with tokens in pairs.
  KVF_INLINE KVF_HD void read_columns(SharedOffset rows, int part, int chunk, std::uint32_t (&words)[4]) {
    const int lane = ctx_.lane(), row = is_wide ? lane % 8 + lane / 16 * 8 : lane % 16;
    const int chunk_of_lane = is_wide ? lane / 8 % 2 : lane / 16;
    ctx_.ldmatrix_x4_trans(words, rows + static_cast<SharedOffset>((16 * part + row) * Side::pitch) +
                                      static_cast<SharedOffset>((chunk + chunk_of_lane) * 16));
  }

  /// Weights times scales of a group of values, as operands; the group's offsets are added up beside.
  KVF_INLINE KVF_HD void weigh_group(SharedOffset stage, int group, const Tokens& tokens,
                                     const Weights& weights,
                                     std::uint32_t (&operands)[Shape::parts][tiles][2]) {
    KVF_UNROLLED (part, Shape::parts) {
      KVF_UNROLLED (half, 2) {
        const TokenFacts& token = tokens[part][half];
        float ratio = 1.0f, offset = token.value_offset;
        if constexpr (Side::groups > 1) {
          const GroupParams p =
              read_group<Side>(ctx_, value_side(format_quant<Shape::format>(args_.view.quant)),
                               stage + Shape::value_params, 16 * part + 8 * half + line_, group);
          // Weights have the largest group's scale already.
          ratio = p.scale * token.inverse_value_scale;
          offset = p.offset;
        }
        if constexpr (Side::token_scale) offset *= token.inverse_value_scale;
        KVF_UNROLLED (tile, tiles) {
          operands[part][tile][half] = operand(weights[tile][part], half, ratio);
          if constexpr (Side::token_offset) {
            KVF_UNROLLED (i, 2) offsets_[tile][group][i] += weights[tile][part][2 * half + i] * offset;
          }
        }
      }
    }
  }
  /// Eight tokens' weights times something, as the columns of a product.
  KVF_INLINE KVF_HD std::uint32_t operand(const float (&weights)[4], int half, float factor) {
    return ctx_.movmatrix(pack<Ctx, is_bf16>(weights[2 * half] * factor, weights[2 * half + 1] * factor));
  }
  KVF_INLINE KVF_HD void multiply(float (&sums)[4], const std::uint32_t (&a)[4],
                                  const std::uint32_t (&b)[2]) {
    if constexpr (is_bf16)
      ctx_.mma_bf16(sums, a, b);
    else
      ctx_.mma_fp16(sums, a, b);
  }

  /// Codes of eight tokens, in pairs from `first` on, times the scales of those that a lane has.
  KVF_INLINE KVF_HD void scale_codes(SharedOffset stage, int first, int chunk,
                                     std::uint32_t (&codes)[pairs]) {
    const StagedParams<Ctx> params{ctx_, stage + Shape::value_params, Shape::ValueParams::pitch};
    const int group = 2 * chunk + line_ / 4, token = first + 2 * quad_;
    const auto one = params.template param<std::uint8_t>(token, group);
    const auto other = params.template param<std::uint8_t>(token + 1, group);
    const std::uint32_t scales =
        Ctx::e4m3x2_to_fp16x2(static_cast<std::uint32_t>(one) | static_cast<std::uint32_t>(other) << 8);
    KVF_UNROLLED (i, pairs) codes[i] = multiply_fp16x2<Ctx>(codes[i], scales);
  }

  /// The sums of a tile's weights: what channels' offsets are multiplied by.
  KVF_INLINE KVF_HD void weigh_block(const Tokens& tokens, const Weights& weights, float (&sums)[tiles][2]) {
    KVF_UNROLLED (tile, tiles) {
      KVF_UNROLLED (i, 2) {
        float sum = 0.0f;
        KVF_UNROLLED (part, Shape::parts) {
          KVF_UNROLLED (half, 2) {
            sum += weights[tile][part][2 * half + i] * tokens[part][half].inverse_value_scale;
          }
        }
        sums[tile][i] = sum_of_lines(ctx_, sum);
      }
    }
  }
  /// From a block's sums over codes of sixteen dims to those over values.
  KVF_INLINE KVF_HD void add_channels(SharedOffset stage, int t, const float (&block_weights)[tiles][2],
                                      const float (&sums)[tiles][4]) {
    using Channels = StagedChannels<Ctx, typename Side::Quant>;
    const SharedOffset at = stage + Shape::value_channels;
    // Beyond the dims sums are not used, but what is read there may be anything.
    const int channel = value_dim_of(Side::kind, t, line_, 0);
    const typename Channels::template Run<2> channels(ctx_, at, channel < Side::dims ? channel : 0);
    const ChannelUnits units = Channels::units(ctx_, at);
    const ChannelPair pair = channels.pair(0, 1);
    KVF_UNROLLED (half, 2) {
      float scale = 1.0f, offset = units.offset * half_of(pair.offsets, half);
      if constexpr (scales_sums) {
        scale = units.scale * half_of(pair.scales, half);
        offset -= static_cast<float>(Side::excess) * scale;
      }
      KVF_UNROLLED (tile, tiles) {
        KVF_UNROLLED (i, 2) {
          const float sum = sums[tile][2 * half + i],
                      before = scales_sums ? out_[tile][t][2 * half + i] : 0.0f;
          out_[tile][t][2 * half + i] = before + (scale * sum + offset * block_weights[tile][i]);
        }
      }
    }
  }

  Ctx& ctx_;
  const DecodeArgs<Layout, Quant>& args_;
  const int line_;
  const int quad_;
  float out_[tiles][Shape::value_tiles][4];
  float offsets_[tiles][Side::groups][2];  ///< of this lane's tokens alone
};

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
