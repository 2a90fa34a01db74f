// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What a decode kernel's block has in shared memory, and how its threads share the work: constants of a
// layout, a quantizer and a number of columns.
//
// A block has the keys of one split of a row, for one KV head and up to 16 columns: query heads of the group
// times the row's queries. Each warp has a ring of its own, of tiles of 16 or 32 tokens, and takes every
// fourth tile: warps meet only at the end.

#include <cstdint>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/page_format.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/unpack.hpp"

namespace kvfolia::inline KVF_ABI::cuda {

/// Tokens whose attention one block computes: the border at which results are merged, whatever the batch. A
/// result of 512 tokens is 1/128 of the bytes that 16-bit keys and values of a KV head take, for each of its
/// query heads; shorter splits give a batch of one more blocks, longer ones cost less to merge.
inline constexpr int default_split_tokens = 512;

namespace detail {

constexpr int largest_unit(int bytes) { return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : 4; }

/// One side, keys or values, of a tile in shared memory.
template <class Q, int Dims>
struct SideShape {
  static constexpr CodeKind kind = code_kind<Q>;
  static constexpr int row_bytes = kvfolia::code_bytes<Q>(Dims);  ///< of a token, in a page
  static constexpr int unit = largest_unit(row_bytes);            ///< that copies move
  static constexpr int chunks = (row_bytes + 31) / 32 * 2;        ///< of 16 bytes; ldmatrix takes two
  /// Rows of an odd number of chunks: neighbours of eight lie in different banks.
  static constexpr int pitch = (chunks + 1) * 16;
  static constexpr int param_bytes = static_cast<int>(Q::param_bytes(Dims, 1));  ///< of a token
  /// Groups of dims that share a scale, and the chunks that each has.
  static constexpr int groups = group_count<Q>(Dims);
  static constexpr int group_dims = Q::group_dims == 0 ? Dims : Q::group_dims;
  static constexpr int group_chunks =
      Q::group_dims == 0 ? chunks : Q::group_dims * kind_bits(kind) / (8 * 16);
  /// Steps of mma along the dims: one for two chunks of 16 bits, one or two for a chunk of others. The last
  /// one may be partly beyond the dims.
  static constexpr int steps =
      kind_bits(kind) == 16 ? chunks / 2 : (row_bytes + 15) / 16 * (kind_bits(kind) == 4 ? 2 : 1);
};

/// Parameters of a side's tokens, as rows that are copied like codes.
template <class Side>
struct ParamShape {
  static constexpr int row_bytes = Side::param_bytes;
  /// Two bytes are fewer than copies move: those go through registers.
  static constexpr bool copied = row_bytes > 0 && row_bytes % 4 == 0;
  static constexpr int unit = largest_unit(row_bytes);
  static constexpr int pitch = (row_bytes + 3) / 4 * 4;
};

/// Whether the kernels read pages of a side.
template <class Q, int Dims>
constexpr bool reads_side() {
  if constexpr (!unpacks(code_kind<Q>))
    return false;
  else
    return Q::seal_tokens == 1 && !has_channels<Q> && !rotates<Q> && SideShape<Q, Dims>::row_bytes % 4 == 0 &&
           Q::group_dims * kind_bits(code_kind<Q>) % (8 * 16) == 0 &&
           (SideShape<Q, Dims>::param_bytes % 4 == 0 || SideShape<Q, Dims>::param_bytes == 2);
}

/// `Tiles` of eight columns.
template <class Layout, class Quant, int Tiles>
struct DecodeShape {
  using Key = KeySide<Quant>;
  using Value = ValueSide<Quant>;
  using KeyShape = SideShape<Key, Layout::key_dim>;
  using ValueShape = SideShape<Value, Layout::value_dim>;
  using KeyParams = ParamShape<KeyShape>;
  using ValueParams = ParamShape<ValueShape>;

  // What there is to be folded, codes' shifts among the offsets.
  static constexpr bool key_offset = Key::affine.token_offset || code_shift(KeyShape::kind) != 0.0f;
  static constexpr bool value_scale = Value::affine.token_scale;
  static constexpr bool value_offset = Value::affine.token_offset || code_shift(ValueShape::kind) != 0.0f;
  /// Tiles of sixteen dims of values, those beyond the last dim too.
  static constexpr int value_tiles = ValueShape::chunks * 8 / kind_bits(ValueShape::kind);

  static constexpr bool several_formats = format_count<Quant> > 1;
  static constexpr int warps = 4;
  static constexpr int threads = warps * warp_size;
  static constexpr int columns = 8 * Tiles;
  /// Blocks of a multiprocessor that registers must suffice for.
  static constexpr int blocks = Tiles == 1 && Layout::key_dim <= 128 && Layout::value_dim <= 128 ? 3 : 2;
  static constexpr int row_bytes =
      KeyShape::row_bytes > ValueShape::row_bytes ? KeyShape::row_bytes : ValueShape::row_bytes;
  /// Parts of 16 tokens that a tile has: two of short rows, unless what groups need fills the registers.
  static constexpr int parts = row_bytes >= 128 || KeyShape::groups > 1 || ValueShape::groups > 1 ? 1 : 2;
  static constexpr int tokens = 16 * parts;  ///< of a tile
  static constexpr int stages = 3;           ///< of a warp's ring

  // A stage, in bytes from its beginning.
  static constexpr SharedOffset keys = 0;
  static constexpr SharedOffset values = keys + tokens * KeyShape::pitch;
  static constexpr SharedOffset key_params = values + tokens * ValueShape::pitch;
  static constexpr SharedOffset value_params = key_params + tokens * KeyParams::pitch;
  static constexpr SharedOffset positions = value_params + tokens * ValueParams::pitch;
  static constexpr SharedOffset entries = positions + tokens * 4;
  static constexpr SharedOffset slots = entries + (several_formats ? tokens * 4 : 0);
  static constexpr SharedOffset stage_bytes = (slots + (several_formats ? tokens * 4 : 0) + 15) / 16 * 16;
  static constexpr SharedOffset ring_bytes = stage_bytes * stages;

  // Behind the rings: queries as mma's operands, [column][key_dim], rows that lie in different banks; then
  // of every column its factor and the sums of its elements, a group each.
  static constexpr int query_pitch = (Layout::key_dim + 15) / 16 * 32 + 16;
  static constexpr SharedOffset queries = warps * ring_bytes;
  /// What bf16 cuts off queries, where keys are such.
  static constexpr SharedOffset query_rests = queries + columns * query_pitch;
  static constexpr SharedOffset query_scales =
      query_rests + (KeyShape::kind == CodeKind::bf16 ? columns * query_pitch : 0);
  static constexpr SharedOffset query_sums = query_scales + columns * 4;
  static constexpr SharedOffset behind_queries = query_sums + columns * KeyShape::groups * 4;

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
