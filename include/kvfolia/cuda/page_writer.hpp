// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// How a block brings a tile of tokens, from tensors or from other pages, by way of shared memory into pages.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kvfolia/core/attend_args.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/fp16.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/core/rounding.hpp"
#include "kvfolia/core/tensor.hpp"
#include "kvfolia/cuda/append_args.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/encode.hpp"
#include "kvfolia/cuda/page_values.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

/// Two neighbours.
template <class T>
struct alignas(2 * sizeof(T)) PairOf {
  T first;
  T second;
};

/// One block's tile.
template <class Ctx, class Layout, class Quant, class Share>
class PageWriter {
 public:
  using Part = typename Share::Part;
  using Shape = typename Part::Shape;
  using Q = typename Part::Quant;
  static constexpr int rows = Shape::rows;
  static constexpr int dims = Part::dims;

  /// `second`: of a share that is either side's.
  KVF_INLINE KVF_HD PageWriter(Ctx& ctx, const WriteArgs<Layout, Quant>& args, bool second)
      : ctx_(ctx),
        args_(args),
        is_key_(Share::side == SideKind::either ? !second : Share::side == SideKind::keys),
        quant_(Share::quant(args.view.quant, is_key_)),
        head_(ctx.block_y()),
        encoder_(ctx) {}

  /// Where a row goes; entries below 0 are nowhere. To be called once for each row, in front of a barrier.
  KVF_INLINE KVF_HD void set_place(int row, Place place) const {
    std::uint64_t codes = 0, params = 0;
    if (place.entry >= 0) {
      KVF_ASSERT(TableEntry{place.entry}.page().value < format().pages);
      KVF_ASSERT(0 <= place.slot && place.slot < args_.view.page_tokens);
      const PlaneView& plane = is_key_ ? format().keys : format().values;
      codes = address(plane.tile(TableEntry{place.entry}.page(), head_) + place.slot * plane.slot_stride +
                      Part::first_code);
      if constexpr (Shape::param_bytes > 0)
        params = address(tile_params(place) + mean_bytes() + place.slot * param_stride() + Part::first_param);
    }
    ctx_.store_shared(target(row, 0), codes);
    if constexpr (Shape::param_bytes > 0) ctx_.store_shared(target(row, 1), params);
  }
  KVF_INLINE KVF_HD bool has(int row) const {
    return ctx_.template load_shared<std::uint64_t>(target(row, 0)) != 0;
  }

  /// New tokens: the rows from `begin` on that have a place are those from `token` on.
  KVF_INLINE KVF_HD void load_tokens(std::int64_t token, int begin) const {
    const ConstTensor& from = is_key_ ? args_.args.keys : args_.args.values;
    const auto load = [&](auto width, const auto& widen) {
      using Pair = PairOf<decltype(width)>;
      each_thread_ahead<rows*(dims / 2)>(ctx_, [&](int i) {
        const int row = i / (dims / 2), pair = i % (dims / 2);
        if (row < begin || !has(row)) return;
        const std::int64_t at = from.offset(token + row - begin, head_) + Part::first_dim + 2 * pair;
        const Pair both =
            ctx_.load(reinterpret_cast<const Pair*>(static_cast<const decltype(width)*>(from.data) + at));
        const float x = widen(both.first), y = widen(both.second);
        KVF_ASSERT(kvfolia::detail::is_finite(x) && kvfolia::detail::is_finite(y));
        encoder_.set_value(row, 2 * pair, x);
        encoder_.set_value(row, 2 * pair + 1, y);
      });
    };
    if (from.type == DType::fp32)
      load(float{}, [](float x) { return x; });
    else
      load(std::uint16_t{}, [&](std::uint16_t bits) {
        return from.type == DType::fp16 ? static_cast<float>(fp16::from_bits(bits))
                                        : static_cast<float>(bf16::from_bits(bits));
      });
    const Rope& rope = args_.args.rope;
    if (is_key_ && rope.cos_sin && rope.first_dim >= Part::first_dim &&
        rope.first_dim < Part::first_dim + dims) {
      ctx_.sync();
      turn(token, begin);
    }
    if constexpr (rotates<Q>) {
      ctx_.sync();
      encoder_.template rotate<Q>(begin, rows);
    }
  }

  /// Rows [0, end): slots from `slot` on of a page of any format.
  KVF_INLINE KVF_HD void load_page(TableEntry from, int slot, int end) const {
    const FormatView& format = args_.view.formats[from.format()];
    const LoadedTile<Ctx> tile(ctx_, is_key_ ? format.keys : format.values,
                               is_key_ ? format.key_params : format.value_params, from.page(), head_,
                               is_key_ ? Layout::key_dim : Layout::value_dim, args_.view.page_tokens);
    const auto load = [&](const auto& quant) {
      each_thread(ctx_, end * dims, [&](int i) {
        const int row = i / dims, dim = i % dims;
        encoder_.set_value(row, dim, stored_value(quant, tile, slot + row, Part::first_dim + dim));
      });
    };
    visit_format(args_.view, from, [&](const auto& quant) {
      using From = std::remove_cvref_t<decltype(quant)>;
      constexpr bool are_alike = std::is_same_v<KeySide<From>, ValueSide<From>>;
      if constexpr (Share::side == SideKind::either && are_alike) {
        load(is_key_ ? key_side(quant) : value_side(quant));
      } else {
        if constexpr (Share::side != SideKind::values)
          if (is_key_) return load(key_side(quant));
        if constexpr (Share::side != SideKind::keys) load(value_side(quant));
      }
    });
  }

  /// As exact pages would hold them. Behind a barrier.
  KVF_INLINE KVF_HD void round(int count) const {
    using All = typename Quant::Exact;
    using Exact = std::conditional_t<Share::side == SideKind::values, ValueSide<All>, KeySide<All>>;
    static_assert(Share::side != SideKind::either ||
                  std::is_same_v<typename KeySide<All>::Code, typename ValueSide<All>::Code>);
    each_thread(ctx_, count * dims, [&](int i) {
      const int row = i / dims, dim = i % dims;
      encoder_.set_value(row, dim, static_cast<float>(Exact::round(encoder_.value(row, dim))));
    });
  }

  /// Encodes what was loaded, and brings it to pages; of a block, to its channels, too, which `first` is the
  /// first token's place for. Behind a barrier; what comes next must be, too.
  KVF_INLINE KVF_HD void write(Place first) const {
    if constexpr (Shape::is_exact) {
      using Code = typename Q::Code;
      each_thread_ahead<rows*(dims / 2)>(ctx_, [&](int i) {
        const int row = i / (dims / 2), pair = i % (dims / 2);
        if (!has(row)) return;
        const PairOf<Code> both{Q::round(encoder_.value(row, 2 * pair)),
                                Q::round(encoder_.value(row, 2 * pair + 1))};
        ctx_.store(target_of<PairOf<Code>>(row, 0) + pair, both);
      });
    } else {
      encoder_.encode(quant_, [&](int row) { return has(row); });
      store_rows<code_bytes<Q>(dims)>(encoder_.codes, 0);
      if constexpr (Shape::param_bytes > 0) store_rows<Shape::param_bytes>(encoder_.params, 1);
      if constexpr (Shape::is_block) store_channels(first);
    }
  }

