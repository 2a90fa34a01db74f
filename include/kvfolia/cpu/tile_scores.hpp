// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Scores of all rows of a task with the keys of a tile: which kernel reads which format, and how scales
// and offsets are folded around it.

#include <math.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/cpu/amx.hpp"
#include "kvfolia/cpu/byte_weights.hpp"
#include "kvfolia/cpu/fast_scratch.hpp"
#include "kvfolia/cpu/key_kernels.hpp"
#include "kvfolia/cpu/params.hpp"
#include "kvfolia/cpu/prefetch.hpp"
#include "kvfolia/cpu/row_blocks.hpp"
#include "kvfolia/cpu/simd.hpp"
#include "kvfolia/cpu/target.hpp"
#include "kvfolia/cpu/tile_walk.hpp"
#include "kvfolia/cpu/unpack.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

template <class Layout, class Quant>
class TileScores {
 public:
  using Order = typename Layout::KeyOrder;
  using Scratch = FastScratch<Layout, Quant>;
  static constexpr int dims = Layout::key_dim;
  /// Products of decoded keys that are added one to the other: long latent ones would lose too much.
  static constexpr int longest_sum = 128;

  /// `streams`: keys are read in place where a kernel can; decoded for all rows together otherwise.
  TileScores(const PagedView<Layout, Quant>& view, int head, bool streams, const Scratch& at, float* scratch)
      : view_(view),
        head_(head),
        padded_(at.rows()),
        streams_(streams),
        queries_(scratch + at.queries()),
        folded_(scratch + at.folded()),
        high_(reinterpret_cast<std::int32_t*>(scratch + at.query_bytes())),
        low_(high_ + padded_ * (dims / 4)),
        steps_(scratch + at.steps()),
        bases_(scratch + at.bases()),
        group_sums_(scratch + at.group_sums()),
        high_sums_(reinterpret_cast<std::int32_t*>(scratch + at.byte_sums())),
        low_sums_(high_sums_ + padded_ * Scratch::key_groups),
        scores_(scratch + at.scores()),
        scales_(scratch + at.key_scales()),
        offsets_(scratch + at.key_offsets()),
        channels_(scratch + at.channels()),
        unpacked_(scratch + at.unpacked()),
        panel_(scratch + at.key_panel()),
        query_pairs_(scratch + at.query_pairs(), padded_ * Scratch::pair_stride),
        key_pairs_(scratch + at.key_pairs(), Scratch::pair_stride * panel_tokens) {}

  /// [rows][key_dim], as pages hold keys and times the softmax's scale: to be filled in before compute().
  float* queries() const { return queries_; }

  /// Has decoded keys multiplied in matrix registers, unless a query is not finite. The caller has an
  /// AmxScope. For all rows of queries().
  void use_amx() {
#if KVF_CPU_AMX
    alignas(64) float padded[2 * Scratch::pair_stride] = {};
    amx_ = true;
    for (std::int64_t row = 0; row < padded_; ++row) {
      std::copy_n(queries_ + row * dims, dims, padded);
      const std::int64_t at = row * Scratch::pair_stride;
      amx_ =
          amx_ && split_row(padded, 2 * Scratch::pair_stride, query_pairs_.high + at, query_pairs_.low + at);
    }
#endif
  }

  /// scores[row * score_stride + column] for all columns of some rows; `prefetch` is walked through
  /// meanwhile.
  void compute(const TileRuns& runs, const RowRange& rows, Prefetch prefetch) {
    rows_ = rows;
    prefetch_ = prefetch;
    // A step reads so many dims of two vectors of tokens.
    constexpr int dims_at_once = Order::strided ? 2 : Order::dim_multiple;
    prefetch_.spread(std::max(1, runs.columns * dims / (2 * lanes * dims_at_once)));
    runs.each_segment([&](const Segment& segment) {
      const TableEntry entry = segment.entry();
      visit_format(view_, entry, [&](const auto& quant) {
        using Q = std::remove_cvref_t<decltype(key_side(quant))>;
        if (streams_ && streams_keys<Q, Order, dims>) {
          if constexpr (!Q::affine.channel_scale)  // which each block has of its own
            if (prepared_ != entry.format()) prepare<Q>(queries_);
          prepared_ = entry.format();
          stream(key_side(quant), segment);
        } else {
          unpack(key_side(quant), segment);
        }
      });
    });
  }

