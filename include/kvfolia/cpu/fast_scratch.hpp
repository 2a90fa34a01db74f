// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Where the arrays of one worker of the fast path lie, and which kernels its formats are read with.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/cpu/amx.hpp"
#include "kvfolia/cpu/attend_plan.hpp"
#include "kvfolia/cpu/codes.hpp"
#include "kvfolia/cpu/key_kernels.hpp"
#include "kvfolia/cpu/params.hpp"
#include "kvfolia/cpu/row_blocks.hpp"
#include "kvfolia/cpu/simd.hpp"
#include "kvfolia/cpu/target.hpp"
#include "kvfolia/cpu/unpack.hpp"
#include "kvfolia/cpu/value_kernels.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

/// Whether an order lets scores be computed in place, lanes neighbouring slots at a time.
template <class Q, class Order>
inline constexpr bool streams_slots = [] {
  if constexpr (!has_vectors || Order::strided || !reads_slots<code_kind<Q>, Order>)
    return false;
  else
    return Q::group_dims % Order::dim_multiple == 0;
}();
/// How a format's keys, and its values, are read while few queries need them.
template <class Q, class Order, int Dims>
inline constexpr bool streams_keys = streams_slots<Q, Order> || reads_tokens<Q, Order, Dims>;
/// Whether weighted sums of values are computed in integers: of words of four slots.
template <class Q, class Order, int Dims>
inline constexpr bool rounds_weights = [] {
  if constexpr (Order::strided || has_channels<Q>)
    return false;
  else
    return sums_in_bytes<code_kind<Q>, Order::slot_multiple> && Order::dim_multiple == 1 &&
           Dims % lanes == 0 && Dims <= most_word_dims && Q::group_dims % lanes == 0;
}();
template <class Q, class Order, int Dims>
inline constexpr bool streams_values =
    (reads_tokens<Q, Order, Dims> && !has_channels<Q>) || rounds_weights<Q, Order, Dims>;

/// Whether scores are computed in integers.
template <class Q, class Order>
inline constexpr bool rounds = [] {
  if constexpr (streams_slots<Q, Order>)
    return in_bytes<code_kind<Q>, Order::dim_multiple>;
  else
    return false;
}();

/// Whether two bf16 are enough for what a quantizer decodes to: they hold fp16 and bf16 whole, and more of
/// what codes stand for than those know.
template <class Q>
inline constexpr bool suits_amx = has_amx&& Q::code_bits <= 16;

template <class Layout, class Q>
using ValueSideOf = std::conditional_t<Layout::shares_key_value, KeySide<Q>, ValueSide<Q>>;

/// Facts about all formats of a cache.
template <class Layout, class Quant, int Format = 0, bool Behind = (Format == format_count<Quant>)>
struct FormatFacts {
  using Q = FormatQuant<Format, Quant>;
  using Key = KeySide<Q>;
  using Value = ValueSideOf<Layout, Q>;
  using Rest = FormatFacts<Layout, Quant, Format + 1>;
  static constexpr int key_groups = std::max(group_count<Key>(Layout::key_dim), Rest::key_groups);
  static constexpr int value_groups = std::max(
      group_count<Value>(Layout::shares_key_value ? Layout::key_dim : Layout::value_dim), Rest::value_groups);
  static constexpr bool rounds_weights =
      detail::rounds_weights<Value, typename Layout::ValueOrder, Layout::value_dim> || Rest::rounds_weights;
  static constexpr bool rounds =
      detail::rounds<Key, typename Layout::KeyOrder> || rounds_weights || Rest::rounds;
  static constexpr bool uses_amx = suits_amx<Key> || suits_amx<Value> || Rest::uses_amx;
  static constexpr bool streams = streams_keys<Key, typename Layout::KeyOrder, Layout::key_dim> &&
                                  streams_values<Value, typename Layout::ValueOrder, Layout::value_dim> &&
                                  Rest::streams;
};
template <class Layout, class Quant, int Format>
struct FormatFacts<Layout, Quant, Format, true> {
  static constexpr int key_groups = 1;
  static constexpr int value_groups = 1;
  static constexpr bool rounds_weights = false;
  static constexpr bool rounds = false;
  static constexpr bool uses_amx = false;
  static constexpr bool streams = true;
};

/// Offsets in floats. `rows` counts queries times heads of a group, and what completes the last block.
template <class Layout, class Quant>
class FastScratch {
 public:
  static constexpr int key_groups = FormatFacts<Layout, Quant>::key_groups;
  static constexpr int value_groups = FormatFacts<Layout, Quant>::value_groups;
  /// Of a row of values: whole vectors of any instruction set, so that none needs a remainder.
  static constexpr std::int64_t value_stride = round_up(Layout::value_dim, 16);

