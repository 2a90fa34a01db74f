// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// From pages into a warp's ring: which tokens a tile has, where they lie, and the copies that bring them.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/core/tile.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/decode_args.hpp"
#include "kvfolia/cuda/decode_channels.hpp"
#include "kvfolia/cuda/decode_shape.hpp"
#include "kvfolia/layout/orders.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

/// Parameters of a tile's tokens in shared memory, as quantizers ask a tile of pages for them.
template <class Ctx>
struct StagedParams {
  Ctx& ctx;
  SharedOffset base;
  int pitch;

  template <class Param>
  KVF_INLINE KVF_HD Param param(int token, int index = 0) const {
    // Words are read whole, whatever is taken of them.
    constexpr int size = static_cast<int>(sizeof(Param));
    static_assert(size == 1 || size == 2 || size == 4);
    const int at = index * size;
    const auto word =
        ctx.template load_shared<std::uint32_t>(base + static_cast<SharedOffset>(token * pitch + (at & ~3)));
    if constexpr (size == 4)
      return __builtin_bit_cast(Param, word);
    else if constexpr (size == 2)
      return __builtin_bit_cast(Param, static_cast<std::uint16_t>(word >> 8 * (at & 3)));
    else
      return __builtin_bit_cast(Param, static_cast<std::uint8_t>(word >> 8 * (at & 3)));
  }
};

/// Bits of a tile's tokens.
struct alignas(8) TileMasks {
  std::uint32_t present;
  std::uint32_t exact;
};

/// One warp's tiles of a row's keys and values. Every load() brings the next one; what it needs from the
/// block table was asked for by the load before.
template <class Ctx, class Layout, class Quant, class Shape>
class TileLoader {
 public:
  /// Tiles of Shape::tokens table slots from `first` on, `stride` apart, up to `end`.
  KVF_INLINE KVF_HD TileLoader(Ctx& ctx, const DecodeArgs<Layout, Quant>& args, const DecodeRow& row,
                               int head, int first, int stride, int end)
      : ctx_(ctx),
        view_(args.view),
        batch_(args.batch),
        first_entry_(row.first_entry),
        head_(head),
        page_tokens_(Layout::page_tokens == dynamic ? args.view.page_tokens : Layout::page_tokens),
        in_runs_(page_tokens_ % 16 == 0),
        page_shift_(Ctx::popc(static_cast<std::uint32_t>(page_tokens_)) == 1
                        ? Ctx::popc(static_cast<std::uint32_t>(page_tokens_ - 1))
                        : -1),
        stride_(stride),
        end_(end),
        next_(first) {
    look_up();
  }

  /// Begins the copies of the next tile into a stage; behind the last one there is nothing to copy. Between
  /// this and the next load() comes keep_params().
  KVF_INLINE KVF_HD void load(SharedOffset stage) {
    if (next_ < end_) {
      stage_ = stage;
      const std::uint32_t coded = describe(stage);
      const FormatView& format = view_.formats[Shape::format];
      constexpr std::uint32_t all = 0xffffffffu >> (warp_size - Shape::tokens);
      if (in_runs_ && coded == all) {
        copy_runs<true>(format, stage, coded);
      } else if (in_runs_) {
        copy_runs<false>(format, stage, coded);
      } else {
        each_plane(format, stage, [&](const PlaneView& plane, auto side, SharedOffset to) {
          using Side = typename decltype(side)::type;
          if constexpr (units<Side>() > 1)
            copy_rows<Side>(plane, to);
          else
            copy_own<Side>(plane, to);
        });
      }
      if constexpr (Shape::has_channels) copy_blocks(format, stage);
      read_params<typename Shape::KeyParams>(format.key_params, key_params_);
      read_params<typename Shape::ValueParams>(format.value_params, value_params_);
      holds_params_ = true;
      next_ += stride_;
      look_up();
    }
    ctx_.cp_async_commit();
  }
  /// Puts those parameters of the last tile into its stage that were not copied.
  KVF_INLINE KVF_HD void keep_params() {
    if (!holds_params_) return;
    holds_params_ = false;
    if (ctx_.lane() >= Shape::tokens) return;
    store_params<typename Shape::KeyParams>(stage_ + Shape::key_params, key_params_);
    store_params<typename Shape::ValueParams>(stage_ + Shape::value_params, value_params_);
  }

