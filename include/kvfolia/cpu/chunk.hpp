// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Some tokens' codes side by side, and how scores and outputs come from them: every factor and offset
// is folded, see Affine.

#include <math.h>

#include <algorithm>
#include <cstdint>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/cpu/target.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET {

/// Tokens read and scored at a time.
inline constexpr int chunk_tokens = 32;

namespace detail {

/// The most groups that a vector has in any format.
template <class Quant, int Format = 0>
constexpr int most_key_groups(int dims) {
  if constexpr (Format == format_count<Quant>)
    return 1;
  else
    return std::max(group_count<KeySide<FormatQuant<Format, Quant>>>(dims),
                    most_key_groups<Quant, Format + 1>(dims));
}
template <class Quant, int Format = 0>
constexpr int most_value_groups(int dims) {
  if constexpr (Format == format_count<Quant>)
    return 1;
  else
    return std::max(group_count<ValueSide<FormatQuant<Format, Quant>>>(dims),
                    most_value_groups<Quant, Format + 1>(dims));
}

/// Up to chunk_tokens tokens of one KV head, all of one format, and of one block where channels have
/// parameters. `Dims` of a plane have codes [dim][token] for keys, [token][dim] for values.
template <class Layout, class Quant>
class Chunk {
 public:
  static constexpr int key_dim = Layout::key_dim;
  static constexpr int value_dim = Layout::value_dim;
  static constexpr int key_groups = most_key_groups<Quant>(key_dim);
  static constexpr int value_groups =
      Layout::shares_key_value ? key_groups : most_value_groups<Quant>(value_dim);
  /// Of the memory that a chunk is given.
  static constexpr std::int64_t floats =
      chunk_tokens * (key_dim + value_dim + 2 * key_groups + 2 * value_groups) + 3 * key_dim + 3 * value_dim +
      value_groups;

  Chunk(const PagedView<Layout, Quant>& view, int head, float* memory) : view_(view), head_(head) {
    const auto take = [&memory](std::int64_t n) {
      float* taken = memory;
      memory += n;
      return taken;
    };
    key_codes_ = take(chunk_tokens * key_dim);
    value_codes_ = take(chunk_tokens * value_dim);
    key_scale_ = take(chunk_tokens * key_groups);
    key_offset_ = take(chunk_tokens * key_groups);
    value_scale_ = take(chunk_tokens * value_groups);
    value_offset_ = take(chunk_tokens * value_groups);
    key_channel_scale_ = take(key_dim);
    key_channel_offset_ = take(key_dim);
    query_ = take(key_dim);
    value_channel_scale_ = take(value_dim);
    value_channel_offset_ = take(value_dim);
    sums_ = take(value_dim);
    group_sums_ = take(value_groups);
  }

  int count() const { return count_; }
  bool full() const { return count_ == chunk_tokens; }
  std::int64_t position(int token) const { return positions_[token]; }
  void clear() { count_ = 0; }

  /// Whether a slot can join those that are there.
  bool takes(TableEntry entry, int slot) const {
    if (count_ == 0) return true;
    if (entry.format() != entry_.format()) return false;
    return visit_format(view_, entry, [&](const auto& quant) {
      using Q = std::remove_cvref_t<decltype(quant)>;
      if constexpr (has_channels<KeySide<Q>> || has_channels<ValueSide<Q>>) {
        // Blocks of both sides divide each other; the smaller one's parameters must be the same.
        constexpr int block = smaller_block<Q>();
        return entry == entry_ && slot / block == slot_ / block;
      }
      return true;
    });
  }