 private:
  // ---- queries, made ready for a format or a block ----

  template <class Q>
  void prepare(const float* queries) {
    constexpr int groups = group_count<Q>(dims);
    if constexpr (Q::affine.token_offset)
      for (std::int64_t row = 0; row < padded_; ++row)
        for (int group = 0; group < groups; ++group) {
          float sum = 0.0f;
          for (int d = group_begin<Q>(group); d < group_end<Q>(group, dims); ++d)
            sum += queries_[row * dims + d];
          group_sums_[row * groups + group] = sum;
        }
    if constexpr (rounds<Q, Order>)
      for (std::int64_t row = 0; row < padded_; ++row) round_query<Q>(queries + row * dims, row);
    if constexpr (!has_channels<Q>) std::fill_n(bases_, padded_, 0.0f);
  }

  template <class Q>
  void round_query(const float* query, std::int64_t row) {
    constexpr int groups = group_count<Q>(dims);
    // A query that is not finite gives scores that are no numbers.
    const float step = steps_[row] = byte_step(query, dims);
    std::int8_t high[dims], low[dims];
    for (int group = 0; group < groups; ++group) {
      const int begin = group_begin<Q>(group), count = group_end<Q>(group, dims) - begin;
      const ByteSums sums = round_to_bytes(query + begin, count, step, high + begin, low + begin);
      high_sums_[row * groups + group] = sums.high;
      low_sums_[row * groups + group] = sums.low;
    }
    auto* to_high = reinterpret_cast<std::int8_t*>(high_ + row * (dims / 4));
    auto* to_low = reinterpret_cast<std::int8_t*>(low_ + row * (dims / 4));
    if constexpr (Order::dim_multiple == 8) {
      even_bytes_first(high, dims, to_high);
      even_bytes_first(low, dims, to_low);
    } else {
      std::copy_n(high, dims, to_high);
      std::copy_n(low, dims, to_low);
    }
  }

  /// Folds a block's channel parameters into the queries; gives those that meet the codes.
  template <class Q, class Tile>
  const float* fold(const Q& quant, const Tile& tile, int slot) {
    const float* queries = queries_;
    if constexpr (has_channels<Q>) {
      read_channel_params(quant, tile, slot, channels_, channels_ + dims);
      if constexpr (Q::affine.channel_offset)
        for (std::int64_t row = 0; row < padded_; ++row) {
          Floats sum = zeros();
          int d = 0;
          for (; d + lanes <= dims; d += lanes)
            sum = hn::MulAdd(load(queries_ + row * dims + d), load(channels_ + dims + d), sum);
          float base = sum_of(sum);
          for (; d < dims; ++d) base = fmaf(queries_[row * dims + d], channels_[dims + d], base);
          bases_[row] = base;
        }
      if constexpr (Q::affine.channel_scale) {
        for (std::int64_t row = 0; row < padded_; ++row)
          for (int d = 0; d < dims; ++d) folded_[row * dims + d] = queries_[row * dims + d] * channels_[d];
        queries = folded_;
        prepare<Q>(queries);
      }
    }
    return queries;
  }

  // ---- keys where they lie ----

  template <class Q>
  KeyRows rows(const float* queries) const {
    return {.dims = dims,
            .group_dims = Q::group_dims == 0 ? dims : Q::group_dims,
            .queries = queries,
            .bases = bases_,
            .sums = group_sums_,
            .high = high_,
            .low = low_,
            .high_sums = high_sums_,
            .low_sums = low_sums_,
            .steps = steps_,
            .scores = scores_};
  }

