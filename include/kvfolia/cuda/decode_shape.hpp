// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What a decode kernel's block has in shared memory, and how its threads share the work: constants of a
// layout, a quantizer and a number of columns.
//
// A block has the keys of one split of a row, for one KV head and up to 16 columns: query heads of the group
// times the row's queries. Each warp has a ring of its own, of tiles of 16 or 32 tokens, which warps take in
// turn: they meet only at the end.

#include <cstdint>
#include <type_traits>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/page_format.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/decode_channels.hpp"
#include "kvfolia/cuda/tuning.hpp"
#include "kvfolia/cuda/unpack.hpp"
#include "kvfolia/quant/fp4.hpp"
#include "kvfolia/quant/ggml.hpp"
#include "kvfolia/quant/identity.hpp"

namespace kvfolia::inline KVF_ABI::cuda {

/// Tokens whose attention one block computes: the border at which results are merged, whatever the batch. A
/// result of 512 tokens is 1/128 of the bytes that 16-bit keys and values of a KV head take, for each of its
/// query heads; shorter splits give a batch of one more blocks, longer ones cost less to merge.
inline constexpr int default_split_tokens = 512;

namespace detail {

/// Whether sums take registers that sixteen columns, or three blocks, would need.
template <class Layout>
inline constexpr bool has_long_heads = Layout::key_dim > 128 || Layout::value_dim > 128;

/// Whether scales of half a chunk are multiplied with codes where those are unpacked: both are of so few
/// digits that fp16 has their products. What is left is one factor for all, `global`.
template <class Q>
inline constexpr bool has_fine_scales = std::is_same_v<Nvfp4, Q>;
template <class Q, int Tokens>
inline constexpr bool has_fine_scales<Centered<Q, Tokens>> = has_fine_scales<Q>;
template <class Q, int Block>
inline constexpr bool has_fine_scales<Rotated<Q, Block>> = has_fine_scales<Q>;

using kvfolia::detail::is_ggml;

/// One side, keys or values, of a tile in shared memory, as it lies in pages.
template <class Q, int Dims, bool IsKey>
struct SideShape {
  using Quant = Q;
  static constexpr CodeKind kind = code_kind<Q>;
  static constexpr int dims = Dims;
  static constexpr int row_bytes = kvfolia::code_bytes<Q>(Dims);  ///< of a token, in a page
  static constexpr int unit = largest_unit(row_bytes);            ///< that copies move
  static constexpr int chunks = (row_bytes + 31) / 32 * 2;        ///< of 16 bytes; ldmatrix takes two
  /// Rows of an odd number of chunks: neighbours of eight lie in different banks.
  static constexpr int pitch = (chunks + 1) * 16;
  static constexpr int param_bytes = static_cast<int>(Q::param_bytes(Dims, 1));  ///< of a token
  /// Groups of dims that share what is folded, and the chunks that each has.
  static constexpr bool one_group = Q::group_dims == 0 || has_fine_scales<Q>;
  static constexpr int groups = one_group ? 1 : group_count<Q>(Dims);
  static constexpr int group_dims = one_group ? Dims : Q::group_dims;
  static constexpr int group_chunks = one_group ? chunks : Q::group_dims * kind_bits(kind) / (8 * 16);
  /// Whether codes are read with the bias that is cheapest: queries are the other factor as they are, so what
  /// it adds is known exactly.
  static constexpr bool is_biased = IsKey && !Q::affine.channel_scale;
  static constexpr int excess = code_excess(kind, is_biased);
  /// What is folded into scores, or weights, for each token. What codes are read with in excess is among the
  /// offsets of what has the scales.
  static constexpr bool token_scale = Q::affine.token_scale;
  /// Whether scales may be smaller than an fp16 can be.
  static constexpr bool has_tiny_scales =
      kind == CodeKind::e2m1 || kind == CodeKind::e4m3 || kind == CodeKind::e5m2;
  static constexpr bool token_offset = Q::affine.token_offset || (excess != 0 && !Q::affine.channel_scale);
  /// A block's channels: their bytes in a page, and in a stage of the ring.
  static constexpr bool has_channels = kvfolia::has_channels<Q>;
  static constexpr int block_bytes = ChannelFormat<Q>::head_bytes + ChannelFormat<Q>::channel_bytes * Dims;
  static constexpr int staged_block_bytes = has_channels
                                                ? (ChannelFormat<Q>::head_bytes + 15) / 16 * 16 +
                                                      (ChannelFormat<Q>::channel_bytes * Dims + 15) / 16 * 16
                                                : 0;
  /// Steps of mma along the dims: one for two chunks of 16 bits, one or two for a chunk of others. The last
  /// one may be partly beyond the dims.
  static constexpr int steps =
      kind_bits(kind) == 16 ? chunks / 2 : (row_bytes + 15) / 16 * (kind_bits(kind) == 4 ? 2 : 1);
};

/// Parameters of a side's tokens, as rows that are copied like codes.
template <class Side>
struct ParamShape {
  using Quant = typename Side::Quant;
  static constexpr int dims = Side::dims;
  static constexpr int row_bytes = Side::param_bytes;
  /// Rows that no copy's size divides go through registers, in so many loads.
  static constexpr bool copied = row_bytes > 0 && row_bytes % 4 == 0;
  static constexpr int loads = copied ? 0 : row_bytes % 2 == 0 ? row_bytes / 2 : row_bytes;
  static constexpr int unit = copied ? largest_unit(row_bytes) : row_bytes % 2 == 0 ? 2 : 1;
  static constexpr int pitch = (row_bytes + 3) / 4 * 4;
};

/// Whether a side's rows become operands of mma as they are.
template <class Q>
constexpr bool reads_codes() {
  if constexpr (!unpacks(code_kind<Q>))
    return false;
  else
    return Q::group_dims * kind_bits(code_kind<Q>) % (has_fine_scales<Q> ? 64 : 128) == 0;
}
/// Whether they have to be made fp16 first.
template <class Q>
constexpr bool expands() {
  if constexpr (code_kind<Q> == CodeKind::other)
    return is_ggml<Q>;
  else
    return !reads_codes<Q>() && !kvfolia::has_channels<Q>;
}
/// What products read.
template <class Q, int Dims, bool IsKey>
using OperandShape = SideShape<std::conditional_t<expands<Q>(), Identity<fp16>, Q>, Dims, IsKey>;

/// Whether the kernels read pages of a side.
template <class Q, int Dims>
constexpr bool reads_side() {
  if constexpr (!reads_codes<Q>() && !expands<Q>())
    return false;
  else if constexpr (kvfolia::has_channels<Q>)
    return Q::seal_tokens % 16 == 0 && kind_bits(code_kind<Q>) < 16 && ChannelFormat<Q>::channel_bytes > 0;
  else
    return Q::seal_tokens == 1 && kvfolia::code_bytes<Q>(Dims) % 4 == 0;
}

/// `Tiles` of eight columns, pages of one of a cache's formats, on a GPU of a compute capability.
template <class Layout, class Quant, int Tiles, int Format, int Capability>
struct DecodeShape {
  static constexpr int format = Format;
  static constexpr int tiles = Tiles;
  using Key = KeySide<FormatQuant<Format, Quant>>;
  using Value = ValueSide<FormatQuant<Format, Quant>>;
  // As pages have them, and as products read them.
  using KeyRows = SideShape<Key, Layout::key_dim, true>;
  using ValueRows = SideShape<Value, Layout::value_dim, false>;
  using KeyParams = ParamShape<KeyRows>;
  using ValueParams = ParamShape<ValueRows>;
  static constexpr bool expands_keys = expands<Key>();
  static constexpr bool expands_values = expands<Value>();
  using KeyShape = OperandShape<Key, Layout::key_dim, true>;
  using ValueShape = OperandShape<Value, Layout::value_dim, false>;