  /// Reads one slot's codes and parameters.
  void add(TableEntry entry, int slot, std::int64_t position) {
    const bool first = count_ == 0;
    entry_ = entry;
    slot_ = slot;
    positions_[count_] = position;
    visit_format(view_, entry, [&](const auto& quant) {
      const auto& keys = key_side(quant);
      const auto tile = view_.key_tile(entry, head_);
      float codes[key_dim];
      keys.codes(tile, slot, codes);
      for (int d = 0; d < key_dim; ++d) key_codes_[d * chunk_tokens + count_] = codes[d];
      read_params(keys, tile, slot, first, key_scale_ + count_, key_offset_ + count_, chunk_tokens,
                  key_channel_scale_, key_channel_offset_);
      float* to = value_codes_ + count_ * value_dim;
      float* scales = value_scale_ + count_ * value_groups;
      float* offsets = value_offset_ + count_ * value_groups;
      if constexpr (Layout::shares_key_value) {
        for (int d = 0; d < value_dim; ++d) to[d] = codes[d];
        read_params(keys, tile, slot, first, scales, offsets, 1, nullptr, nullptr);
        for (int d = 0; first && d < value_dim; ++d) {
          value_channel_scale_[d] = key_channel_scale_[d];
          value_channel_offset_[d] = key_channel_offset_[d];
        }
      } else {
        const auto& values = value_side(quant);
        const auto value_tile = view_.value_tile(entry, head_);
        values.codes(value_tile, slot, to);
        read_params(values, value_tile, slot, first, scales, offsets, 1, value_channel_scale_,
                    value_channel_offset_);
      }
    });
    ++count_;
  }

  /// Calls f with the quantizers of keys and of values that the tokens were coded with.
  template <class F>
  void visit(F&& f) const {
    visit_format(view_, entry_, [&](const auto& quant) { f(key_side(quant), value_quant<Layout>(quant)); });
  }

  /// Products of a query (as pages hold keys) with all chunk_tokens keys; those behind count() are not
  /// numbers that mean anything.
  template <class Q>
  void score(const float* query, float* scores) const {
    constexpr Affine has = Q::affine;
    float base = 0.0f;
    if constexpr (has.channel_offset)
      for (int d = 0; d < key_dim; ++d) base = ::fmaf(query[d], key_channel_offset_[d], base);
    const float* folded = query;
    if constexpr (has.channel_scale) {
      for (int d = 0; d < key_dim; ++d) query_[d] = query[d] * key_channel_scale_[d];
      folded = query_;
    }
    for (int t = 0; t < chunk_tokens; ++t) scores[t] = base;
    for (int group = 0; group < group_count<Q>(key_dim); ++group) {
      float partial[chunk_tokens] = {};
      float sum = 0.0f;
      for (int d = group_begin<Q>(group); d < group_end<Q>(group, key_dim); ++d) {
        if constexpr (has.token_offset) sum += query[d];
        for (int t = 0; t < chunk_tokens; ++t)
          partial[t] = ::fmaf(folded[d], key_codes_[d * chunk_tokens + t], partial[t]);
      }
      for (int t = 0; t < chunk_tokens; ++t) {
        if constexpr (has.token_scale)
          scores[t] = ::fmaf(key_scale_[group * chunk_tokens + t], partial[t], scores[t]);
        else
          scores[t] += partial[t];
        if constexpr (has.token_offset)
          scores[t] = ::fmaf(key_offset_[group * chunk_tokens + t], sum, scores[t]);
      }
    }
  }