  template <class Q>
  void stream(const Q& quant, const Segment& segment) {
    if constexpr (streams_slots<Q, Order>) {
      for (const Run& run : segment) {
        const auto tile = view_.key_tile(run.entry, head_);
        each_block<Q>(run.slot, run.count, [&](int slot, int count) {
          const float* queries = fold(quant, tile, slot);
          score_run(quant, tile, slot, count, rows<Q>(queries), run.column + slot - run.slot);
        });
      }
    } else if constexpr (reads_tokens<Q, Order, dims>) {
      const std::byte* tokens[tile_positions];
      const auto point = [&](const auto& tile, int slot, int count, int column) {
        for (int t = 0; t < count; ++t) tokens[column + t] = tile.codes + (slot + t) * tile.code_stride;
        if constexpr (Q::affine.token_scale || Q::affine.token_offset)
          read_token_params(quant, tile, slot, count, scales_ + column, offsets_ + column, score_stride);
      };
      const auto score = [&](int column, int count, const float* queries) {
        score_tokens<code_kind<Q>, Q::affine, (group_count<Q>(dims) > 1)>(
            tokens, rows<Q>(queries), rows_, {scales_, offsets_}, column, count, prefetch_);
      };
      for (const Run& run : segment) {
        const auto tile = view_.key_tile(run.entry, head_);
        each_block<Q>(run.slot, run.count, [&](int slot, int count) {
          const int column = run.column + slot - run.slot;
          point(tile, slot, count, column);
          if constexpr (has_channels<Q>) score(column, count, fold(quant, tile, slot));
        });
      }
      if constexpr (!has_channels<Q>) score(segment.column(), segment.columns(), queries_);
    }
  }

  /// Slots of one block of a page whose order has neighbouring slots side by side.
  template <class Q, class Tile>
  void score_run(const Q& quant, const Tile& tile, int slot, int count, const KeyRows& rows, int column) {
    constexpr CodeKind kind = code_kind<Q>;
    constexpr int x = Order::dim_multiple, slot_bytes = x * kind_bits(kind) / 8;
    const std::int64_t row_bytes = std::int64_t{tile.page_tokens} * slot_bytes;
    const KeyColumns columns{scales_, offsets_};
    if constexpr (Q::affine.token_scale || Q::affine.token_offset)
      read_token_params(quant, tile, slot, count, scales_ + column, offsets_ + column, score_stride);
    for (const int until = column + count; column < until;) {
      const int left = until - column, room = tile.page_tokens - slot;
      const std::byte* codes = tile.codes + slot * slot_bytes;
      const int vectors = left > lanes && room >= 2 * lanes ? 2 : 1;
      if (vectors == 2) {
        score_slots<kind, x, Q::affine, 2>(codes, row_bytes, rows, rows_, columns, column, prefetch_);
      } else if (room >= lanes) {
        score_slots<kind, x, Q::affine, 1>(codes, row_bytes, rows, rows_, columns, column, prefetch_);
      } else {
        // A vector would reach behind the page: it gets slots that are not there.
        alignas(64) std::byte copy[std::size_t{dims / x * lanes * slot_bytes}] = {};
        for (int w = 0; w < dims / x; ++w)
          std::copy_n(codes + w * row_bytes, std::min(left, room) * slot_bytes,
                      copy + w * lanes * slot_bytes);
        score_slots<kind, x, Q::affine, 1>(copy, lanes * slot_bytes, rows, rows_, columns, column, prefetch_);
      }
      column += vectors * lanes;
      slot += vectors * lanes;
    }
  }

  // ---- keys decoded once for all rows ----

  template <class Q>
  void unpack(const Q& quant, const Segment& segment) {
    constexpr std::int64_t stride = round_up(dims, 16);
    constexpr std::int64_t row_bytes = panel_tokens * sizeof(float);
    std::fill_n(bases_, padded_, 0.0f);
    prepared_ = -1;
    KeyRows rows = this->template rows<Identity<float>>(queries_);
    rows.group_dims = std::min(dims, longest_sum);
    int filled = 0, column = segment.column();
    const auto flush = [&] {
      if constexpr (!streams_slots<Q, Order>) transpose(unpacked_, stride, filled, dims, panel_);
      if (!multiply_in_amx<Q>(filled, column)) {
        const auto* codes = reinterpret_cast<const std::byte*>(panel_);
        for (int t = 0; t < filled; t += 2 * lanes)
          score_slots<CodeKind::fp32, 1, Affine{}, 2>(codes + t * std::int64_t{sizeof(float)}, row_bytes,
                                                      rows, rows_, {}, column + t, prefetch_);
      }
      column += filled;
      filled = 0;
    };
    for (const Run& run : segment) {
      const auto tile = view_.key_tile(run.entry, head_);
      each_block<Q>(run.slot, run.count, [&](int slot, int count) {
        for (int done = 0; done < count;) {
          const int part = std::min(count - done, panel_tokens - filled);
          if constexpr (streams_slots<Q, Order>)
            unpack_slots(quant, tile, slot + done, part, filled);
          else
            unpack_rows<Order, dims>(quant, tile, slot + done, part, unpacked_ + filled * stride, stride,
                                     channels_);
          done += part;
          filled += part;
          if (filled == panel_tokens) flush();
        }
      });
    }
    if (filled > 0) flush();
  }