 private:
  using PageTile = Tile<SlotMajor, const std::byte>;
  template <class Side>
  KVF_INLINE KVF_HD static constexpr int units() {
    return Side::row_bytes / Side::unit;
  }

  /// Leaves beside a tile what its tokens are. From then on only those of coded pages have an entry: pages of
  /// other formats are read where they lie, or by another kernel. Returns bits of the coded ones.
  KVF_INLINE KVF_HD std::uint32_t describe(SharedOffset stage) {
    bool coded = entry_ >= 0, exact = false;
    if (entry_ >= 0) {
      KVF_ASSERT(TableEntry{entry_}.format() < format_count<Quant>);
      KVF_ASSERT(TableEntry{entry_}.page().value < view_.formats[TableEntry{entry_}.format()].pages);
    }
    if constexpr (Shape::several_formats) {
      const TableEntry entry{entry_};
      exact = Shape::reads_exact && coded && entry.format() == exact_format<Quant>;
      coded = coded && entry.format() == Shape::format;
    }
    const std::uint32_t coded_bits = ctx_.ballot(coded);
    const std::uint32_t exact_bits = Shape::reads_exact ? ctx_.ballot(exact) : 0;
    if (ctx_.lane() < Shape::tokens) {
      const auto at = stage + static_cast<SharedOffset>(ctx_.lane() * 4);
      ctx_.store_shared(at + Shape::positions, coded || exact ? position_ : -1);
      if constexpr (Shape::reads_exact) {
        ctx_.store_shared(at + Shape::entries, exact ? entry_ : -1);
        ctx_.store_shared(at + Shape::slots, slot_);
      }
    }
    if (ctx_.lane() == 0)
      ctx_.store_shared(stage + Shape::masks, TileMasks{coded_bits | exact_bits, exact_bits});
    if constexpr (Shape::several_formats) entry_ = coded ? TableEntry{entry_}.page().value : -1;
    return coded_bits;
  }

  /// f(plane, its shape, where it comes to) for all that tokens have and that is copied.
  template <class F>
  KVF_INLINE KVF_HD void each_plane(const FormatView& format, SharedOffset stage, const F& f) const {
    f(format.keys, std::type_identity<typename Shape::KeyRows>(), stage + Shape::keys);
    f(format.values, std::type_identity<typename Shape::ValueRows>(), stage + Shape::values);
    if constexpr (Shape::KeyParams::copied)
      f(token_params<typename Shape::KeyParams>(format.key_params),
        std::type_identity<typename Shape::KeyParams>(), stage + Shape::key_params);
    if constexpr (Shape::ValueParams::copied)
      f(token_params<typename Shape::ValueParams>(format.value_params),
        std::type_identity<typename Shape::ValueParams>(), stage + Shape::value_params);
  }
  /// The part of a plane of parameters that has those of tokens: Centered has means in front of them.
  template <class Params>
  KVF_INLINE KVF_HD PlaneView token_params(PlaneView plane) const {
    if constexpr (requires(PageTile tile) { Params::Quant::inner_tile(tile); }) {
      const PageTile inner = Params::Quant::inner_tile(page_tile<Params>(plane.base));
      plane.base = const_cast<std::byte*>(inner.params);
      plane.slot_stride = inner.param_stride;
    }
    return plane;
  }
  template <class Params>
  KVF_INLINE KVF_HD PageTile page_tile(const std::byte* params) const {
    return {nullptr, params, Params::dims, page_tokens_, 0, 0};
  }

