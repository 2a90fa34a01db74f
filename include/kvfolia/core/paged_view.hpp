// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// One layer's pages as a kernel sees them: bases and strides, nothing owned.

#include <cstddef>
#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/page_format.hpp"
#include "kvfolia/core/tile.hpp"

namespace kvfolia::inline KVF_ABI {

/// Where the tiles of one plane are: base + page * page_stride + head * head_stride, in bytes.
/// slot_stride is the bytes between slots; it is read for SlotMajor codes and for the parameters of tokens.
/// Those of blocks lie behind one another.
struct PlaneView {
  std::byte* base = nullptr;
  std::int64_t page_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t slot_stride = 0;

  KVF_HD std::byte* tile(PageId page, int head) const {
    return base + page.value * page_stride + head * head_stride;
  }
};

/// The planes of one format. Layouts that share key and value leave the value planes empty.
struct FormatView {
  PlaneView keys{};
  PlaneView values{};
  PlaneView key_params{};
  PlaneView value_params{};
  std::int32_t pages = 0;
};

namespace detail {

/// Whether a part of a stored key is the stored form of that part.
template <class Layout, class Quant>
inline constexpr bool shares_rotation = [] {
  using Key = KeySide<FormatQuant<coded_format, Quant>>;
  if constexpr (!Layout::shares_key_value || !rotates<Key>)
    return true;
  else
    return Key::block(Layout::key_dim) == Key::block(Layout::value_dim) &&
           Layout::value_dim % Key::block(Layout::value_dim) == 0;
}();

/// Whether all formats can code vectors of the layout's dims.
template <class Layout, class Quant, int Format = 0>
constexpr bool keys_fit() {
  if constexpr (Format == format_count<Quant>)
    return true;
  else
    return fits<KeySide<FormatQuant<Format, Quant>>>(Layout::key_dim) &&
           keys_fit<Layout, Quant, Format + 1>();
}
template <class Layout, class Quant, int Format = 0>
constexpr bool values_fit() {
  if constexpr (Format == format_count<Quant> || Layout::shares_key_value)
    return true;
  else
    return fits<ValueSide<FormatQuant<Format, Quant>>>(Layout::value_dim) &&
           values_fit<Layout, Quant, Format + 1>();
}

}  // namespace detail

/// Trivially copyable; passed by value. Comes from PagedCache::view, or is filled in by an engine
/// that has pages of its own: a base and strides for every plane describe `[page][slot][head][dim]`
/// as well as `[page][head][slot][dim]`, joint pools as well as split ones.
template <LayoutPolicy LayoutT, QuantPolicy QuantT>
struct PagedView {
  using Layout = LayoutT;
  using Quant = QuantT;
  static constexpr int formats_count = format_count<Quant>;
  static_assert(detail::keys_fit<Layout, Quant>(), "the quantizer of keys cannot code so many dims");
  static_assert(detail::values_fit<Layout, Quant>(), "the quantizer of values cannot code so many dims");
  static_assert(detail::shares_rotation<Layout, Quant>,
                "a value that is a part of the key must be rotated in whole blocks: Rotated<Q, Block>");

  FormatView formats[formats_count]{};
  int kv_heads = 1;
  int page_tokens = Layout::page_tokens;
  Window window{};  ///< what the eviction policy lets a query see
  Quant quant{};

  KVF_INLINE KVF_HD Tile<typename Layout::KeyOrder, std::byte> key_tile(TableEntry entry, int head) const {
    const FormatView& f = format(entry, head);
    return tile<typename Layout::KeyOrder, Layout::key_dim>(f.keys, f.key_params, entry, head);
  }
  KVF_INLINE KVF_HD Tile<typename Layout::ValueOrder, std::byte> value_tile(TableEntry entry,
                                                                            int head) const {
    static_assert(!Layout::shares_key_value, "the value is a part of the key: decode that");
    const FormatView& f = format(entry, head);
    return tile<typename Layout::ValueOrder, Layout::value_dim>(f.values, f.value_params, entry, head);
  }

 private:
  KVF_INLINE KVF_HD const FormatView& format(TableEntry entry, int head) const {
    KVF_ASSERT(!entry.absent() && entry.format() < formats_count);
    KVF_ASSERT(entry.page().value < formats[entry.format()].pages);
    KVF_ASSERT(0 <= head && head < kv_heads);
    static_cast<void>(head);
    return formats[entry.format()];
  }

