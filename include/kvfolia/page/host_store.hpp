// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Host memory for pages.

#include <cstddef>
#include <cstdint>
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
#include "kvfolia/core/store_view.hpp"
#include "kvfolia/page/store_spec.hpp"

namespace kvfolia::inline KVF_ABI {

namespace detail {

inline constexpr std::int64_t cache_line_bytes = 64;
inline constexpr std::int64_t huge_page_bytes = std::int64_t{2} << 20;

/// Of a format's memory. Only what fills a huge page is worth the room that aligning it to one may cost.
constexpr std::int64_t store_alignment(std::int64_t bytes, bool huge_pages) {
  return huge_pages && bytes >= huge_page_bytes ? huge_page_bytes : cache_line_bytes;
}

}  // namespace detail

/// Owns the memory of all formats. Bytes start undefined.
class HostStore {
 public:
  /// Throws contract_error as store_view() does, std::bad_alloc when there is no memory for the pages.
  explicit HostStore(const StoreSpec& spec) : view_(store_view(spec)) {
    for (int f = 0; f < static_cast<int>(spec.formats.size()); ++f) {
      memory_.push_back(allocate(detail::store_bytes(view_, f), spec.huge_pages));
      view_.formats[f].base = memory_.back().get();
    }
  }

  /// Page 0 of one layer; null for a format without pages.
  std::byte* data(int format, int layer) const {
    const PageSlices& f = view_.formats[format];
    return f.base ? f.base + layer * f.layer_stride : nullptr;
  }

  /// Bytes between a layer's pages.
  std::int64_t page_stride(int format) const { return view_.formats[format].page_stride; }

  /// Bytes of one page over all layers.
  std::int64_t page_bytes(int format) const { return view_.formats[format].slice_bytes * view_.layers; }

  /// Carries out the copies of a batch; to be called before its tokens are appended. `exec` runs
  /// them, see cpu/executor.hpp.
  template <class Executor>
  void copy(std::span<const PageCopy> copies, Executor&& exec) noexcept {
    exec.parallel_for(static_cast<std::int64_t>(copies.size()), [&](std::int64_t i, int) {
      detail::copy_page(view_, copies[static_cast<std::size_t>(i)]);
    });
  }

 private:
  struct Free {
    std::align_val_t alignment;
    void operator()(std::byte* memory) const { ::operator delete(memory, alignment); }
  };
  using Memory = std::unique_ptr<std::byte, Free>;

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

  StoreView view_;
  std::vector<Memory> memory_;
};
static_assert(PageStore<HostStore>);

}  // namespace kvfolia::inline KVF_ABI