  /// Tiles of sixteen dims of values, those beyond the last dim too.
  static constexpr int value_tiles = ValueShape::chunks * 8 / kind_bits(ValueShape::kind);

  static constexpr bool several_formats = format_count<Quant> > 1;
  /// Pages that are not coded are read with those of the first format.
  static constexpr bool reads_exact = Format == coded_format && exact_format<Quant> != coded_format;
  static constexpr int columns = 8 * Tiles;
  /// Blocks of a multiprocessor that registers must suffice for.
  static constexpr int blocks = Tiles == 1 && !has_long_heads<Layout> ? 3 : 2;
  static constexpr int row_bytes =
      KeyRows::row_bytes > ValueRows::row_bytes ? KeyRows::row_bytes : ValueRows::row_bytes;
  static constexpr bool has_channels = KeyShape::has_channels || ValueShape::has_channels;
  /// Whether sums leave registers for a second part.
  static constexpr bool has_registers =
      Tiles == 1 && KeyShape::groups == 1 && ValueShape::groups == 1 && !(has_channels && is_mixed<Quant>);
  /// Whether a tile of two parts is of one block.
  static constexpr bool has_long_blocks = Key::seal_tokens % 32 != 16 && Value::seal_tokens % 32 != 16;
  /// Parts of 16 tokens that a tile has: two of short rows, or where a block's channels serve both.
  static constexpr int parts = (row_bytes <= 128 || has_channels) && has_registers && has_long_blocks &&
                                       !expands_keys && !expands_values
                                   ? 2
                                   : 1;
  static constexpr int tokens = 16 * parts;  ///< of a tile

