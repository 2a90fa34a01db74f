// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// One layer's pages as a kernel sees them: bases and strides, nothing owned.

#include <cstddef>
#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/page_format.hpp"
#include "kvfolia/core/tile.hpp"

namespace kvfolia::inline KVF_ABI {

/// Where the tiles of one plane are: base + page * page_stride + head * head_stride, in bytes.
/// slot_stride is the bytes between slots; it is read for SlotMajor codes and for parameters.
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

/// Trivially copyable; passed by value. Comes from PagedCache::view, or is filled in by an engine
/// that has pages of its own: a base and strides for every plane describe `[page][slot][head][dim]`
/// as well as `[page][head][slot][dim]`, joint pools as well as split ones.
template <LayoutPolicy LayoutT, QuantPolicy QuantT>
struct PagedView {
  using Layout = LayoutT;
  using Quant = QuantT;
  static constexpr int formats_count = format_count<Quant>;

  FormatView formats[formats_count]{};
  int kv_heads = 1;
  int page_tokens = Layout::page_tokens;
  Window window{};  ///< what the eviction policy lets a query see
  Quant quant{};

  KVF_HD Tile<typename Layout::KeyOrder, std::byte> key_tile(TableEntry entry, int head) const {
    const FormatView& f = format(entry, head);
    return tile<typename Layout::KeyOrder, Layout::key_dim>(f.keys, f.key_params, entry, head);
  }
  KVF_HD Tile<typename Layout::ValueOrder, std::byte> value_tile(TableEntry entry, int head) const {
    static_assert(!Layout::shares_key_value, "the value is a part of the key: decode that");
    const FormatView& f = format(entry, head);
    return tile<typename Layout::ValueOrder, Layout::value_dim>(f.values, f.value_params, entry, head);
  }

 private:
  KVF_HD const FormatView& format(TableEntry entry, int head) const {
    KVF_ASSERT(!entry.absent() && entry.format() < formats_count);
    KVF_ASSERT(entry.page().value < formats[entry.format()].pages);
    KVF_ASSERT(0 <= head && head < kv_heads);
    static_cast<void>(head);
    return formats[entry.format()];
  }

  template <class Order, int Dims>
  KVF_HD Tile<Order, std::byte> tile(const PlaneView& codes, const PlaneView& params, TableEntry entry,
                                     int head) const {
    const int bits = entry.format() == coded_format ? Quant::code_bits : Quant::Exact::code_bits;
    return {codes.tile(entry.page(), head),
            params.tile(entry.page(), head),
            {Dims, page_tokens, codes.slot_stride * 8 / bits},
            params.slot_stride};
  }
};

/// Calls f with the quantizer of an entry's format: `view.quant`, or its Exact.
template <class Layout, class Quant, class F>
KVF_INLINE KVF_HD decltype(auto) visit_format(const PagedView<Layout, Quant>& view, TableEntry entry, F&& f) {
  if constexpr (format_count<Quant> == 1) {
    return f(view.quant);
  } else {
    if (entry.format() == coded_format) return f(view.quant);
    return f(typename Quant::Exact{});
  }
}

namespace detail {

/// Checks the planes of a format that has pages.
template <LayoutPolicy Layout, QuantPolicy Quant>
KVF_INLINE Result<> validate(const FormatView& format, int page_tokens) {
  if (format.pages < 0 || format.pages > TableEntry::max_pages)
    return bad_argument("view.formats.pages", format.pages, TableEntry::max_pages);
  if (format.pages == 0) return {};
  const bool params = Quant::param_bytes(Layout::key_dim, page_tokens) > 0;
  constexpr std::int64_t element = Quant::code_bits >= 8 ? Quant::code_bits / 8 : 1;
  std::int64_t parameter = 1;
  if constexpr (requires { typename Quant::Param; }) parameter = alignof(typename Quant::Param);
  const auto aligned = [](const PlaneView& p, std::int64_t to) {
    return reinterpret_cast<std::uintptr_t>(p.base) % static_cast<std::uintptr_t>(to) == 0 &&
           p.page_stride % to == 0 && p.head_stride % to == 0 && p.slot_stride % to == 0;
  };
  const auto plane = [&](const PlaneView& codes, const PlaneView& parameters, bool strided,
                         const char* subject) {
    const bool several = page_tokens > 1;
    const bool complete = codes.base && (!strided || !several || codes.slot_stride != 0) &&
                          (!params || (parameters.base && (!several || parameters.slot_stride != 0)));
    const bool whole = aligned(codes, element) && (!params || aligned(parameters, parameter));
    return complete && whole ? Result<>() : bad_argument(subject);
  };
  if (auto ok = plane(format.keys, format.key_params, Layout::KeyOrder::strided, "view.formats.keys"); !ok)
    return ok;
  if (Layout::shares_key_value) return {};
  return plane(format.values, format.value_params, Layout::ValueOrder::strided, "view.formats.values");
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
  if (auto ok = detail::validate<Layout, Quant>(view.formats[coded_format], view.page_tokens); !ok) return ok;
  if constexpr (exact_format<Quant> != coded_format)
    return detail::validate<Layout, typename Quant::Exact>(view.formats[exact_format<Quant>],
                                                           view.page_tokens);
  return {};
}

}  // namespace kvfolia::inline KVF_ABI