  /// What the channels of the tile's block have, or zeros.
  KVF_INLINE KVF_HD void copy_blocks(const FormatView& format, SharedOffset stage) {
    const int page = ctx_.shfl(entry_, 0), slot = ctx_.shfl(slot_, 0);
    copy_block<typename Shape::KeyRows>(format.key_params, page, slot, stage + Shape::key_channels);
    copy_block<typename Shape::ValueRows>(format.value_params, page, slot, stage + Shape::value_channels);
  }
  template <class Side>
  KVF_INLINE KVF_HD void copy_block(const PlaneView& plane, int page, int slot, SharedOffset to) {
    if constexpr (Side::has_channels) {
      using Q = typename Side::Quant;
      constexpr int unit = largest_unit(Side::block_bytes), stride = warp_size * unit;
      const int first = ctx_.lane() * unit;
      const std::byte* from = row_at(plane, page, 0) + slot / Q::seal_tokens * Side::block_bytes + first;
      to += StagedChannels<Ctx, Q>::begin + static_cast<SharedOffset>(first);
      KVF_UNROLL
      for (int at = 0; at < Side::block_bytes; at += stride) {
        if (at + stride <= Side::block_bytes || at + first < Side::block_bytes)
          ctx_.template cp_async<unit>(to + static_cast<SharedOffset>(at), from + at, page >= 0);
      }
    }
  }

  /// Where the next tile's tokens are; a lane each.
  KVF_INLINE KVF_HD void look_up() {
    const int at = next_ + ctx_.lane();
    entry_ = -1;
    slot_ = position_ = 0;
    if (ctx_.lane() >= Shape::tokens || at >= end_) return;
    const int i = page_shift_ >= 0 ? at >> page_shift_ : at / page_tokens_;
    slot_ = at - i * page_tokens_;
    const std::int64_t entry = first_entry_ + i;
    if (!batch_.entry_tokens || slot_ < ctx_.load(batch_.entry_tokens + entry))
      entry_ = ctx_.load(batch_.table.entries + entry);
    position_ = at;
    if (batch_.slot_pos)
      position_ = ctx_.load(batch_.slot_pos + entry * page_tokens_ + slot_);
    else if (batch_.entry_pos)
      position_ = ctx_.load(batch_.entry_pos + entry) + slot_;
  }

  /// Where a token's row begins; of page 0 if there is none. Strides are of 32 bits, products of 64.
  KVF_INLINE KVF_HD const std::byte* row_at(const PlaneView& plane, int page, int slot) const {
    return plane.base + head_ * plane.head_stride + product(page < 0 ? 0 : page, plane.page_stride) +
           product(slot, plane.slot_stride);
  }
  KVF_INLINE KVF_HD static std::uint64_t product(int count, std::int64_t stride) {
    return std::uint64_t{static_cast<std::uint32_t>(count)} * static_cast<std::uint32_t>(stride);
  }