  /// Weighted sums of the values for one output (as pages hold values): begin(), then rescale() and
  /// add() for the tokens in order, then end().
  template <class Q>
  void begin() const {
    if constexpr (Q::affine.channel_scale)
      for (int d = 0; d < value_dim; ++d) sums_[d] = 0.0f;
    for (int group = 0; group < value_groups; ++group) group_sums_[group] = 0.0f;
  }
  template <class Q>
  void rescale(float factor, float* out, float& weights) const {
    for (int d = 0; d < value_dim; ++d) out[d] *= factor;
    if constexpr (Q::affine.channel_scale)
      for (int d = 0; d < value_dim; ++d) sums_[d] *= factor;
    for (int group = 0; group < value_groups; ++group) group_sums_[group] *= factor;
    weights *= factor;
  }
  template <class Q>
  void add(int token, float weight, float* out, float& weights) const {
    float* to = Q::affine.channel_scale ? sums_ : out;
    const float* codes = value_codes_ + token * value_dim;
    for (int group = 0; group < group_count<Q>(value_dim); ++group) {
      const std::int64_t at = std::int64_t{token} * value_groups + group;
      const float factor = Q::affine.token_scale ? weight * value_scale_[at] : weight;
      for (int d = group_begin<Q>(group); d < group_end<Q>(group, value_dim); ++d)
        to[d] = ::fmaf(factor, codes[d], to[d]);
      if constexpr (Q::affine.token_offset)
        group_sums_[group] = ::fmaf(weight, value_offset_[at], group_sums_[group]);
    }
    weights += weight;
  }
  template <class Q>
  void end(float* out, float weights) const {
    if (weights == 0.0f) return;  // no token was added, so none of the parameters may be
    if constexpr (Q::affine.channel_scale)
      for (int d = 0; d < value_dim; ++d) out[d] = ::fmaf(value_channel_scale_[d], sums_[d], out[d]);
    if constexpr (Q::affine.token_offset)
      for (int group = 0; group < group_count<Q>(value_dim); ++group)
        for (int d = group_begin<Q>(group); d < group_end<Q>(group, value_dim); ++d)
          out[d] += group_sums_[group];
    if constexpr (Q::affine.channel_offset)
      for (int d = 0; d < value_dim; ++d) out[d] = ::fmaf(weights, value_channel_offset_[d], out[d]);
  }

 private:
  template <class Q>
  static constexpr int smaller_block() {
    using K = KeySide<Q>;
    using V = ValueSide<Q>;
    if (!has_channels<K>) return V::seal_tokens;
    if (!has_channels<V>) return K::seal_tokens;
    return std::min(K::seal_tokens, V::seal_tokens);
  }

  /// A token's parameters, `stride` apart; the channels' ones with the first token.
  template <class Q, class Tile>
  void read_params(const Q& quant, const Tile& tile, int slot, bool first, float* scales, float* offsets,
                   std::int64_t stride, float* channel_scale, float* channel_offset) const {
    for (int group = 0; group < group_count<Q>(tile.dims); ++group) {
      if constexpr (Q::affine.token_scale) scales[group * stride] = quant.token_scale(tile, slot, group);
      if constexpr (Q::affine.token_offset) offsets[group * stride] = quant.token_offset(tile, slot, group);
    }
    for (int d = 0; first && channel_scale && d < tile.dims; ++d) {
      if constexpr (Q::affine.channel_scale) channel_scale[d] = quant.channel_scale(tile, slot, d);
      if constexpr (Q::affine.channel_offset) channel_offset[d] = quant.channel_offset(tile, slot, d);
    }
  }

  const PagedView<Layout, Quant>& view_;
  const int head_;
  int count_ = 0;
  TableEntry entry_{};  ///< of the newest token, as is slot_
  int slot_ = 0;
  std::int64_t positions_[chunk_tokens];
  float* key_codes_;    ///< [key_dim][chunk_tokens]
  float* value_codes_;  ///< [chunk_tokens][value_dim]
  float* key_scale_;    ///< [key_groups][chunk_tokens], as key_offset_
  float* key_offset_;
  float* value_scale_;  ///< [chunk_tokens][value_groups], as value_offset_
  float* value_offset_;
  float* key_channel_scale_;  ///< [key_dim], as key_channel_offset_
  float* key_channel_offset_;
  float* query_;                ///< [key_dim], with the channels' scales
  float* value_channel_scale_;  ///< [value_dim], as value_channel_offset_
  float* value_channel_offset_;
  float* sums_;        ///< [value_dim], without the channels' scales
  float* group_sums_;  ///< [value_groups], of weighted offsets
};

}  // namespace detail
}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET
