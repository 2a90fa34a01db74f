// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Whole pages of a store, as what moves them sees them: bytes, without layouts or quantizers.

#include <cstddef>
#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/ids.hpp"

namespace kvfolia::inline KVF_ABI {

/// The pages of one format: the slice of a layer is at base + layer * layer_stride + page * page_stride, in
/// bytes.
struct PageSlices {
  std::byte* base = nullptr;
  std::int64_t layer_stride = 0;
  std::int64_t page_stride = 0;
  std::int64_t slice_bytes = 0;  ///< of one page and layer
  std::int64_t pages = 0;

  KVF_HD std::byte* slice(int layer, PageId page) const {
    KVF_ASSERT(0 <= page.value && page.value < pages);
    return base + layer * layer_stride + page.value * page_stride;
  }
};

/// All formats. Trivially copyable; owns nothing.
struct StoreView {
  PageSlices formats[TableEntry::max_formats]{};
  std::int32_t layers = 1;
};

}  // namespace kvfolia::inline KVF_ABI
