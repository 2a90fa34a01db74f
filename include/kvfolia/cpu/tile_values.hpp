// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Sums of a tile's values, weighted for all rows of a task.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/cpu/amx.hpp"
#include "kvfolia/cpu/byte_weights.hpp"
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
        high_(reinterpret_cast<std::int32_t*>(scratch + at.weight_bytes())),
        low_(high_ + padded_ * Scratch::value_groups * Scratch::weight_words),
        sums_(reinterpret_cast<ByteSums*>(scratch + at.weight_sums())),
        steps_(scratch + at.weight_steps()),
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
    // A step reads four vectors of a token, or two of words of four slots.
    constexpr int at_once = (FormatFacts<Layout, Quant>::rounds_weights ? 8 : 4) * lanes;
    prefetch_.spread(std::max(1, runs.columns * dims / at_once));
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
      constexpr bool in_words = rounds_weights<Q, Order, dims>;
      // Codes from 0 to 15 and offsets to match would be sums that nearly cancel each other.
      constexpr CodeKind kind =
          Q::affine.token_offset && code_kind<Q> == CodeKind::uint4 ? CodeKind::mid4 : code_kind<Q>;
      const int first = segment.column(), count = segment.columns();
      if constexpr (Q::affine.token_scale || Q::affine.token_offset)
        for (const Run& run : segment)
          read_token_params(quant, value_tile(view_, run.entry, head_), run.slot, run.count,
                            scales_ + run.column, offsets_ + run.column, score_stride);
      // By row, then by group.
      float* scaled = groups == 1 ? probabilities_ : weights_;
      for (std::int64_t row = rows_.first; row < rows_.end; ++row)
        for (int group = 0; group < groups; ++group) {
          const std::int64_t at = group * score_stride + first;
          float* to = scaled + (group * padded_ + row) * score_stride + first;
          if constexpr (Q::affine.token_scale || Q::affine.token_offset) {
            const float sum = fold<Q::affine, kind>(probabilities_ + row * score_stride + first, scales_ + at,
                                                    offsets_ + at, count, to);
            if constexpr (Q::affine.token_offset) add_to_group<Q>(group, sum, sums + row * stride);
          }
          if constexpr (in_words) round_weights<groups>(segment, row, group, to);
        }
      if constexpr (in_words) {
        add_words<groups>(segment, Q::group_dims, sums, stride);
      } else {
        const Weights weights = Q::affine.token_scale ? Weights{scaled + first, padded_ * score_stride}
                                                      : Weights{probabilities_ + first, 0};
        const std::byte* tokens[tile_positions];
        for (const Run& run : segment) {
          const auto tile = value_tile(view_, run.entry, head_);
          for (int t = 0; t < run.count; ++t)
            tokens[run.column - first + t] = tile.codes + (run.slot + t) * tile.code_stride;
        }
        add_tokens<kind, (groups > 1)>(TokenAddresses{tokens}, count, dims, Q::group_dims, weights, rows_,
                                       sums, stride, prefetch_);
      }
    }
  }

  template <class Q>
  static void add_to_group(int group, float x, float* sums) {
    for (int d = group_begin<Q>(group); d < group_end<Q>(group, dims); d += lanes)
      store(hn::Add(load(sums + d), broadcast(x)), sums + d);
  }

  /// Words that a run's slots are in.
  static int word_count(const Run& run) { return (run.slot % 4 + run.count + 3) / 4; }

  /// A row's weights of a group as bytes, in the order of the words; 0 for slots that no column is for.
  template <int Groups>
  void round_weights(const Segment& segment, std::int64_t row, int group, const float* weights) {
    const int count = segment.columns();
    const std::int64_t at = row * Groups + group;
    std::int8_t high[tile_positions], low[tile_positions];
    steps_[at] = byte_step(weights, count);
    sums_[at] = round_to_bytes(weights, count, steps_[at], high, low);
    arrange(segment, high, high_ + at * Scratch::weight_words);
    arrange(segment, low, low_ + at * Scratch::weight_words);
  }
  static void arrange(const Segment& segment, const std::int8_t* columns, std::int32_t* words) {
    for (const Run& run : segment) {
      const int count = word_count(run);
      words[0] = words[count - 1] = 0;
      std::memcpy(reinterpret_cast<std::byte*>(words) + run.slot % 4, columns,
                  static_cast<std::size_t>(run.count));
      columns += run.count;
      words += count;
    }
  }

  template <int Groups>
  void add_words(const Segment& segment, int group_dims, float* sums, std::int64_t stride) {
    const std::byte* words[tile_positions];
    int count = 0;
    for (const Run& run : segment) {
      const auto tile = value_tile(view_, run.entry, head_);
      for (int i = 0; i < word_count(run); ++i)
        words[count++] = tile.codes + std::int64_t{run.slot / 4 + i} * tile.dims * 4;
    }
    const ByteWeights weights{.high = high_,
                              .low = low_,
                              .sums = sums_,
                              .steps = steps_,
                              .groups = Groups,
                              .group_dims = Groups == 1 ? dims : group_dims,
                              .stride = Scratch::weight_words};
    each_row_block(rows_, [&](auto block, std::int64_t first) {
      constexpr int all = decltype(block)::value, rows = lanes < 16 && all == 8 ? 4 : all;
      for (std::int64_t row = first; row < first + all; row += rows)
        detail::add_words<rows>(words, count, dims, weights, row, sums + row * stride, stride, prefetch_);
    });
  }

  /// Multiplies a row's weights by the tokens' scales; gives the weighted sum of their offsets, from the
  /// middle of the codes. Other columns are another format's: they keep what they have.
  template <Affine Has, CodeKind Kind>
  static float fold(const float* probability, const float* scales, const float* offsets, int count,
                    float* scaled) {
    Floats partial = zeros();
    int c = 0;
    for (; c + lanes <= count; c += lanes) {
      const Floats weight = load(probability + c);
      if constexpr (Has.token_offset) {
        Floats offset = load(offsets + c);
        if constexpr (Kind == CodeKind::mid4) offset = hn::MulAdd(broadcast(7.5f), load(scales + c), offset);
        partial = hn::MulAdd(weight, offset, partial);
      }
      if constexpr (Has.token_scale) store(hn::Mul(weight, load(scales + c)), scaled + c);
    }
    float sum = sum_of(partial);
    for (; c < count; ++c) {
      const float weight = probability[c];
      if constexpr (Has.token_offset) {
        float offset = offsets[c];
        if constexpr (Kind == CodeKind::mid4) offset = __builtin_fmaf(7.5f, scales[c], offset);
        sum = __builtin_fmaf(weight, offset, sum);
      }
      if constexpr (Has.token_scale) scaled[c] = weight * scales[c];
    }
    return sum;
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
  float* weights_;      ///< [group][row][column], where groups have scales
  std::int32_t* high_;  ///< [row][group][weight_words], as low_
  std::int32_t* low_;
  ByteSums* sums_;  ///< [row][group], as steps_
  float* steps_;
  float* scales_;  ///< [group][column], as offsets_
  float* offsets_;
  float* channels_;
  float* panel_;
  Pairs weight_pairs_;  ///< [row][pair_tokens]
  Pairs value_pairs_;   ///< [pair_tokens][value_stride]
  bool amx_ = false;
};

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