  /// Decodes slots of one block, side by side in their page, into columns of the panel.
  template <class Q, class Tile>
  void unpack_slots(const Q& quant, const Tile& tile, int slot, int count, int column) {
    constexpr Affine has = Q::affine;
    constexpr CodeKind kind = code_kind<Q>;
    constexpr int x = Order::dim_multiple, slot_bytes = x * kind_bits(kind) / 8;
    if constexpr (has.token_scale || has.token_offset)
      read_token_params(quant, tile, slot, count, scales_, offsets_, score_stride);
    if constexpr (has_channels<Q>) read_channel_params(quant, tile, slot, channels_, channels_ + dims);
    int t = 0;
    for (; t + lanes <= count; t += lanes)
      for (int group = 0; group < group_count<Q>(dims); ++group) {
        const int at = group * score_stride + t;
        const Floats scale = has.token_scale ? load(scales_ + at) : broadcast(1.0f);
        const Floats offset = has.token_offset ? load(offsets_ + at) : zeros();
        for (int d = group_begin<Q>(group); d < group_end<Q>(group, dims); d += x) {
          Floats codes[x];
          load_slots<kind>(tile.codes + (std::int64_t{d / x} * tile.page_tokens + slot + t) * slot_bytes,
                           codes);
          unroll<x>([&](auto i) KVF_INLINE_LAMBDA {
            Floats value = codes[i];
            if constexpr (has.channel_scale) value = hn::Mul(value, broadcast(channels_[d + i]));
            if constexpr (has.token_scale || has.token_offset) value = hn::MulAdd(value, scale, offset);
            if constexpr (has.channel_offset) value = hn::Add(value, broadcast(channels_[dims + d + i]));
            store(value, panel_ + (d + i) * panel_tokens + column + t);
          });
        }
      }
    for (; t < count; ++t) {
      quant.decode(tile, slot + t, unpacked_);
      for (int d = 0; d < dims; ++d) panel_[d * panel_tokens + column + t] = unpacked_[d];
    }
  }

  /// Scores of the panel in matrix registers; false where that would not do.
  template <class Q>
  bool multiply_in_amx([[maybe_unused]] int filled, [[maybe_unused]] int column) {
#if KVF_CPU_AMX
    if constexpr (suits_amx<Q>) {
      if (!amx_ || rows_.count == 1) return false;
      if (!split_rows(panel_, panel_tokens, dims, filled, 2 * Scratch::pair_stride, panel_tokens, key_pairs_))
        return false;
      amx_multiply(query_pairs_, padded_, Scratch::pair_stride, key_pairs_, panel_tokens, panel_tokens,
                   Scratch::pair_stride / amx_tile, false, scores_ + column, score_stride);
      return true;
    }
#endif
    return false;
  }

  const PagedView<Layout, Quant>& view_;
  const int head_;
  const std::int64_t padded_;  ///< all rows, and what completes the last block
  const bool streams_;
  RowRange rows_{};  ///< to be computed now
  Prefetch prefetch_{};
  int prepared_ = -1;  ///< the format that the queries were last prepared for
  float* queries_;
  float* folded_;
  std::int32_t* high_;
  std::int32_t* low_;
  float* steps_;
  float* bases_;       ///< [row], what a block's channel offsets add to every score
  float* group_sums_;  ///< [row][group] of the queries
  std::int32_t* high_sums_;
  std::int32_t* low_sums_;
  float* scores_;
  float* scales_;  ///< [group][column], as offsets_
  float* offsets_;
  float* channels_;
  float* unpacked_;
  float* panel_;
  Pairs query_pairs_;  ///< [row][pair_stride]
  Pairs key_pairs_;    ///< [pair_stride][panel_tokens]
  bool amx_ = false;
};

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
