// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Writing pages: new tokens into their slots, and pages that change their format. The bodies of the kernels,
// and what the host checks.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kvfolia/core/attend_args.hpp"
#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/core/tensor.hpp"
#include "kvfolia/cuda/append_args.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/encode.hpp"
#include "kvfolia/cuda/page_values.hpp"
#include "kvfolia/cuda/plan.hpp"
#include "kvfolia/layout/orders.hpp"

namespace kvfolia::inline KVF_ABI::cuda {
namespace detail {

/// Two neighbours.
template <class T>
struct alignas(2 * sizeof(T)) PairOf {
  T first;
  T second;
};

/// One block's tile, from the tensor or other pages by way of shared memory into pages.
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

/// Called by all of a warp, which reads it once.
template <class Ctx>
KVF_INLINE KVF_HD PageRecode load_recode(Ctx& ctx, const PageRecode* from) {
  static_assert(sizeof(PageRecode) == 5 * sizeof(std::int32_t));
  std::int32_t field = 0;
  if (ctx.lane() < 5) field = ctx.load(reinterpret_cast<const std::int32_t*>(from) + ctx.lane());
  return {
      {ctx.shfl(field, 0)}, {ctx.shfl(field, 1)}, ctx.shfl(field, 2), ctx.shfl(field, 3), ctx.shfl(field, 4)};
}

/// Calls f(Share, whether it is the second side) with the share of this block.
template <class Ctx, class F, class... S>
KVF_INLINE KVF_HD void with_share(Ctx& ctx, TypeList<S...>, const F& f) {
  int number = ctx.block_z();
  const auto count = [&](auto share) {
    if (0 <= number && number < decltype(share)::sides) f(share, number == 1);
    number -= decltype(share)::sides;
  };
  (count(S()), ...);
}

template <class Share, class View>
Result<> check_planes_of(const View& view) {
  using kvfolia::detail::bad_argument;
  using kvfolia::detail::is_aligned;
  using Shape = typename Share::Part::Shape;
  const FormatView& format = view.formats[Share::format];
  if (format.pages == 0) return {};
  int unit = Shape::Codes::unit;
  if constexpr (Shape::is_exact) unit = 2 * static_cast<int>(sizeof(typename Share::Part::Quant::Code));
  const int param_unit = Shape::is_block ? 4 : Shape::param_bytes > 0 ? Shape::Params::unit : 1;
  const bool in_codes = Share::Part::first_code % unit == 0,
             in_params = Share::Part::first_param % param_unit == 0;
  if (Share::side != SideKind::values) {
    if (!is_aligned(format.keys, unit) || !in_codes)
      return bad_argument("view.formats.keys (alignment)", 0, unit);
    if (!is_aligned(format.key_params, param_unit) || !in_params)
      return bad_argument("view.formats.key_params (alignment)", 0, param_unit);
  }
  if (Share::side != SideKind::keys) {
    if (!is_aligned(format.values, unit) || !in_codes)
      return bad_argument("view.formats.values (alignment)", 0, unit);
    if (!is_aligned(format.value_params, param_unit) || !in_params)
      return bad_argument("view.formats.value_params (alignment)", 0, param_unit);
  }
  return {};
}
template <class View, class... S>
Result<> check_planes(const View& view, TypeList<S...>) {
  Result<> ok;
  static_cast<void>(((ok = check_planes_of<S>(view)) && ...));
  return ok;
}

/// Whether pages and rows begin where kernels may read and write them.
template <class Layout, class Quant>
Result<> check_write_alignment(const PagedView<Layout, Quant>& view, const AppendArgs& args) {
  using kvfolia::detail::bad_argument;
  using kvfolia::detail::is_aligned;
  const auto pairs = [](const ConstTensor& t) {
    const std::uintptr_t element = t.type == DType::fp32 ? 4 : 2;
    return reinterpret_cast<std::uintptr_t>(t.data) % (2 * element) == 0 && t.token_stride % 2 == 0 &&
           t.head_stride % 2 == 0;
  };
  if (!pairs(args.keys)) return bad_argument("args.keys (alignment: two numbers)");
  if (!Layout::shares_key_value && !pairs(args.values))
    return bad_argument("args.values (alignment: two numbers)");
  return check_planes(view, Shares<Layout, Quant, WriteKind::recodes>());
}

/// Whether some of the dims that are rotated are coded apart from others.
template <class... S>
bool is_torn(const Rope& rope, TypeList<S...>) {
  const auto torn = [&](SideKind side, int first, int end) {
    return side != SideKind::values && first <= rope.first_dim && rope.first_dim < end &&
           rope.first_dim + rope.dims > end;
  };
  return (torn(S::side, S::Part::first_dim, S::Part::first_dim + S::Part::dims) || ...);
}
template <class Layout, class Quant>
Result<> check_rope(const PagedView<Layout, Quant>&, const Rope& rope) {
  using kvfolia::detail::bad_argument;
  if (auto ok = kvfolia::detail::validate(rope, Layout::key_dim); !ok) return ok;
  if (!rope.cos_sin) return {};
  return is_torn(rope, Shares<Layout, Quant, WriteKind::recodes>())
             ? bad_argument("args.rope (dims of two sections)", rope.first_dim, rope.dims)
             : Result<>();
}

/// Everything that append() could be given wrongly and the host can see.
template <class Layout, class Quant>
Result<> check_write(const PagedView<Layout, Quant>& view, const BatchView& batch, const AppendArgs& args,
                     std::int32_t tokens) {
  using kvfolia::detail::bad_argument;
  if (auto ok = validate(view); !ok) return ok;
  constexpr std::int64_t most_heads = 65535;  // of a grid's second dimension
  if (view.kv_heads > most_heads) return bad_argument("view.kv_heads", view.kv_heads, most_heads);
  if (tokens < 0) return bad_argument("config.tokens", tokens);
  if (batch.recode_count < 0 || (batch.recode_count > 0 && !batch.recodes))
    return bad_argument("batch.recodes", batch.recode_count);
  if (tokens > 0) {
    if (!batch.slots) return bad_argument("batch.slots");
    if (!args.keys.data) return bad_argument("args.keys");
    if (!Layout::shares_key_value && !args.values.data) return bad_argument("args.values");
  }
  if (auto ok = check_write_alignment(view, args); !ok) return ok;
  return check_rope(view, args.rope);
}

}  // namespace detail

/// How much append() is given, as far as the host must know.
struct AppendConfig {
  std::int32_t tokens = 0;  ///< slots in batch.slots; those that are none of the batch are -1
};

/// Whether append() can do it: in slot-major order, an even number of dims, and every quantizer but blocks of
/// tokens of one's own.
template <class Layout, class Quant>
constexpr bool append_supported() {
  if constexpr (!std::is_same_v<typename Layout::KeyOrder, SlotMajor> ||
                !std::is_same_v<typename Layout::ValueOrder, SlotMajor>)
    return false;
  else
    return detail::writes_all(detail::Shares<Layout, Quant, detail::WriteKind::recodes>()) &&
           (format_count<Quant> == 1 ||
            (detail::reads_keys<Layout, Quant>() && detail::reads_values<Layout, Quant>()));
}

/// New tokens of formats that are coded token by token: a block has up to 32 tokens (x) of a head (y).
template <class Ctx, class Layout, class Quant>
KVF_HD void write_tokens(Ctx& ctx, const detail::WriteArgs<Layout, Quant>& args) {
  using namespace detail;
  with_share(ctx, Shares<Layout, Quant, WriteKind::tokens>(), [&](auto share, bool second) {
    using Share = decltype(share);
    const PageWriter<Ctx, Layout, Quant, Share> writer(ctx, args, second);
    constexpr int rows = Share::Part::Shape::rows;
    // Shares of more rows than the grid counts with leave some blocks nothing to do.
    const std::int64_t first = std::int64_t{ctx.block_x()} * rows;
    if (first >= args.tokens) return;
    if (ctx.thread() < rows) {
      Place place{-1, 0};
      const std::int64_t token = first + ctx.thread();
      if (token < args.tokens) {
        const PhysSlot slot{ctx.load(args.slots + token)};
        if (!slot.absent()) {
          const TableEntry entry = slot.entry(args.view.page_tokens);
          KVF_ASSERT(entry.format() < format_count<Quant>);
          if (entry.format() == Share::format) place = {entry.raw, slot.slot(args.view.page_tokens)};
        }
      }
      writer.set_place(ctx.thread(), place);
    }
    ctx.sync();
    static_assert(rows <= warp_size);
    if (!ctx.any(ctx.lane() < rows && writer.has(ctx.lane()))) return;  // of another format, or nowhere
    writer.load_tokens(first, 0);
    ctx.sync();
    writer.write({});
  });
}

/// Pages that change their format, or that are coded as a whole: a block has a head (y) of one recode (x).
template <class Ctx, class Layout, class Quant>
KVF_HD void write_recodes(Ctx& ctx, const detail::WriteArgs<Layout, Quant>& args) {
  using namespace detail;
  const PageRecode job = load_recode(ctx, args.recodes + ctx.block_x());
  if (job.to.absent()) return;
  with_share(ctx, Shares<Layout, Quant, WriteKind::recodes>(), [&](auto share, bool second) {
    using Share = decltype(share);
    if (job.to.format() != Share::format) return;
    const PageWriter<Ctx, Layout, Quant, Share> writer(ctx, args, second);
    constexpr int rows = Share::Part::Shape::rows;
    const int filled = job.kept + job.new_tokens;
    for (int first = 0; first < filled; first += rows) {
      const int count = filled - first < rows ? filled - first : rows;
      const int left = job.kept - first;
      const int kept = left < 0 ? 0 : left < count ? left : count;
      if (ctx.thread() < rows)
        writer.set_place(ctx.thread(), {ctx.thread() < count ? job.to.raw : -1, first + ctx.thread()});
      ctx.sync();
      if (kept > 0) writer.load_page(job.from, first, kept);
      if (kept < count) writer.load_tokens(std::int64_t{job.first_token} + first + kept - job.kept, kept);
      ctx.sync();
      writer.round(count);
      ctx.sync();
      writer.write({job.to.raw, first});
      ctx.sync();
    }
  });
}

}  // namespace kvfolia::inline KVF_ABI::cuda
