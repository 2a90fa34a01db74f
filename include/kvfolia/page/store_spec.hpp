// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What a store has to hold, and where pages lie in it.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/store_view.hpp"

namespace kvfolia::inline KVF_ABI {

/// How the slices of pages and layers lie behind one another.
enum class StorageOrder : std::uint8_t {
  layer_major,  ///< [layer][page]: all pages of a layer together
  page_major,   ///< [page][layer]: a page is one run of bytes over all layers
};

/// What a store has to hold.
struct StoreSpec {
  struct Format {
    std::int64_t slice_bytes = 0;  ///< of one page and layer
    std::int64_t pages = 0;
  };
  std::vector<Format> formats{};
  std::int32_t layers = 1;
  StorageOrder order = StorageOrder::layer_major;
  bool huge_pages = false;  ///< asks the system for 2 MiB pages, for formats that fill some: a wish, not
                            ///< a demand
};

/// Strides of a store that has one run of bytes a format; bases are null. Throws contract_error when 64-bit
/// byte offsets cannot address the pages.
inline StoreView store_view(const StoreSpec& spec) {
  const auto product = [](std::int64_t a, std::int64_t b) {
    detail::require(b == 0 || a <= std::numeric_limits<std::int64_t>::max() / 2 / b,
                    "pages: the bytes of all pages must fit 64 bits");
    return a * b;
  };
  detail::require(spec.layers > 0, "layers must be positive");
  detail::require(spec.formats.size() <= TableEntry::max_formats, "a store has three formats at most");
  StoreView view;
  view.layers = spec.layers;
  for (std::size_t f = 0; f < spec.formats.size(); ++f) {
    const auto [slice_bytes, pages] = spec.formats[f];
    detail::require(slice_bytes >= 0 && pages >= 0, "pages must not be negative");
    const std::int64_t page_bytes = product(slice_bytes, spec.layers);
    product(page_bytes, pages);
    const bool by_layer = spec.order == StorageOrder::layer_major;
    view.formats[f] = {nullptr, by_layer ? slice_bytes * pages : slice_bytes,
                       by_layer ? slice_bytes : page_bytes, slice_bytes, pages};
  }
  return view;
}

namespace detail {

/// Of one format, all layers.
inline std::int64_t store_bytes(const StoreView& view, int format) {
  const PageSlices& f = view.formats[format];
  return f.slice_bytes * f.pages * view.layers;
}

/// All layers of a page, in the host's memory.
inline void copy_page(const StoreView& view, const PageCopy& copy) {
  const PageSlices& f = view.formats[copy.format];
  for (int layer = 0; layer < view.layers; ++layer)
    std::memcpy(f.slice(layer, copy.to), f.slice(layer, copy.from), static_cast<std::size_t>(f.slice_bytes));
}

}  // namespace detail
}  // namespace kvfolia::inline KVF_ABI