  // A stage, in bytes from its beginning.
  static constexpr SharedOffset keys = 0;
  static constexpr SharedOffset values = keys + tokens * KeyRows::pitch;
  static constexpr SharedOffset key_params = values + tokens * ValueRows::pitch;
  static constexpr SharedOffset value_params = key_params + tokens * KeyParams::pitch;
  static constexpr SharedOffset key_channels = (value_params + tokens * ValueParams::pitch + 15) / 16 * 16;
  static constexpr SharedOffset value_channels = key_channels + KeyShape::staged_block_bytes;
  static constexpr SharedOffset positions = value_channels + ValueShape::staged_block_bytes;
  static constexpr SharedOffset entries = positions + tokens * 4;
  static constexpr SharedOffset slots = entries + (reads_exact ? tokens * 4 : 0);
  /// Bits of tokens that are there, and of those that are exact.
  static constexpr SharedOffset masks = slots + (reads_exact ? tokens * 4 : 0);
  static constexpr SharedOffset stage_bytes = (masks + 8 + 15) / 16 * 16;
  // A tile's rows made fp16, where they are.
  static constexpr SharedOffset fp16_key_bytes = expands_keys ? tokens * KeyShape::pitch : 0;
  static constexpr SharedOffset fp16_value_bytes = expands_values ? tokens * ValueShape::pitch : 0;
  // Queries as mma's operands, [column][key_dim], rows that lie in different banks; then of every column its
  // factor and the sums of its elements, a group each.
  static constexpr int query_pitch = (Layout::key_dim + 15) / 16 * 32 + 16;
  static constexpr SharedOffset query_bytes = columns * query_pitch;
  /// What bf16 cuts off queries, where keys are such.
  static constexpr SharedOffset query_rest_bytes = KeyShape::kind == CodeKind::bf16 ? query_bytes : 0;
  static constexpr SharedOffset query_fact_bytes = columns * 4 + columns * KeyShape::groups * 4;

  static constexpr Pipeline ring =
      pipeline(tuning(Capability), stage_bytes, fp16_key_bytes + fp16_value_bytes,
               query_bytes + query_rest_bytes + query_fact_bytes);
  static constexpr int warps = ring.warps;
  static constexpr int threads = warps * warp_size;
  static constexpr int stages = ring.stages;  ///< of a warp's ring

  // From the beginning of a warp's ring: behind its stages rows made fp16.
  static constexpr SharedOffset fp16_keys = stage_bytes * stages;
  static constexpr SharedOffset fp16_values = fp16_keys + fp16_key_bytes;
  static constexpr SharedOffset ring_bytes = fp16_values + fp16_value_bytes;
  // Behind the rings.
  static constexpr SharedOffset queries = warps * ring_bytes;
  static constexpr SharedOffset query_rests = queries + query_bytes;
  static constexpr SharedOffset query_scales = query_rests + query_rest_bytes;
  static constexpr SharedOffset query_sums = query_scales + columns * 4;
  static constexpr SharedOffset behind_queries = query_scales + query_fact_bytes;

  // In the end, where the rings were: [warp][column][value_dim] sums, rows that lie in different banks, then
  // maxima and sums of weights, [warp][column].
  static constexpr int sum_pitch = (Layout::value_dim + 4) * 4;
  static constexpr SharedOffset maxima = warps * columns * sum_pitch;
  static constexpr SharedOffset weights = maxima + warps * columns * 4;
  static constexpr SharedOffset behind_sums = weights + warps * columns * 4;

  static constexpr SharedOffset shared_bytes = behind_queries > behind_sums ? behind_queries : behind_sums;
};

}  // namespace detail
}  // namespace kvfolia::inline KVF_ABI::cuda