  /// Of a row of weights where integers are multiplied: each column may need a word of its own.
  static constexpr std::int64_t weight_words =
      FormatFacts<Layout, Quant>::rounds_weights ? tile_positions : 0;

  /// Of a row of decoded values; a latent one may be decoded with the rest of its key.
  static constexpr std::int64_t panel_stride =
      round_up(Layout::shares_key_value ? Layout::key_dim : Layout::value_dim, 16);

  /// Of a row of words of two bf16; whole matrix registers.
  static constexpr int pair_stride = round_up(Layout::key_dim, 2 * amx_tile) / 2;

  constexpr explicit FastScratch(std::int64_t rows) : rows_(rows) {}

  constexpr std::int64_t queries() const { return 0; }
  constexpr std::int64_t folded() const { return behind(queries(), rows_ * Layout::key_dim); }
  /// Two halves of [row][key_dim / 4] words.
  constexpr std::int64_t query_bytes() const { return behind(folded(), rows_ * Layout::key_dim); }
  constexpr std::int64_t steps() const {
    return behind(query_bytes(), rows_ * round_up(Layout::key_dim, 4) / 2);
  }
  constexpr std::int64_t bases() const { return behind(steps(), rows_); }
  constexpr std::int64_t group_sums() const { return behind(bases(), rows_); }  ///< [row][key_groups]
  constexpr std::int64_t byte_sums() const {
    return behind(group_sums(), rows_ * key_groups);
  }  ///< two halves
  constexpr std::int64_t scores() const { return behind(byte_sums(), 2 * rows_ * key_groups); }
  constexpr std::int64_t weights() const { return behind(scores(), rows_ * score_stride); }
  /// Two halves of [row][group][weight_words] words, a ByteSums and a step of each.
  constexpr std::int64_t weight_bytes() const {
    return behind(weights(), value_groups > 1 ? value_groups * rows_ * score_stride : 0);
  }
  constexpr std::int64_t weight_sums() const {
    return behind(weight_bytes(), 2 * rows_ * value_groups * weight_words);
  }
  constexpr std::int64_t weight_steps() const {
    return behind(weight_sums(), weight_words != 0 ? 2 * rows_ * value_groups : 0);
  }
  constexpr std::int64_t key_scales() const {
    return behind(weight_steps(), weight_words != 0 ? rows_ * value_groups : 0);
  }
  constexpr std::int64_t key_offsets() const { return behind(key_scales(), key_groups * score_stride); }
  constexpr std::int64_t value_scales() const { return behind(key_offsets(), key_groups * score_stride); }
  constexpr std::int64_t value_offsets() const { return behind(value_scales(), value_groups * score_stride); }
  constexpr std::int64_t channels() const { return behind(value_offsets(), value_groups * score_stride); }
  constexpr std::int64_t unpacked() const {
    return behind(channels(), 2 * std::max(Layout::key_dim, Layout::value_dim));
  }
  constexpr std::int64_t key_panel() const {
    return behind(unpacked(), panel_tokens * round_up(Layout::key_dim, 16));
  }
  constexpr std::int64_t value_panel() const { return behind(key_panel(), panel_tokens * Layout::key_dim); }
  constexpr std::int64_t tile() const { return behind(value_panel(), tile_positions * panel_stride); }
  constexpr std::int64_t total() const { return behind(tile(), rows_ * state_floats()); }
  /// Two halves each of [row][pair_stride], of [pair_stride][panel_tokens], of [row][tile_positions / 2], and
  /// of [tile_positions / 2][value_stride] words.
  constexpr std::int64_t query_pairs() const { return behind(total(), rows_ * state_floats()); }
  constexpr std::int64_t key_pairs() const { return behind(query_pairs(), amx_words(rows_ * pair_stride)); }
  constexpr std::int64_t weight_pairs() const {
    return behind(key_pairs(), amx_words(pair_stride * panel_tokens));
  }
  constexpr std::int64_t value_pairs() const {
    return behind(weight_pairs(), amx_words(rows_ * tile_positions / 2));
  }
  constexpr std::int64_t size() const {
    return behind(value_pairs(), amx_words(tile_positions / 2 * value_stride));
  }

  static constexpr std::int64_t state_floats() { return value_stride + 2; }
  constexpr std::int64_t rows() const { return rows_; }

 private:
  /// Every array begins with a cache line.
  static constexpr std::int64_t behind(std::int64_t offset, std::int64_t floats) {
    return round_up<std::int64_t>(offset + floats, cache_line / 4);
  }
  static constexpr std::int64_t amx_words(std::int64_t n) { return has_amx ? 2 * n : 0; }

  std::int64_t rows_;
};

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
