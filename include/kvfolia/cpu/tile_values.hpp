// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Sums of a tile's values, weighted for all rows of a task.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/cpu/amx.hpp"
#include "kvfolia/cpu/fast_scratch.hpp"
#include "kvfolia/cpu/params.hpp"
#include "kvfolia/cpu/prefetch.hpp"
#include "kvfolia/cpu/row_blocks.hpp"
#include "kvfolia/cpu/simd.hpp"
#include "kvfolia/cpu/target.hpp"
#include "kvfolia/cpu/tile_walk.hpp"
#include "kvfolia/cpu/unpack.hpp"
#include "kvfolia/cpu/value_kernels.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

/// The tile of a page that values are read from.
template <class Layout, class Quant>
auto value_tile(const PagedView<Layout, Quant>& view, TableEntry entry, int head) {
  if constexpr (Layout::shares_key_value)
    return view.key_tile(entry, head);
  else
    return view.value_tile(entry, head);
}

template <class Layout, class Quant>
class TileValues {
 public:
  using Order = typename Layout::ValueOrder;
  using Scratch = FastScratch<Layout, Quant>;
  static constexpr int dims = Layout::value_dim;

  /// `streams`: values are read in place where a kernel can; decoded for all rows together otherwise.
  TileValues(const PagedView<Layout, Quant>& view, int head, bool streams, const Scratch& at, float* scratch)
      : view_(view),
        head_(head),
        padded_(at.rows()),
        streams_(streams),
        probabilities_(scratch + at.scores()),
        weights_(scratch + at.weights()),
        scales_(scratch + at.value_scales()),
        offsets_(scratch + at.value_offsets()),
        channels_(scratch + at.channels()),
        panel_(scratch + at.value_panel()),
        weight_pairs_(scratch + at.weight_pairs(), padded_ * pair_tokens),
        value_pairs_(scratch + at.value_pairs(), pair_tokens * Scratch::value_stride) {}

  /// Has decoded values multiplied in matrix registers. The caller has an AmxScope.
  void use_amx() { amx_ = has_amx; }

  /// sums[row * stride + d] += the weighted values; the scores have become probabilities, 0 for columns that
  /// a row does not see and for rows that complete a block. May multiply them by scales.
  void add(const TileRuns& runs, const RowRange& rows, float* sums, std::int64_t stride, Prefetch prefetch) {
    rows_ = rows;
    prefetch_ = prefetch;
    prefetch_.spread(std::max(1, runs.columns * dims / (4 * lanes)));  // four vectors of a token a step
    runs.each_segment([&](const Segment& segment) {
      visit_format(view_, segment.entry(), [&](const auto& whole) {
        const auto& quant = value_quant<Layout>(whole);
        using Q = std::remove_cvref_t<decltype(quant)>;
        if (streams_ && streams_values<Q, Order, dims>)
          stream(quant, segment, sums, stride);
        else
          unpack(quant, segment, sums, stride);
      });
    });
  }

 private:
  template <class Q>
  void stream(const Q& quant, const Segment& segment, float* sums, std::int64_t stride) {
    if constexpr (streams_values<Q, Order, dims>) {
      constexpr int groups = group_count<Q>(dims);
      // Codes from 0 to 15 and offsets to match would be sums that nearly cancel each other.
      constexpr CodeKind kind =
          Q::affine.token_offset && code_kind<Q> == CodeKind::uint4 ? CodeKind::mid4 : code_kind<Q>;
      const std::byte* tokens[tile_positions];
      const int first = segment.column(), count = segment.columns();
      for (const Run& run : segment) {
        const auto tile = value_tile(view_, run.entry, head_);
        for (int t = 0; t < run.count; ++t)
          tokens[run.column - first + t] = tile.codes + (run.slot + t) * tile.code_stride;
        if constexpr (Q::affine.token_scale || Q::affine.token_offset)
          read_token_params(quant, tile, run.slot, run.count, scales_ + run.column, offsets_ + run.column,
                            score_stride);
      }
      Weights weights{probabilities_ + first, 0};
      if constexpr (kind == CodeKind::mid4) centre(groups, first, count);
      if constexpr (Q::affine.token_offset) add_offsets<groups>(first, count, sums, stride, Q::group_dims);
      if constexpr (Q::affine.token_scale) {
        float* scaled = groups == 1 ? probabilities_ : weights_;
        for (int group = 0; group < groups; ++group)
          for (std::int64_t row = rows_.first; row < rows_.end; ++row) {
            float* to = scaled + (group * padded_ + row) * score_stride;
            const float* from = probabilities_ + row * score_stride;
            for (int c = first; c < first + count; c += lanes)
              scale(from + c, scales_ + group * score_stride + c, std::min(lanes, first + count - c), to + c);
          }
        weights = {scaled + first, padded_ * score_stride};
      }
      add_tokens<kind, (groups > 1)>(TokenAddresses{tokens}, count, dims, Q::group_dims, weights, rows_, sums,
                                     stride, prefetch_);
    }
  }