  template <class Order, int Dims>
  KVF_INLINE KVF_HD Tile<Order, std::byte> tile(const PlaneView& codes, const PlaneView& params,
                                                TableEntry entry, int head) const {
    return {codes.tile(entry.page(), head),
            params.tile(entry.page(), head),
            Dims,
            page_tokens,
            codes.slot_stride,
            params.slot_stride};
  }
};

/// Calls f with the quantizer of an entry's format.
template <class Layout, class Quant, class F>
KVF_INLINE KVF_HD decltype(auto) visit_format(const PagedView<Layout, Quant>& view, TableEntry entry, F&& f) {
  if constexpr (1 < format_count<Quant>) {
    if (entry.format() == 1) return f(format_quant<1>(view.quant));
  }
  if constexpr (2 < format_count<Quant>) {
    if (entry.format() == 2) return f(format_quant<2>(view.quant));
  }
  return f(format_quant<0>(view.quant));
}

namespace detail {

/// Whether everything in a plane begins at a multiple of so many bytes.
KVF_INLINE bool is_aligned(const PlaneView& plane, std::int64_t to) {
  return reinterpret_cast<std::uintptr_t>(plane.base) % static_cast<std::uintptr_t>(to) == 0 &&
         plane.page_stride % to == 0 && plane.head_stride % to == 0 && plane.slot_stride % to == 0;
}

/// Checks the planes of one side of a format that has pages.
template <class Order, class Q>
KVF_INLINE Result<> validate(const PlaneView& codes, const PlaneView& params, int dims, int page_tokens,
                             const char* subject) {
  const std::int64_t param_bytes = Q::param_bytes(dims, page_tokens);
  const bool several = page_tokens > 1;
  // The parameters of blocks lie behind one another; those of tokens may be an engine's own.
  const bool strided_params = param_bytes > 0 && several && Q::seal_tokens == 1;
  const bool complete = codes.base && (!Order::strided || !several || codes.slot_stride != 0) &&
                        (param_bytes == 0 || params.base) && (!strided_params || params.slot_stride != 0);
  const bool whole = is_aligned(codes, code_alignment<Q>()) &&
                     (param_bytes == 0 || is_aligned(params, param_alignment<Q>()));
  return complete && whole ? Result<>() : bad_argument(subject);
}

/// Checks one format.
template <LayoutPolicy Layout, QuantPolicy Quant>
KVF_INLINE Result<> validate(const FormatView& format, int page_tokens) {
  if (format.pages < 0 || format.pages > TableEntry::max_pages)
    return bad_argument("view.formats.pages", format.pages, TableEntry::max_pages);
  if (format.pages == 0) return {};
  if (auto ok = validate<typename Layout::KeyOrder, KeySide<Quant>>(
          format.keys, format.key_params, Layout::key_dim, page_tokens, "view.formats.keys");
      !ok)
    return ok;
  if (Layout::shares_key_value) return {};
  return validate<typename Layout::ValueOrder, ValueSide<Quant>>(
      format.values, format.value_params, Layout::value_dim, page_tokens, "view.formats.values");
}

template <int Format, class Layout, class Quant>
KVF_INLINE Result<> validate_formats(const PagedView<Layout, Quant>& view) {
  auto ok = validate<Layout, FormatQuant<Format, Quant>>(view.formats[Format], view.page_tokens);
  if constexpr (Format + 1 < format_count<Quant>)
    if (ok) return validate_formats<Format + 1>(view);
  return ok;
}

}  // namespace detail

/// Says what is wrong with a view that somebody filled in by hand. A plane is named when its base, a
/// stride between its slots, or that of its parameters is missing, or when one of them would tear
/// elements apart.
template <class Layout, class Quant>
KVF_INLINE Result<> validate(const PagedView<Layout, Quant>& view) {
  if (view.kv_heads <= 0) return detail::bad_argument("view.kv_heads", view.kv_heads, 1);
  if (!page_tokens_fit<Layout>(view.page_tokens))
    return detail::bad_argument("view.page_tokens", view.page_tokens, Layout::page_tokens);
  if (!blocks_fit<Quant>(view.page_tokens))
    return detail::bad_argument("view.page_tokens (the quantizer codes blocks)", view.page_tokens,
                                detail::largest_block<Quant>);
  return detail::validate_formats<0>(view);
}

}  // namespace kvfolia::inline KVF_ABI
