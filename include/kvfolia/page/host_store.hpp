// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Host memory for pages.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/ids.hpp"

namespace kvfolia::inline KVF_ABI {

/// How the slices of pages and layers lie behind one another.
enum class StorageOrder : std::uint8_t {
  layer_major,  ///< [layer][page]: all pages of a layer together
  page_major,   ///< [page][layer]: a page is one run of bytes over all layers
};

namespace detail {

inline constexpr std::int64_t cache_line_bytes = 64;
inline constexpr std::int64_t huge_page_bytes = std::int64_t{2} << 20;

/// Of a format's memory. Only what fills a huge page is worth the room that aligning it to one may cost.
constexpr std::int64_t store_alignment(std::int64_t bytes, bool huge_pages) {
  return huge_pages && bytes >= huge_page_bytes ? huge_page_bytes : cache_line_bytes;
}

}  // namespace detail

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

/// Owns the memory of all formats. Bytes start undefined.
class HostStore {
 public:
  /// Throws contract_error when 64-bit byte offsets cannot address the pages, std::bad_alloc when
  /// there is no memory for them.
  explicit HostStore(const StoreSpec& spec) : layers_(spec.layers), order_(spec.order) {
    detail::require(spec.layers > 0, "layers must be positive");
    for (const StoreSpec::Format& format : spec.formats) {
      detail::require(format.slice_bytes >= 0 && format.pages >= 0, "pages must not be negative");
      const std::int64_t page_bytes = checked_product(format.slice_bytes, layers_);
      formats_.push_back({format.slice_bytes, format.pages,
                          allocate(checked_product(page_bytes, format.pages), spec.huge_pages)});
    }
  }

  /// Page 0 of one layer; null for a format without pages.
  std::byte* data(int format, int layer) const {
    const Format& f = formats_[static_cast<std::size_t>(format)];
    if (!f.memory) return nullptr;
    const std::int64_t slices = order_ == StorageOrder::layer_major ? layer * f.pages : layer;
    return f.memory.get() + slices * f.slice_bytes;
  }

  /// Bytes between a layer's pages.
  std::int64_t page_stride(int format) const {
    const Format& f = formats_[static_cast<std::size_t>(format)];
    return order_ == StorageOrder::layer_major ? f.slice_bytes : f.slice_bytes * layers_;
  }

  /// Bytes of one page over all layers.
  std::int64_t page_bytes(int format) const {
    return formats_[static_cast<std::size_t>(format)].slice_bytes * layers_;
  }

  /// Carries out the copies of a batch; to be called before its tokens are appended. `exec` runs
  /// them, see cpu/executor.hpp.
  template <class Executor>
  void copy(std::span<const PageCopy> copies, Executor&& exec) noexcept {
    exec.parallel_for(static_cast<std::int64_t>(copies.size()), [&](std::int64_t i, int) {
      const PageCopy& c = copies[static_cast<std::size_t>(i)];
      const Format& f = formats_[static_cast<std::size_t>(c.format)];
      const std::int64_t stride = page_stride(c.format);
      for (int layer = 0; layer < layers_; ++layer) {
        std::byte* base = data(c.format, layer);
        std::memcpy(base + c.to.value * stride, base + c.from.value * stride,
                    static_cast<std::size_t>(f.slice_bytes));
      }
    });
  }

 private:
  struct Free {
    std::align_val_t alignment;
    void operator()(std::byte* memory) const { ::operator delete(memory, alignment); }
  };
  using Memory = std::unique_ptr<std::byte, Free>;
  struct Format {
    std::int64_t slice_bytes;
    std::int64_t pages;
    Memory memory;
  };

  static std::int64_t checked_product(std::int64_t a, std::int64_t b) {
    detail::require(b == 0 || a <= std::numeric_limits<std::int64_t>::max() / 2 / b,
                    "pages: the bytes of all pages must fit 64 bits");
    return a * b;
  }

  static Memory allocate(std::int64_t bytes, bool huge) {
    const std::int64_t alignment = detail::store_alignment(bytes, huge);
    const std::int64_t rounded =
        (bytes + detail::cache_line_bytes - 1) / detail::cache_line_bytes * detail::cache_line_bytes;
    if (rounded == 0) return {};
    const auto aligned = static_cast<std::align_val_t>(alignment);
    Memory memory(
        static_cast<std::byte*>(::operator new(static_cast<std::size_t>(rounded), aligned, std::nothrow)),
        Free{aligned});
    if (!memory) detail::out_of_memory();
#if defined(__linux__)
    // Before anything is touched, and whole huge pages only: what follows the last may be others'. A system
    // that refuses gives ordinary pages.
    if (const std::int64_t whole = bytes / alignment * alignment; alignment == detail::huge_page_bytes)
      ::madvise(memory.get(), static_cast<std::size_t>(whole), MADV_HUGEPAGE);
#endif
    return memory;
  }

  std::vector<Format> formats_;
  std::int32_t layers_;
  StorageOrder order_;
};
static_assert(PageStore<HostStore>);

}  // namespace kvfolia::inline KVF_ABI