  /// Moves offsets to the middle of the codes.
  void centre(int groups, int first, int count) {
    for (int group = 0; group < groups; ++group)
      for (int c = first; c < first + count; ++c) {
        const std::int64_t at = group * score_stride + c;
        offsets_[at] = __builtin_fmaf(7.5f, scales_[at], offsets_[at]);
      }
  }

  /// The other columns are another format's: they keep what they have.
  static KVF_INLINE void scale(const float* from, const float* by, int count, float* to) {
    if (count == lanes)
      store(hn::Mul(load(from), load(by)), to);
    else
      for (int i = 0; i < count; ++i) to[i] = from[i] * by[i];
  }

  /// Every dim of a group gets the weighted sum of the group's offsets.
  template <int Groups>
  void add_offsets(int first, int count, float* sums, std::int64_t stride, int group_dims) {
    for (std::int64_t row = rows_.first; row < rows_.first + rows_.count; ++row)
      for (int group = 0; group < Groups; ++group) {
        const float* probability = probabilities_ + row * score_stride + first;
        const float* offset = offsets_ + group * score_stride + first;
        Floats partial = zeros();
        int c = 0;
        for (; c + lanes <= count; c += lanes)
          partial = hn::MulAdd(load(probability + c), load(offset + c), partial);
        float sum = sum_of(partial);
        for (; c < count; ++c) sum = __builtin_fmaf(probability[c], offset[c], sum);
        const int end = Groups == 1 ? dims : std::min((group + 1) * group_dims, dims);
        for (int d = group * group_dims; d < end; d += lanes) {
          float* to = sums + row * stride + d;
          store(hn::Add(load(to), broadcast(sum)), to);
        }
      }
  }

  template <class Q>
  void unpack(const Q& quant, const Segment& segment, float* sums, std::int64_t stride) {
    const int first = segment.column(), count = segment.columns();
    float* panel = panel_;
    for (const Run& run : segment) {
      const auto tile = value_tile(view_, run.entry, head_);
      each_block<Q>(run.slot, run.count, [&](int slot, int n) {
        unpack_rows<Order, dims>(quant, tile, slot, n, panel, Scratch::panel_stride, channels_);
        panel += n * Scratch::panel_stride;
      });
    }
    if (multiply_in_amx<Q>(first, count, sums, stride)) return;
    add_tokens<CodeKind::fp32, false>(TokenRows{reinterpret_cast<const std::byte*>(panel_),
                                                Scratch::panel_stride * std::int64_t{sizeof(float)}},
                                      count, static_cast<int>(Scratch::value_stride), 0,
                                      {probabilities_ + first, 0}, rows_, sums, stride, prefetch_);
  }

  /// Weighted sums of the panel in matrix registers; false where that would not do.
  template <class Q>
  bool multiply_in_amx([[maybe_unused]] int first, [[maybe_unused]] int count, [[maybe_unused]] float* sums,
                       [[maybe_unused]] std::int64_t stride) {
#if KVF_CPU_AMX
    if constexpr (suits_amx<Q>) {
      if (!amx_ || rows_.count == 1) return false;
      constexpr int value_stride = static_cast<int>(Scratch::value_stride);
      const int padded = round_up(count, 2 * amx_tile);
      if (!split_rows(panel_, Scratch::panel_stride, count, dims, padded, value_stride, value_pairs_))
        return false;
      alignas(64) float weights[tile_positions] = {};
      for (std::int64_t row = 0; row < padded_; ++row) {
        std::copy_n(probabilities_ + row * score_stride + first, count, weights);
        split_row(weights, padded, weight_pairs_.high + row * pair_tokens,
                  weight_pairs_.low + row * pair_tokens);
      }
      amx_multiply(weight_pairs_, padded_, pair_tokens, value_pairs_, value_stride, value_stride,
                   padded / (2 * amx_tile), true, sums, stride);
      return true;
    }
#endif
    return false;
  }

  static constexpr int pair_tokens = tile_positions / 2;

  const PagedView<Layout, Quant>& view_;
  const int head_;
  const std::int64_t padded_;  ///< all rows, and what completes the last block
  const bool streams_;
  RowRange rows_{};  ///< to be computed now
  Prefetch prefetch_{};
  float* probabilities_;
  float* weights_;  ///< [group][row][column], where groups have scales
  float* scales_;   ///< [group][column], as offsets_
  float* offsets_;
  float* channels_;
  float* panel_;
  Pairs weight_pairs_;  ///< [row][pair_tokens]
  Pairs value_pairs_;   ///< [pair_tokens][value_stride]
  bool amx_ = false;
};

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