 private:
  KVF_INLINE KVF_HD const FormatView& format() const { return args_.view.formats[Share::format]; }
  KVF_INLINE KVF_HD static std::uint64_t address(std::byte* pointer) {
    return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(pointer));
  }
  KVF_INLINE KVF_HD static SharedOffset target(int row, int plane) {
    return Shape::targets + 8 * static_cast<std::uint32_t>(plane * rows + row);
  }
  template <class T>
  KVF_INLINE KVF_HD T* target_of(int row, int plane) const {
    return reinterpret_cast<T*>(
        static_cast<std::uintptr_t>(ctx_.template load_shared<std::uint64_t>(target(row, plane))));
  }
  KVF_INLINE KVF_HD const PlaneView& param_plane() const {
    return is_key_ ? format().key_params : format().value_params;
  }
  KVF_INLINE KVF_HD std::byte* tile_params(Place at) const {
    return param_plane().tile(TableEntry{at.entry}.page(), head_);
  }
  KVF_INLINE KVF_HD std::int64_t param_stride() const {
    return Shape::is_block ? Shape::param_bytes : param_plane().slot_stride;
  }
  KVF_INLINE KVF_HD std::int64_t mean_bytes() const {
    if constexpr (is_centered<Q>)
      return Q::mean_bytes(dims, args_.view.page_tokens);
    else
      return 0;
  }

  /// Rotary embedding: a pair a thread.
  KVF_INLINE KVF_HD void turn(std::int64_t token, int begin) const {
    const Rope& rope = args_.args.rope;
    const int pairs = rope.dims / 2, first = rope.first_dim - Part::first_dim;
    each_thread(ctx_, (rows - begin) * pairs, [&](int i) {
      const int row = begin + i / pairs, j = i % pairs, even = (pairs + 1) / 2;
      if (!has(row)) return;
      // Neighbours of a warp have every second pair, whose numbers lie side by side.
      const int pair = rope.interleaved ? j : j < even ? 2 * j : 2 * (j - even) + 1;
      const int one = first + (rope.interleaved ? 2 * pair : pair);
      const int other = rope.interleaved ? one + 1 : one + pairs;
      const float* table =
          rope.cos_sin + std::int64_t{ctx_.load(rope.positions + token + row - begin)} * rope.dims;
      const float cosine = ctx_.load(table + pair), sine = ctx_.load(table + pairs + pair);
      const float x = encoder_.value(row, one), y = encoder_.value(row, other);
      encoder_.set_value(row, one, Rope::turn(x, cosine, -y, sine));
      encoder_.set_value(row, other, Rope::turn(y, cosine, x, sine));
    });
  }

  /// Rows of bytes, a unit a thread.
  template <int Bytes, class Rows>
  KVF_INLINE KVF_HD void store_rows(const Rows& from, int plane) const {
    using Unit = std::conditional_t<Rows::unit == 4, std::uint32_t,
                                    std::conditional_t<Rows::unit == 2, std::uint16_t, std::uint8_t>>;
    constexpr int units = Bytes / Rows::unit;
    each_thread_ahead<rows * units>(ctx_, [&](int i) {
      const int row = i / units, unit = i % units;
      if (Unit* to = target_of<Unit>(row, plane))
        ctx_.store(to + unit, ctx_.template load_shared<Unit>(from.at(row, unit * Rows::unit)));
    });
  }

  /// What a block's channels have, behind what earlier blocks of the page have.
  KVF_INLINE KVF_HD void store_channels(Place at) const {
    constexpr int bytes = channel_bytes<Q>;
    using Unit = std::conditional_t<bytes == 4, std::uint32_t, std::uint16_t>;
    static_assert(sizeof(Unit) == bytes);
    constexpr bool is_compact = bytes == 2 && !is_centered<Q>;
    constexpr std::int64_t of_block = (dims * bytes + (is_compact ? 4 : 0) + 3) / 4 * 4;
    std::byte* to = tile_params(at) + at.slot / Q::seal_tokens * (is_centered<Q> ? dims * bytes : of_block);
    if constexpr (is_compact) {
      if (ctx_.thread() == 0)
        ctx_.store(reinterpret_cast<std::uint32_t*>(to),
                   ctx_.template load_shared<std::uint32_t>(Shape::references));
      to += 4;
    }
    each_thread(ctx_, dims, [&](int dim) {
      ctx_.store(reinterpret_cast<Unit*>(to) + dim,
                 ctx_.template load_shared<Unit>(encoder_.channels.at(dim)));
    });
  }

  Ctx& ctx_;
  const WriteArgs<Layout, Quant>& args_;
  const bool is_key_;
  const Q& quant_;
  const int head_;
  const Encoder<Ctx, Shape> encoder_;
};

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