  /// Every sixteen tokens are of one page, and all, or the first of them, are coded; zeros for the others.
  template <bool All>
  KVF_INLINE KVF_HD void copy_runs(const FormatView& format, SharedOffset stage, std::uint32_t coded) {
    KVF_UNROLLED (part, Shape::parts) {
      const int page = ctx_.shfl(entry_, 16 * part), slot = ctx_.shfl(slot_, 16 * part);
      const int count = Ctx::popc(coded >> 16 * part & 0xffffu);
      each_plane(format, stage, [&](const PlaneView& plane, auto side, SharedOffset to) {
        using Side = typename decltype(side)::type;
        if constexpr (units<Side>() > 1)
          copy_run<Side, All>(plane, page, slot, count,
                              to + static_cast<SharedOffset>(16 * part * Side::pitch));
        else if (part == 0)
          copy_own<Side>(plane, to);
      });
    }
  }
  template <class Side, bool All>
  KVF_INLINE KVF_HD void copy_run(const PlaneView& plane, int page, int slot, int count, SharedOffset to) {
    constexpr int copies = (16 * units<Side>() + warp_size - 1) / warp_size;
    if constexpr (warp_size % units<Side>() == 0) {
      // A lane copies the same part of every so many rows: one address, and steps.
      constexpr int rows = warp_size / units<Side>();
      const int first = ctx_.lane() / units<Side>(), unit = ctx_.lane() % units<Side>();
      const std::byte* from = row_at(plane, page, slot + first) + unit * Side::unit;
      to += static_cast<SharedOffset>(first * Side::pitch + unit * Side::unit);
      KVF_UNROLLED (i, copies) {
        copy<Side, All>(to + static_cast<SharedOffset>(i * rows * Side::pitch), from,
                        first + i * rows < count);
        from += product(rows, plane.slot_stride);
      }
    } else {
      KVF_UNROLLED (i, copies) {
        const int index = i * warp_size + ctx_.lane(), row = index / units<Side>(),
                  unit = index % units<Side>();
        if (16 * units<Side>() % warp_size == 0 || index < 16 * units<Side>())
          copy<Side, All>(to + static_cast<SharedOffset>(row * Side::pitch + unit * Side::unit),
                          row_at(plane, page, slot + row) + unit * Side::unit, row < count);
      }
    }
  }
  template <class Side, bool All>
  KVF_INLINE KVF_HD void copy(SharedOffset to, const std::byte* from, bool valid) {
    if constexpr (All)
      ctx_.template cp_async<Side::unit>(to, from);
    else
      ctx_.template cp_async<Side::unit>(to, from, valid);
  }
  /// All tokens of the tile, each from a page of its own.
  template <class Side>
  KVF_INLINE KVF_HD void copy_rows(const PlaneView& plane, SharedOffset to) {
    constexpr int all = Shape::tokens * units<Side>();
    KVF_NO_UNROLL
    for (int first = 0; first < all; first += warp_size) {
      const int index = first + ctx_.lane(), row = index / units<Side>(), unit = index % units<Side>();
      const int page = ctx_.shfl(entry_, row % warp_size), slot = ctx_.shfl(slot_, row % warp_size);
      if (index >= all) break;
      ctx_.template cp_async<Side::unit>(
          to + static_cast<SharedOffset>(row * Side::pitch + unit * Side::unit),
          row_at(plane, page, slot) + unit * Side::unit, page >= 0);
    }
  }
  /// Rows of one unit: every lane's own.
  template <class Side>
  KVF_INLINE KVF_HD void copy_own(const PlaneView& plane, SharedOffset to) {
    if (Shape::tokens == warp_size || ctx_.lane() < Shape::tokens)
      ctx_.template cp_async<Side::unit>(to + static_cast<SharedOffset>(ctx_.lane() * Side::pitch),
                                         row_at(plane, entry_, slot_), entry_ >= 0);
  }

  /// The lane's token's parameters that cannot be copied: on their way until keep_params().
  template <class Params>
  static constexpr int param_words = (Params::loads * Params::unit + 3) / 4;
  template <class Params, int Words>
  KVF_INLINE KVF_HD void read_params(const PlaneView& plane, std::uint32_t (&words)[Words]) {
    if constexpr (Params::loads > 0) {
      KVF_UNROLLED (i, Words) words[i] = 0;
      if (entry_ < 0) return;
      using Unit = std::conditional_t<Params::unit == 2, std::uint16_t, std::uint8_t>;
      const PlaneView params = token_params<Params>(plane);
      const auto* from = reinterpret_cast<const Unit*>(row_at(params, entry_, slot_));
      KVF_UNROLLED (i, Params::loads)
        words[i * Params::unit / 4] |= static_cast<std::uint32_t>(ctx_.load(from + i))
                                       << i * Params::unit % 4 * 8;
    }
  }
  template <class Params, int Words>
  KVF_INLINE KVF_HD void store_params(SharedOffset to, const std::uint32_t (&words)[Words]) {
    if constexpr (Params::loads > 0) {
      KVF_UNROLLED (i, Words)
        ctx_.store_shared(to + static_cast<SharedOffset>(ctx_.lane() * Params::pitch + i * 4), words[i]);
    }
  }

  Ctx& ctx_;
  const PagedView<Layout, Quant>& view_;
  const BatchView& batch_;
  const std::int64_t first_entry_;
  const int head_;
  const int page_tokens_;
  const bool in_runs_;    ///< sixteen tokens of a tile are of one page
  const int page_shift_;  ///< of a power of two; else -1
  const int stride_;
  const int end_;

  int next_;
  // Of the next tile.
  std::int32_t entry_ = -1;
  std::int32_t slot_ = 0;
  std::int32_t position_ = 0;
  // Of the last one.
  std::uint32_t key_params_[Shape::KeyParams::loads > 0 ? param_words<typename Shape::KeyParams> : 1];
  std::uint32_t value_params_[Shape::ValueParams::loads > 0 ? param_words<typename Shape::ValueParams> : 1];
  SharedOffset stage_ = 0;
  bool holds_params_ = false;
};

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
